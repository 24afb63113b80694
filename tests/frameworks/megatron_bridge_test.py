#!/usr/bin/env python3
"""Compares the megatron layout with Megatron Core's own modules, on the CPU.

usage: megatron_bridge_test.py --programs DIRECTORY [--case GLOB] [--keep DIRECTORY]   (megatron.sh installs what it needs)

Of every case Megatron Bridge builds the model on each rank of the mesh, a process each (gloo), with Megatron Core's modules, and
reads a checkpoint by its own load_hf_weights. Each rank then has to hold what the plan says that it holds: every name, shape,
dtype and byte. kernel_stand_ins.py stands for Transformer Engine and other packages of kernels.

--keep: leaves there, for the cases of a vLLM mesh, the tensors of Megatron's ranks and the plan that moves them to vLLM's.
vllm_models_test.py --refitted runs that plan and compares the result with vLLM's own model classes.
"""

import contextlib
import importlib.metadata
import os
import pathlib
import shutil
import sys
import warnings

os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
               "TORCH_CPP_LOG_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error"}  # fmt: skip
warnings.filterwarnings("ignore")

import kernel_stand_ins  # noqa: F401  before megatron
import torch
import torch.distributed

# Where Megatron wants a GPU although nothing is computed, it gets the CPU.
torch.set_num_threads(1)
torch.Tensor.cuda = lambda tensor, *_, **__: tensor
torch.nn.Module.cuda = lambda module, *_, **__: module
torch.cuda.current_device = lambda: "cpu"

import refit
import table
from megatron.bridge import AutoBridge
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from refit import contract
from refit.numerics import before_hook, convert
from safetensors.torch import save_file
from tiny_models import MODELS, Refit

scatter = torch.distributed.scatter
# gloo takes contiguous tensors alone, NCCL others too.
torch.distributed.scatter = lambda tensor, parts=None, **more: scatter(tensor, parts and [part.contiguous() for part in parts], **more)
CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()

# Families that Megatron Bridge reads, less those that differ: docs/layouts.md says how.
# The installed release: names of Mamba mixers changed.
MEGATRON = {"layout": "megatron", "version": importlib.metadata.version("megatron-core")}
FAMILIES = ["llama", "llama, tied", "qwen2", "qwen3", "qwen3, tied", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_next",
            "gemma3_text"]
