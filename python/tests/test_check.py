"""refit.check: perturb, refit, compare. What it finds wrong is made wrong here by hand."""
import concurrent.futures
import json
import types

import numpy as np
import pytest

import refit
from refit.numerics import Values, decode, encode


def arrays(plan, rank, seed=None):
    """Tensors of a rank, random or zero."""
    random = np.random.default_rng(seed)
    return {name: (np.zeros(info.shape) if seed is None else random.standard_normal(info.shape))
            .astype(refit.tensors.numpy_dtype(info.dtype)) for name, info in plan.tensors(rank).items()}


class World:
    """All ranks of a plan as threads."""

    def __init__(self, plan, tensors, hooks=(), changes=lambda rank, held: None):
        self.plan, self.tensors = plan, tensors
        fabric = refit.LocalFabric(plan.world_size)
        self.executors = [refit.Executor(plan, rank, fabric=fabric) for rank in range(plan.world_size)]
        self.on_all(lambda rank: self.executors[rank].bind(
            tensors[rank], hooks=hooks if rank >= plan.source_ranks else (), changes=changes(rank, tensors[rank]), timeout=20))

    def on_all(self, call):
        with concurrent.futures.ThreadPoolExecutor(self.plan.world_size) as threads:
            return [found.result() for found in [threads.submit(call, rank) for rank in range(self.plan.world_size)]]

    @property
    def sources(self):
        return self.tensors[:self.plan.source_ranks]

    def check(self, reference=None, **options):
        """Reports of the destination ranks."""
        def part(rank):
            executor = self.executors[rank]
            if rank < self.plan.source_ranks:
                return executor.run(timeout=20)
            return refit.check(executor, self.sources if reference is None else reference, timeout=20, **options)
        return self.on_all(part)[self.plan.source_ranks:]


@pytest.fixture
def tiny(tiny_job):
    plan = refit.compile(tiny_job)
    tensors = [arrays(plan, rank, seed=rank if rank < 2 else None) for rank in range(plan.world_size)]
    tensors[1]["norm.weight"][:] = tensors[0]["norm.weight"]
    return World(plan, tensors)


def whole(tiny):
    return {"layers.0.weight": np.concatenate([held["layers.0.weight"] for held in tiny.sources]),
            "layers.1.weight": np.concatenate([held["layers.1.weight"] for held in tiny.sources]),
            "norm.weight": tiny.sources[0]["norm.weight"]}


def test_a_right_refit_is_ok_by_each_kind_of_reference(tiny, tmp_path):
    for refits, reference in enumerate([None, whole(tiny), write_checkpoint(tmp_path, whole(tiny))], 1):
        for rank, report in zip((2, 3), tiny.check(reference)):
            assert report.ok and report.perturbed
            assert (report.rank, report.refits, report.tensors, report.elements) == (rank, refits, 3, 8 * 3 * 2 + 6)
            assert str(report) == (f"rank {rank} holds what the plan says: 3 tensors, 54 elements, after refit {refits}, before "
                                   "which all was overwritten")


