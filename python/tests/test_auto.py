"""Jobs from what runs, and every reason why not."""
import json
import sys
import types

import numpy as np
import pytest

import refit
import refit.vllm
from refit import auto

CONFIG = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "vocab_size": 64, "tie_word_embeddings": False,
          "torch_dtype": "bfloat16"}
MOE = {**CONFIG, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
       "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}


class Replicate:
    pass


class Shard:
    pass


def module(placements=None, sizes=(), dtype="float32", **names):
    """A module's parameters, of one mesh."""
    def parameter():
        held = types.SimpleNamespace(dtype=np.dtype(dtype))
        if placements is not None:
            held.device_mesh = types.SimpleNamespace(size=lambda dim=None: int(np.prod(sizes)) if dim is None else sizes[dim])
            held.placements = placements
        return held

    parameters = {name: parameter() for name in ("norm.weight", *names.values())}
    return types.SimpleNamespace(named_parameters=parameters.items)


def test_a_modules_mesh_is_the_source():
    plain = {"layout": "fsdp", "data_parallel": 1, "dtype": "fp32"}
    assert auto.source_of(module(), 1) == plain
    assert auto.source_of(module(), 4) == {**plain, "replicas": 4}  # DDP
    assert auto.source_of(module([Shard()], (4,)), 4) == {**plain, "data_parallel": 4}
    assert auto.source_of(module([Replicate(), Shard()], (2, 4)), 8) == {**plain, "data_parallel": 4, "replicas": 2}
    assert auto.source_of(module(experts="layers.0.mlp.experts.gate_up_proj"), 1) == {**plain, "fused_experts": True}
    for wrong, ranks, wanted in ((module([Shard()], (4,)), 8, "mesh has 4 ranks, and 8 train"), ([module()], 1, "a list of model chunks"),
                                 (module([Shard(), Shard()], (2, 2)), 4, '"norm.weight" has the placements')):
        with pytest.raises(refit.InvalidArgument, match=f"{wanted}.*write a job"):
            auto.source_of(wrong, ranks)
    mixed = dict(module().named_parameters()) | {"head": types.SimpleNamespace(dtype=np.dtype("float16"))}
    with pytest.raises(refit.InvalidArgument, match="have the dtypes fp16, fp32"):
        auto.source_of(types.SimpleNamespace(named_parameters=mixed.items), 1)


def test_a_class_of_transformers_5_has_its_own_names(monkeypatch):
    of_transformers = type("Model", (), {"__module__": "transformers.models.qwen3", "named_parameters": lambda self: module().named_parameters()})
    sharded = type("FSDPModel", (of_transformers,), {"__module__": "torch"})()
    for release, version in (("4.57.1", None), ("5.24.0", "5")):
        monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__=release))
        for held in (sharded, types.SimpleNamespace(module=sharded, named_parameters=sharded.named_parameters)):
            assert auto.source_of(held, 1).get("version") == version
        assert "version" not in auto.source_of(module(), 1)


def test_a_servers_configuration_is_the_destination():
    def destination(config):
        return refit.vllm.destination_of(refit.vllm.server_facts(config, "0.32.0"))

    parallel = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 2, "enable_expert_parallel": True}
    config = {"parallel_config": parallel, "model_config": {"dtype": "torch.bfloat16", "quantization": None}}
    assert destination(config) == {"layout": "vllm", "version": "0.32", "dtype": "bf16", "tensor_parallel": 2,
                                                       "data_parallel": 2, "expert_parallel": True}
    parallel["expert_placement_strategy"] = "linear"
    assert "experts" not in destination(config)
    parallel["expert_placement_strategy"] = "round_robin"
    assert destination(config)["experts"] == {"placement": "round_robin"}
    config["model_config"]["quantization"] = "fp8"
    with pytest.raises(refit.InvalidArgument, match="the engine quantizes"):
        destination(config)


def test_a_plan_travels_as_json():
    plan = refit.compile({"model": CONFIG, "source": {"layout": "fsdp"}, "destination": {"layout": "vllm"}})
    carried = json.loads(json.dumps(auto.inline(plan)))
    assert auto.load(carried) == refit.vllm.load_plan(carried) == auto.load(plan) == plan
    assert auto.is_made("auto") and auto.is_made({"model": CONFIG}) and not auto.is_made(carried) and not auto.is_made("plan.refit")


def test_every_reason_is_told_in_one_call():
    job = {"model": CONFIG, "source": {"layout": "fsdp", "data_parallel": 2}, "destination": {"layout": "vllm", "tensor_parallel": 2}}
    assert refit.supports(job) == []
    wrong = {**job, "source": {**job["source"], "dtpye": "bf16"}, "destination": {**job["destination"], "tensor_paralel": 2, "dtype": "int3"}}
    reasons = refit.supports(wrong)
    assert len(reasons) == 3 and all(any(name in reason for reason in reasons) for name in ("dtpye", "tensor_paralel", "int3")), reasons
    (reason,) = refit.supports("nowhere.json")
    assert "nowhere.json" in reason


def test_a_live_engines_facts_are_compared_with_all_that_a_plan_requires():
    job = {"model": MOE, "source": {"layout": "fsdp"}, "destination": {"layout": "vllm", "tensor_parallel": 2, "expert_parallel": True}}
    facts = {"vllm": "0.32.0", "moe_backends": ["TRITON"], "holds_experts": True, "expert_parallel": True, "expert_placements": ["linear"],
             "moves_experts": False}
    assert refit.supports(job, facts) == []
    reasons = refit.supports(job, {**facts, "moe_backends": ["FLASHINFER_TRTLLM"], "expert_placements": ["round_robin"]})
    assert len(reasons) == 2 and "FLASHINFER_TRTLLM" in " ".join(reasons) and "round_robin" in " ".join(reasons), reasons


def test_what_sglang_replies_of_an_engine_is_compared():
    job = {"model": MOE, "source": {"layout": "fsdp"}, "destination": {"layout": "sglang", "tensor_parallel": 2, "expert_parallel": 2}}
    facts = {"sglang": "0.5.19", "moe_backends": ["triton"], "holds_experts": True, "swiglu_interleaved": False, "expert_location": "trivial",
             "expert_rebalancing": False}
    for backends, said in ((["triton"], []), (["flashinfer_cutlass"], ["flashinfer_cutlass"])):
        reply = {"rank": 1, "state": "bound", "error": "", "facts": {**facts, "moe_backends": backends}}  # as refit.sglang.facts returns it
        for given in (reply, reply["facts"]):
            reasons = refit.supports(job, given)
            assert len(reasons) == len(said) and all(word in reason for word, reason in zip(said, reasons)), reasons
