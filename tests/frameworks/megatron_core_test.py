#!/usr/bin/env python3
"""Compares the buffers of the megatron layout with those of the real megatron-core package, on the CPU.

usage: megatron_core_test.py --refitc PATH --refit-dump PATH [--case GLOB]      (tests/frameworks/run.sh installs what it needs)

Every rank of every case is built by megatron-core itself: GPTModel or MambaModel with a small configuration, in one process,
with a process group that moves nothing. Its named_parameters() and persistent buffers must have the names and shapes that the
plan gives the rank. megatron-core builds its local modules here, since Transformer Engine needs a GPU; the plan has the
Transformer Engine spec's names, so that RENAMED says where the two differ. Those renamings are what this test cannot hold.
"""
import argparse
import fnmatch
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron_parts import DENSE, MOE, configuration, gpt_model, renamed
from torch.testing._internal.distributed.fake_pg import FakeStore

# The installed release: names of Mamba mixers changed.
MEGATRON = {"layout": "megatron", "version": importlib.metadata.version("megatron-core")}
# Where megatron-core wants a GPU although it builds on the CPU, it gets the CPU.
torch.Tensor.cuda = lambda tensor, *_, **__: tensor
torch.cuda.current_device = lambda: "cpu"


class DuplicatedLinear(torch.nn.Module):
    """Stands for Transformer Engine's linear layer where latent attention asks for one that every rank holds whole."""

    def __init__(self, input_size, output_size, *_, parallel_mode=None, **__):
        super().__init__()
        assert parallel_mode == "duplicated", parallel_mode
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size))


multi_latent_attention.TELinear = DuplicatedLinear
multi_latent_attention.TEColumnParallelLinear = type("TEColumnParallelLinear", (), {})  # never one of these

LATENT = {
    "model_type": "deepseek_v3", "num_hidden_layers": 5, "hidden_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 96, "moe_intermediate_size": 48, "n_routed_experts": 8,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "vocab_size": 1000, "num_nextn_predict_layers": 1, "num_experts_per_tok": 2,
    "moe_layer_freq": 1, "topk_method": "noaux_tc", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}
CASES = {
    "dense-tp4": (DENSE, {"tensor_parallel": 4}),
    "dense-tied-tp2-pp2": (DENSE | {"tie_word_embeddings": True}, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "dense-pp2-vpp2": (DENSE, {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}),
    "dense-uneven-pp3": (DENSE, {"pipeline_parallel": 3, "num_layers_in_first_pipeline_stage": 2,
                                 "num_layers_in_last_pipeline_stage": 3}),
    "moe-tp2-pp2-ep4": (MOE, {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2, "expert_parallel": 4}),
    "moe-tp2-ep2-etp2": (MOE, {"tensor_parallel": 2, "data_parallel": 2, "expert_parallel": 2,
                               "expert_tensor_parallel": 2}),
    "latent-tp2-ep2": (LATENT, {"tensor_parallel": 2, "expert_parallel": 2}),
    "latent-no-query-rank-tp4": (LATENT | {"q_lora_rank": None}, {"tensor_parallel": 4}),
    "latent-mtp-tp2": (LATENT, {"tensor_parallel": 2, "mtp": True}),
}


def persistent_buffers(module):
    for path, inner in module.named_modules():
        for name, value in inner.named_buffers(recurse=False):
            if name not in inner._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, value


def tensors_of(model, side, chunk, chunks):
    """Names and shapes of one model chunk on the rank that the process group says it is."""
    config = configuration(model, side)
    vp_stage = chunk if chunks > 1 else None
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    if "kv_lora_rank" in model:
        for layer in spec.layer_specs:
            attention = layer.submodules.self_attention.submodules
            # The local attention kernel does not know latent attention's sizes. It holds no tensors.
            attention.core_attention = IdentityOp
            # The local spec cuts the down projections; Transformer Engine's spec does not.
            attention.linear_q_down_proj = attention.linear_kv_down_proj = DuplicatedLinear
    mtp = (get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage)
           if config.mtp_num_layers else None)
    built = gpt_model(model, config, spec, vp_stage, mtp)
    found = {name: list(value.shape) for name, value in built.named_parameters()}
    found |= {name: list(value.shape) for name, value in persistent_buffers(built)
              if not name.endswith(UNFED_BUFFERS)}
    return {renamed(name, found): shape for name, shape in found.items()}


# Buffers that training keeps for itself.
UNFED_BUFFERS = ("local_tokens_per_expert", "inv_freq")


def megatron_rank(model, side, rank, world):
    chunks = side.get("virtual_pipeline_parallel", 1)
    torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=side.get("tensor_parallel", 1),
        pipeline_model_parallel_size=side.get("pipeline_parallel", 1),
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        expert_model_parallel_size=side.get("expert_parallel", 1),
        expert_tensor_parallel_size=side.get("expert_tensor_parallel", 1), create_gloo_process_groups=False)
    try:
        found = {}
        for chunk in range(chunks):
            prefix = f"vp_stage.{chunk}." if chunks > 1 else ""
            found |= {prefix + name: shape for name, shape in tensors_of(model, side, chunk, chunks).items()}
        return found
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def ranks_of(side):
    size = 1
    for axis in ("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel"):
        size *= side.get(axis, 1)
    return size


def expand(name, index):
    """`name` with every combination of the numbers of its stack."""
    names = [name]
    for position, numbers in enumerate(index):
        names = [one.replace(f"{{{position}}}", str(number)) for one in names for number in numbers]
    return names


def plan_ranks(model, side, programs):
    """Names and shapes that refit-dump shows for each source rank."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch)
        (directory / "config.json").write_text(json.dumps(model))
        destination = {"layout": "vllm", "tensor_parallel": 2}
        if side.get("mtp"):
            destination["mtp"] = True
        job = {"model": "config.json", "source": MEGATRON | side, "destination": destination}
        (directory / "job.json").write_text(json.dumps(job))
        subprocess.run([programs.refitc, directory / "job.json", "-o", directory / "plan.refit"], check=True)
        text = subprocess.run([programs.refit_dump, directory / "plan.refit", "--json"], check=True,
                              capture_output=True, text=True).stdout
    plan = json.loads(text)
    buffers = {buffer["id"]: buffer for buffer in plan["buffers"]}
    for rank in plan["ranks"][:plan["source_ranks"]]:
        found = {}
        for slot in rank["slots"]:
            buffer = buffers[slot["buffer"]]
            for name in expand(buffer["name"], buffer.get("index", [])):
                found[name] = buffer["shape"]
        yield found


def differences(plan, real):
    for name in sorted(plan.keys() | real.keys()):
        if plan.get(name) != real.get(name):
            yield f"    {name}: plan {plan.get(name, 'has none')}, megatron-core {real.get(name, 'has none')}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refitc", required=True)
    parser.add_argument("--refit-dump", required=True)
    parser.add_argument("--case", default="*", metavar="GLOB")
    options = parser.parse_args()
    passed = failed = 0
    for name, (model, side) in CASES.items():
        if not fnmatch.fnmatch(name, options.case):
            continue
        wrong = []
        world = ranks_of(side)
        for rank, plan in enumerate(plan_ranks(model, side, options)):
            lines = list(differences(plan, megatron_rank(model, side, rank, world)))
            if lines:
                wrong += [f"  rank {rank}:", *lines]
        print(f"{name}: {world} ranks {'differ' if wrong else 'agree'}")
        print("\n".join(wrong[:40]), end="\n" if wrong else "")
        passed, failed = passed + (not wrong), failed + bool(wrong)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