def write_checkpoint(directory, tensors):
    """A safetensors file of fp32 tensors."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [len(data), len(data) + tensor.nbytes]}
        data += tensor.tobytes()
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return directory


def test_a_wrong_element_is_named_with_param_rank_index_found_and_wanted(tiny):
    assert all(report.ok for report in tiny.check())
    held = tiny.tensors[3]["layers.1.weight"]
    wanted = held[5, 2]
    held[5, 2] = held[6, 0] = 0.5
    (mismatch,) = refit.check(tiny.executors[3], whole(tiny), refit=False).mismatches
    bits = f"{wanted:.9g} (0x{int(wanted.view(np.uint32)):08x})"
    assert mismatch == refit.Mismatch("layers.1.weight", "layers.1.weight", 3, (5, 2), (5, 5), "0.5 (0x3f000000)", bits, 2, 24)
    report = refit.check(tiny.executors[3], whole(tiny), refit=False)
    assert not report.ok and not report.perturbed
    assert str(report).splitlines()[1:] == [
        "differ: 1", f"  layers.1.weight of rank 3: 2 of 24 elements differ; the first, [5, 2], is layers.1.weight[5, 5], found "
        f"0.5 (0x3f000000), wanted {bits}"]
    assert refit.check(tiny.executors[2], whole(tiny), refit=False).ok


def test_a_difference_of_the_sign_of_zero_is_one(tiny):
    tiny.sources[0]["norm.weight"][:] = tiny.sources[1]["norm.weight"][:] = 0.0
    assert all(report.ok for report in tiny.check())
    tiny.tensors[2]["norm.weight"][4] = -0.0
    (mismatch,) = refit.check(tiny.executors[2], tiny.sources, refit=False).mismatches
    assert (mismatch.index, mismatch.found, mismatch.wanted) == ((4,), "-0 (0x80000000)", "0 (0x00000000)")


def test_a_reference_that_the_trainers_do_not_hold_differs(tiny):
    other = {name: tensor + 1 for name, tensor in whole(tiny).items()}
    for report in tiny.check(other):
        assert sorted((mismatch.tensor, mismatch.wrong) for mismatch in report.mismatches) == [
            ("layers.0.weight", 24), ("layers.1.weight", 24), ("norm.weight", 6)]


def test_what_was_right_by_chance_is_written_all_the_same(tiny):
    """Every bit is inverted before the refit: a refit that wrote nothing would be seen."""
    assert all(report.ok for report in tiny.check())
    right = {name: tensor.copy() for name, tensor in tiny.tensors[2].items()}
    seen = []
    run = tiny.executors[2].run
    tiny.executors[2].run = lambda **options: (seen.append({n: t.copy() for n, t in tiny.tensors[2].items()}), run(**options))
    assert all(report.ok for report in tiny.check())
    for name, tensor in right.items():
        assert (seen[0][name].view(np.uint32) == ~tensor.view(np.uint32)).all()


def test_what_the_worker_holds_beyond_the_plan_is_listed(tiny):
    norm = tiny.tensors[2]["norm.weight"]
    live = {**tiny.tensors[2], "alias": norm, "cache": np.zeros((2, 3), np.float16)}
    report = tiny.check(live=None)[0]
    assert report.beyond == []
    report = refit.check(tiny.executors[2], tiny.sources, live=live, refit=False)
    assert report.ok
    assert report.beyond == [refit.Beyond("alias", "fp32", (6,), "the memory of norm.weight"),
                             refit.Beyond("cache", "fp16", (2, 3), "no tensor of the plan")]
    assert str(report).splitlines()[1:] == ["beyond the plan: 2", "  alias fp32 [6]: the memory of norm.weight",
                                            "  cache fp16 [2, 3]: no tensor of the plan"]
    assert refit.Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_a_worker_that_holds_another_tensor_than_the_bound_one_is_not_ok(tiny):
    tiny.check()
    live = {**tiny.tensors[2], "norm.weight": tiny.tensors[2]["norm.weight"].copy()}
    del live["layers.0.weight"]
    report = refit.check(tiny.executors[2], tiny.sources, live=live, refit=False)
    assert not report.ok and report.tensors == 1
    assert report.unchecked == {
        "layers.0.weight": "the worker does not hold it any more",
        "norm.weight": "the worker holds another tensor than the one that was bound: bind again"}
    assert "rank 2 was not compared as a whole" in str(report)


def test_what_the_reference_lacks_is_not_compared_and_not_ok(tiny):
    reference = whole(tiny)
    del reference["layers.1.weight"]
    reference["norm.weight"] = reference["norm.weight"][:5]
    for report in tiny.check(reference):
        assert not report.ok and not report.mismatches
        assert report.unchecked == {"layers.1.weight": "the reference has no layers.1.weight",
                                    "norm.weight": "the reference has norm.weight as [5]; the plan has [6]"}


def test_mistakes_are_told_and_no_rank_waits(tiny, tmp_path):
    with pytest.raises(refit.InvalidArgument, match="rank 0 is a source; check runs on a destination rank"):
        refit.check(tiny.executors[0], tiny.sources)
    for reference, wanted in ((3, "the reference is a int; wanted a checkpoint's directory"),
                              (tiny.sources[:1], "the reference has tensors of 1 source ranks; the plan has 2"),
                              (tmp_path, r"has no \*\.safetensors file")):
        with pytest.raises(refit.Error, match=wanted):
            tiny.check(reference)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(refit.FileError, match="model.safetensors is no safetensors file"):
        tiny.check(tmp_path)
    assert all(report.ok for report in tiny.check())
    with pytest.raises(refit.FailedPrecondition, match="the executor is not bound"):
        refit.check(refit.Executor(tiny.plan, 2, fabric=refit.LocalFabric(4)), tiny.sources)


# A layout with fused tensors, padding, and what a refit computes.

QWEN = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
        "head_dim": 64, "intermediate_size": 256, "vocab_size": 100, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
MAMBA = {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M*-",
         "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "intermediate_size": 64, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
         "conv_kernel": 4, "chunk_size": 16, "expand": 1, "use_conv_bias": True, "use_bias": False, "mlp_bias": False,
         "attention_bias": False, "vocab_size": 100, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
CASES = {
    "bf16": (QWEN, {"tensor_parallel": 2}),
    "cast": (QWEN, {"tensor_parallel": 2, "dtype": "fp16"}),
    "fp8": (QWEN, {"tensor_parallel": 2, "dtype": "fp8_e4m3_block128"}),
    "fp8, ue8m0": (QWEN, {"dtype": "fp8_e4m3_block128", "scale_fmt": "ue8m0"}),
    "mxfp8": (QWEN, {"tensor_parallel": 2, "dtype": "mxfp8_e4m3"}),
    "hooks": (MAMBA, {"tensor_parallel": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_layouts_that_fuse_pad_cast_and_quantize(case):
    pytest.importorskip("ml_dtypes")
    config, side = CASES[case]
    plan = refit.compile({"model": config, "source": {"layout": "fsdp"}, "destination": {"layout": "vllm", **side}})
    world = World(plan, [arrays(plan, rank, seed=1 if rank == 0 else None) for rank in range(plan.world_size)])
    for reference in (world.sources, world.sources[0]):
        for report in world.check(reference):
            assert report.ok, report
            assert report.tensors == len(plan.tensors(report.rank)) - len(report.skipped)
    # vLLM pads the vocabulary to a multiple of 64.
    last = world.tensors[-1]["model.embed_tokens.weight"]
    assert len(last) * side.get("tensor_parallel", 1) > 100
    last[-1, 3] = 7
    (mismatch,) = refit.check(world.executors[-1], world.sources, refit=False).mismatches
    assert (mismatch.param, mismatch.index, mismatch.wanted) == ("", (len(last) - 1, 3), "0")
    assert ", is padding, found 7 (0x" in str(mismatch)


def test_fp8_e5m2_is_compared_with_a_reference_of_wider_values(tiny_job):
    dtypes = pytest.importorskip("ml_dtypes")
    tiny_job["model"] = [{**param, "dtype": "fp8_e5m2"} for param in tiny_job["model"]]
    plan = refit.compile(tiny_job)
    tensors = [arrays(plan, rank, seed=rank if rank < 2 else None) for rank in range(plan.world_size)]
    tensors[1]["norm.weight"][:] = tensors[0]["norm.weight"]
    world = World(plan, tensors)
    random = np.random.default_rng(7)
    exact = {name: random.standard_normal((8, 6) if name != "norm.weight" else 6).astype("f4") for name in plan.tensors(2)}
    for name, values in exact.items():
        for rank in range(2):
            held = tensors[rank][name]
            held[...] = (values if len(held) == len(values) else values[rank * 4:][:4]).astype(dtypes.float8_e5m2)
    for report in world.check(exact):
        assert report.ok, report


def test_an_exp_of_the_worker_may_differ_in_the_last_bit_the_executors_may_not():
    pytest.importorskip("ml_dtypes")
    plan = refit.compile({"model": MAMBA, "source": {"layout": "fsdp"}, "destination": {"layout": "vllm"}})
    (name,) = [hook.tensor for hook in plan.post_hooks(1)]

    def off_by(bits):
        def negative_exp(_, tensor):
            tensor[...] = -np.exp(tensor.astype(np.float64)).astype(np.float32)
            tensor.view(np.uint32)[1] += bits
        return negative_exp

    def report_of(hooks, bits=0):
        world = World(plan, [arrays(plan, rank, seed=1 if rank == 0 else None) for rank in range(2)], hooks)
        (report,) = world.check(world.sources[0])
        world.tensors[1][name].view(np.uint32)[2] += bits
        return report if not bits else refit.check(world.executors[1], world.sources, refit=False)

    assert report_of({"negative-exp": off_by(1)}).ok
    assert [mismatch.tensor for mismatch in report_of({"negative-exp": off_by(2)}).mismatches] == [name]
    assert report_of(()).ok
    assert [mismatch.tensor for mismatch in report_of((), bits=1).mismatches] == [name]


def test_the_arithmetic_is_that_of_ml_dtypes():
    dtypes = pytest.importorskip("ml_dtypes")
    random = np.random.default_rng(0)
    numbers = random.standard_normal(20000) * 10.0 ** random.integers(-5, 3, 20000)
    numbers = np.append(numbers, [0, -0.0, 447, 449, 464, 1e9, -1e9, np.nan, 2**-10, 2**-9 * 1.5, 2**-9 * 2.5, 2**-6]).astype("f4")
    fp8 = encode(numbers, "fp8_e4m3")
    assert (fp8.bits == np.clip(numbers, -448, 448).astype(dtypes.float8_e4m3fn).view("u1")).all()
    wide = np.append(numbers, [57344, 61439, 61440, 2**-16, 2**-17, 2**-17 * 1.5, 2**-14, np.inf, -np.inf, -np.nan]).astype("f4")
    with np.errstate(over="ignore"):
        assert (encode(wide, "fp8_e5m2").bits == wide.astype(dtypes.float8_e5m2).view("u1")).all()
    assert (encode(numbers, "bf16").bits == numbers.astype(dtypes.bfloat16).view("u2")).all()
    every = np.arange(256, dtype="u1")
    for dtype, other in (("fp8_e4m3", dtypes.float8_e4m3fn), ("fp8_e5m2", dtypes.float8_e5m2)):
        np.testing.assert_array_equal(decode(Values(dtype, every)), every.view(other).astype("f4"))


def test_derived_tensors_are_listed_with_their_rule():
    config = {"model_type": "deepseek_v3", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 4, "intermediate_size": 512, "moe_intermediate_size": 128, "n_routed_experts": 4,
              "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 2, "moe_layer_freq": 1,
              "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
              "vocab_size": 64, "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "topk_method": "noaux_tc",
              "n_group": 1, "topk_group": 1}
    pytest.importorskip("ml_dtypes")
    plan = refit.compile({"model": config, "source": {"layout": "fsdp"}, "destination": {"layout": "vllm"}})
    world = World(plan, [arrays(plan, rank, seed=1 if rank == 0 else None) for rank in range(2)],
                  hooks=["derive-latent-projections"])

    class Attention:  # what a torch module shows of itself
        def __init__(self):
            self.W_UV = types.SimpleNamespace(data_ptr=lambda: 64, shape=(4, 64, 32), dtype="torch.bfloat16")

    module = types.SimpleNamespace(
        named_parameters=world.tensors[1].items, named_buffers=dict().items,
        named_modules=lambda: [("", types.SimpleNamespace()), ("model.layers.1.self_attn.mla_attn", Attention())])
    (report,) = world.check(world.sources[0], live=module, derived={"W_UV": "derive-latent-projections"})
    assert report.ok
    (derived,) = report.beyond
    assert derived.tensor == "model.layers.1.self_attn.mla_attn.W_UV"
    assert derived.why.startswith("derived from model.layers.1.self_attn.kv_b_proj.weight by derive-latent-projections: ")
