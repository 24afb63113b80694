"""refit.load: a checkpoint straight into serving ranks. What it writes is compared with what the executor writes of the same values."""
import json

import numpy as np
import pytest

import refit
from refit.numerics import encode

CONFIG = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256, "vocab_size": 256, "tie_word_embeddings": False,
          "torch_dtype": "bfloat16"}
MOE = {**CONFIG, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
       "moe_intermediate_size": 128, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
BLOCKS = {"hidden_size": 256, "head_dim": 128, "moe_intermediate_size": 256}  # whole ones on each of two ranks
NAMES = {"bf16": "BF16", "fp32": "F32"}


def bits_of(info, seed):
    values = np.random.default_rng(seed).standard_normal(info.shape)
    return encode(values, info.dtype).bits


def plan_of(config=CONFIG, source="bf16", **destination):
    return refit.compile({"model": config, "source": {"layout": "fsdp", "dtype": source},
                          "destination": {"layout": "vllm", "tensor_parallel": 2, **destination}})


@pytest.fixture
def arrays():
    pytest.importorskip("ml_dtypes")
    return lambda plan, rank: {name: np.zeros(info.shape, refit.tensors.numpy_dtype(info.dtype)) for name, info in plan.tensors(rank).items()}


def write(path, tensors):
    header, data = {}, b""
    for name, (dtype, bits) in tensors.items():
        header[name] = {"dtype": NAMES[dtype], "shape": bits.shape, "data_offsets": [len(data), len(data) + bits.nbytes]}
        data += bits.tobytes()
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def checkpoint(directory, plan, files=1):
    """Random values of all params, as one file or as several with an index."""
    held = {name: (info.dtype, bits_of(info, seed)) for seed, (name, info) in enumerate(plan.tensors(0).items())}
    names = list(held)
    if files == 1:
        write(directory / "model.safetensors", held)
        return held
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        write(directory / file, {name: held[name] for name in names[number::files]})
        weight_map |= dict.fromkeys(names[number::files], file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    write(directory / "stray.safetensors", {name: ("bf16", np.zeros((1,), "u2")) for name in names})  # which the index does not name
    return held


def refitted(plan, held, arrays):
    """What the executor makes of the same values."""
    ranks = [arrays(plan, rank) for rank in range(plan.world_size)]
    for name, tensor in ranks[0].items():
        tensor.view(held[name][1].dtype)[...] = held[name][1]
    refit.run_local(plan, ranks)
    return ranks[1:]


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("config, options", [(CONFIG, {}), (CONFIG, {"pipeline_parallel": 2, "replicas": 2}), (MOE, {"expert_parallel": True}),
                                             ({**CONFIG, **BLOCKS}, {"dtype": "fp8_e4m3_block128"}), ({**MOE, **BLOCKS}, {"dtype": "fp8_e4m3_block128"})])
def test_ranks_hold_what_a_refit_of_the_same_values_writes(config, options, files, arrays, tmp_path):
    plan = plan_of(config, **options)
    held = checkpoint(tmp_path, plan, files)
    whole = sum(bits.nbytes for _, bits in held.values())
    for rank, wanted in enumerate(refitted(plan, held, arrays), 1):
        found = arrays(plan, rank)
        loaded = refit.load(plan, tmp_path, found, rank=rank)
        for name, tensor in found.items():
            assert tensor.tobytes() == wanted[name].tobytes(), (rank, name)
        assert loaded.tensors == len(found) and loaded.elements == sum(tensor.size for tensor in found.values())
        # Blocks that are quantized are read for their values and for their scales.
        assert loaded.bytes_read < (2 if "dtype" in options else 1) * (0.8 if plan.world_size == 3 else 0.6) * whole, loaded


def test_a_checkpoint_of_another_dtype_is_cast(arrays, tmp_path):
    plan = plan_of()
    held = checkpoint(tmp_path, plan_of(source="fp32", dtype="bf16"))
    wanted = refitted(plan_of(source="fp32", dtype="bf16"), held, arrays)
    for rank in (1, 2):
        found = arrays(plan, rank)
        refit.load(plan, tmp_path, found, rank=rank)
        assert all(tensor.tobytes() == wanted[rank - 1][name].tobytes() for name, tensor in found.items())


@pytest.fixture
def tiny(tiny_job, tmp_path):
    """A plan of fp32 tensors, a checkpoint, and its values."""
    plan = refit.compile(tiny_job)
    held = {"layers.0.weight": (8, 6), "layers.1.weight": (8, 6), "norm.weight": (6,)}
    held = {name: ("fp32", np.random.default_rng(1).standard_normal(shape).astype("f4")) for name, shape in held.items()}
    write(tmp_path / "model.safetensors", held)
    return plan, {name: values for name, (_, values) in held.items()}


def zeros(plan, rank):
    return {name: np.zeros(info.shape, "f4") for name, info in plan.tensors(rank).items()}


def test_an_executor_that_is_bound_is_loaded_and_checked(tiny, tmp_path):
    import concurrent.futures

    plan, held = tiny
    fabric = refit.LocalFabric(plan.world_size)
    executors = [refit.Executor(plan, rank, fabric=fabric) for rank in range(plan.world_size)]
    with pytest.raises(refit.FailedPrecondition, match="the executor is not bound"):
        refit.load(plan, tmp_path, executors[2])
    with concurrent.futures.ThreadPoolExecutor(plan.world_size) as threads:
        list(threads.map(lambda executor: executor.bind(zeros(plan, executor.rank), timeout=20), executors))
    for rank in (2, 3):
        loaded = refit.load(plan, tmp_path, executors[rank])
        assert (loaded.tensors, loaded.elements, loaded.bytes_read) == (3, 54, 4 * 54)
        assert refit.check(executors[rank], tmp_path, refit=False).ok
        assert (executors[rank].tensors["layers.0.weight"] == held["layers.0.weight"][:, 3 * (rank - 2):3 * (rank - 1)]).all()
    with pytest.raises(refit.InvalidArgument, match="rank is 0; wanted a destination rank of the plan, 2 to 3"):
        refit.load(plan, tmp_path, executors[0])


def test_a_wrong_checkpoint_is_refused_at_once_and_nothing_is_written(tiny, tmp_path):
    plan, held = tiny
    into = zeros(plan, 2)

    def refused(error, text, given=into, **options):
        with pytest.raises(error, match=text) as raised:
            refit.load(plan, tmp_path, given, rank=2, **options)
        assert all((tensor == 0).all() for tensor in into.values())
        return str(raised.value)

    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    refused(refit.FileError, "model.safetensors is cut off: it has [0-9]+ bytes, by its header [0-9]+$")
    file.write_bytes(b"\x00" * 8)
    refused(refit.FileError, "is no safetensors file")
    file.write_bytes(whole)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm.weight": "model-00002-of-00002.safetensors"}}))
    refused(refit.FileError, "lacks model-00002-of-00002.safetensors, which model.safetensors.index.json names")
    (tmp_path / "model.safetensors.index.json").unlink()
    write(file, {"layers.0.weight": ("fp32", np.ones((4, 6), "f4")), "norm.weight": ("fp32", held["norm.weight"])})
    said = refused(refit.BindError, "2 problems", given=into)
    assert "the checkpoint has layers.0.weight as [4, 6]; the plan has [8, 6]" in said and "the checkpoint has no layers.1.weight" in said
    text = whole.replace(b'"F32"', b'"F8_E4M3"')
    file.write_bytes(len(text[8:text.index(b"}}") + 2]).to_bytes(8, "little") + text[8:])
    assert "in F8_E4M3; wanted fp32 or a float of 16 bits or more" in refused(refit.BindError, "3 problems")
    file.write_bytes(whole)
    wrong = {"layers.0.weight": np.zeros((8, 3), "f8"), "layers.1.weight": into["layers.1.weight"], "lm_head.weight": np.zeros(1)}
    said = refused(refit.BindError, "3 problems", given=wrong)
    for text in ('unexpected: "lm_head.weight"', 'missing: "norm.weight"', '"layers.0.weight" is fp64 [8, 3]; wanted fp32 [8, 3]'):
        assert text in said


def test_what_is_loaded_in_part_is_not_told_as_loaded(tiny, tmp_path, monkeypatch):
    plan, _ = tiny
    param = refit.contract.Checkpoint.param

    def fails(self, name):
        if name == "layers.1.weight":
            raise OSError("the disk is gone")
        return param(self, name)

    monkeypatch.setattr(refit.contract.Checkpoint, "param", fails)
    with pytest.raises(refit.DataLoss, match='is loaded in part, it stopped at "layers.1.weight": OSError: the disk is gone. The rank\'s tensors are torn'):
        refit.load(plan, tmp_path, zeros(plan, 2), rank=2)


def test_arithmetic_is_a_workers_own_where_it_has_some(tiny_job, tmp_path):
    config = {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M", "num_hidden_layers": 1,
              "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "vocab_size": 64,
              "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4, "expand": 2,
              "tie_word_embeddings": False, "torch_dtype": "float32", "mlp_hidden_act": "relu2", "use_conv_bias": True}
    plan = refit.compile({"model": config, "source": {"layout": "fsdp", "dtype": "fp32"}, "destination": {"layout": "vllm", "dtype": "fp32"}})
    held = checkpoint(tmp_path, plan)
    name = next(hook.tensor for hook in plan.post_hooks(1) if hook.name == "negative-exp")
    values = held[next(param for param in held if param.endswith("A_log"))][1].view("f4")
    for hooks, wanted in (((), -np.exp(values)), ({"negative-exp": lambda _, tensor: np.add(tensor, 7, out=tensor)}, values + 7)):
        into = {tensor: np.zeros(info.shape, "f4") for tensor, info in plan.tensors(1).items()}
        refit.load(plan, tmp_path, into, rank=1, hooks=hooks)
        assert np.allclose(into[name], wanted, rtol=1e-6)


def test_post_hooks_of_a_worker_are_performed(tmp_path, arrays):
    config = {**CONFIG, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 64, "kv_lora_rank": 64,
              "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": None, "first_k_dense_replace": 2,
              "num_key_value_heads": 4, "n_shared_experts": None, "moe_intermediate_size": 64, "num_experts_per_tok": 2, "n_group": 1,
              "topk_group": 1}
    config |= {"n_routed_experts": 4, "n_shared_experts": 1}
    plan = plan_of(config)
    checkpoint(tmp_path, plan)
    (name,) = {hook.name for hook in plan.post_hooks(1) if not hook.by_executor}
    with pytest.raises(refit.BindError, match=f"the post-hook {name} is not performed: give hooks="):
        refit.load(plan, tmp_path, arrays(plan, 1), rank=1)
    called = []
    refit.load(plan, tmp_path, arrays(plan, 1), rank=1, hooks={name: lambda tensor, value: called.append((tensor, bool(np.any(value.view("u2")))))})
    assert called == [(hook.tensor, True) for hook in plan.post_hooks(1) if hook.name == name] and called