MESHES = {
    "TP1": {},
    "TP2": {"tensor_parallel": 2},
    "TP4": {"tensor_parallel": 4},  # more than there are heads of keys
    "TP2 PP2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "PP2 VPP2": {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2},
}
EXPERT_MESHES = {
    "TP2 EP2": {"tensor_parallel": 2, "expert_parallel": 2},
    "DP4 EP4": {"data_parallel": 4, "expert_parallel": 4},
    "TP2 DP2 EP2 ETP2": {"tensor_parallel": 2, "data_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 2},
    "TP2 PP2 EP2": {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2},
}
# Whose tensors vLLM's classes are given: by family and Megatron's mesh, vLLM's mesh.
CHAIN = {
    ("qwen3", "TP2 PP2"): {"tensor_parallel": 4},
    ("qwen3_moe", "TP2 PP2 EP2"): {"tensor_parallel": 2, "data_parallel": 2, "expert_parallel": True},
}
# Buffers that training keeps for itself.
UNFED = ("local_tokens_per_expert", "inv_freq", "_extra_state")


def cases():
    for family in FAMILIES:
        meshes = dict(MESHES)
        if any(key in MODELS[family] for key in ("num_experts", "num_local_experts", "n_routed_experts")):
            meshes |= EXPERT_MESHES
        for mesh, side in meshes.items():
            if MODELS[family]["tie_word_embeddings"] and "virtual_pipeline_parallel" in side:
                continue  # Bridge 0.3.1 looks for an output layer in every chunk of the last stage
            if family == "gpt_oss" and "expert_tensor_parallel" in side:
                continue  # Megatron has biases of experts only where these are whole
            # Bridge 0.3.1 imports no vocabulary that Megatron has to pad.
            yield family, mesh, MODELS[family] | {"vocab_size": 512}, MEGATRON | side


def megatron_tensors(checkpoint, side):
    """What Megatron's model holds on this rank after load_hf_weights: name -> tensor."""
    bridge = AutoBridge.from_hf_pretrained(str(checkpoint))
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.tensor_model_parallel_size = side.get("tensor_parallel", 1)
    provider.sequence_parallel = provider.tensor_model_parallel_size > 1
    provider.pipeline_model_parallel_size = side.get("pipeline_parallel", 1)
    provider.virtual_pipeline_model_parallel_size = side.get("virtual_pipeline_parallel")
    provider.expert_model_parallel_size = side.get("expert_parallel", 1)
    provider.expert_tensor_parallel_size = side.get("expert_tensor_parallel", 1)
    provider.pipeline_dtype = provider.params_dtype = torch.bfloat16
    # The others make tensors on a GPU.
    provider.moe_token_dispatcher_type, provider.moe_permute_fusion, provider.moe_shared_expert_overlap = "allgather", False, False
    provider.bf16, provider.mtp_num_layers, provider.gradient_accumulation_fusion = True, None, False
    provider.finalize()
    provider.initialize_model_parallel()
    chunks = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    bridge.load_hf_weights(chunks)
    found = {}
    for number, chunk in enumerate(chunks):
        module = getattr(chunk, "module", chunk)
        prefix = f"vp_stage.{number}." if len(chunks) > 1 else ""
        found |= {prefix + name: tensor for name, tensor in table.tensors_of(module, UNFED).items()}
    return found


def zero_centred(plan):
    """Params that the source keeps less one: those whose destinations add it."""
    return {part.param for rank in range(plan.source_ranks, plan.world_size) for tensor in contract.tensors_of(plan, rank)
            for part in tensor.parts if "add-one" in tensor.hooks}  # fmt: skip


def differences(plan, rank, found, checkpoint):
    """Between what the plan says that a source rank holds and the tensors `found` there."""
    reference, centred = contract.Checkpoint(checkpoint), zero_centred(plan)
    for name, info in plan.tensors(rank).items():
        if name not in found:
            yield f"{name}: Megatron has no such tensor; the plan's is {info.dtype} {list(info.shape)}"
        else:
            held = contract.on_host(found[name])
            if (held.dtype, found[name].shape) != (info.dtype, info.shape):
                yield f"{name}: {info.dtype} {list(info.shape)}; Megatron has {held.dtype} {list(found[name].shape)}"
    for name in sorted(found.keys() - plan.tensors(rank).keys()):
        yield f"{name}: the plan has no such tensor; Megatron's is {found[name].dtype} {list(found[name].shape)}"
    for tensor in contract.tensors_of(plan, rank):
        held = found.get(tensor.name)
        if held is None or tuple(held.shape) != tensor.shape:
            continue
        for part in tensor.parts:
            wanted = reference.wanted(part, part.param_dtype, (), on_gpu=False)
            wanted = convert(before_hook("add-one", wanted) if part.param in centred else wanted, tensor.dtype)
            box = contract.box_of(contract.on_host(held).bits.reshape(-1), part.offset, part.extent, part.stride)
            if (box != wanted.bits).any():
                yield f"{tensor.name}: {(box != wanted.bits).sum()} of {box.size} elements of {part.param} are not Megatron's"


def on_rank(refitted, plan, side, rank, directory):
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=plan.source_ranks)
    found = megatron_tensors(refitted.checkpoint, side)
    lines = list(differences(plan, rank, found, refitted.checkpoint))
    save_file({name: tensor.contiguous().clone() for name, tensor in found.items()},
              refitted.directory / "source" / f"rank-{rank:05d}.safetensors")  # fmt: skip
    return len(found), lines


def run_case(arguments, family, mesh, config, side, directory):
    """The number of tensors compared, and the differences by rank."""
    programs, whole, destination = arguments.programs, directory / "whole", CHAIN.get((family, mesh))
    whole.mkdir()
    Refit(programs, whole, config, {"layout": "vllm"}).write_checkpoint()
    refitted = Refit(programs, directory, config, {"layout": "vllm", **(destination or {})}, source=side)
    shutil.copy(whole / "checkpoint" / "model.safetensors", refitted.checkpoint)
    (directory / "source").mkdir()
    plan = refit.Plan.load(directory / "plan.refit")
    compared, wrong = table.on_ranks(plan.source_ranks, directory, lambda rank: on_rank(refitted, plan, side, rank, directory))
    if destination is not None and arguments.keep is not None and not wrong:
        shutil.copytree(directory, arguments.keep / f"{family}, Megatron {mesh}",
                        ignore=shutil.ignore_patterns("rank-?.txt", "log-?.txt", "rendezvous", "whole"))  # fmt: skip
    return compared, wrong


def main():
    parser = table.arguments_of(__doc__)
    parser.add_argument("--keep", type=pathlib.Path, help="an empty directory for what vLLM's classes are compared with")
    arguments = parser.parse_args()
    core, bridge = (importlib.metadata.version(name) for name in ("megatron-core", "megatron-bridge"))
    return table.run(f"Megatron Core {core}, Bridge {bridge}", cases(), lambda *case: run_case(arguments, *case), arguments.case)


if __name__ == "__main__":
    sys.exit(main())
