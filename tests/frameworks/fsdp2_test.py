#!/usr/bin/env python3
"""Compares the fsdp layout with what torch's fully_shard makes of transformers' models, on the CPU (gloo).

Every rank's real local tensors go through refit-run as the source; the destination's files have to be the real local
tensors of another run, by name, shape, dtype and value. Needs torch, transformers 5 and safetensors.

usage: fsdp2.py --refitc PATH --refit-run PATH
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import torch
import torch.multiprocessing
import transformers
from safetensors.torch import load_file, save_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

DENSE = dict(hidden_size=20, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=70, head_dim=6)  # fmt: skip
MODELS = {
    "qwen3": transformers.Qwen3Config(**DENSE, tie_word_embeddings=False),
    "tied qwen3": transformers.Qwen3Config(**DENSE, tie_word_embeddings=True),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **DENSE, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12, mlp_only_layers=[0], tie_word_embeddings=False
    ),
    "mixtral": transformers.MixtralConfig(**DENSE, num_local_experts=5, tie_word_embeddings=False),
}
MODELS["qwen3_moe, six experts"] = transformers.Qwen3MoeConfig(
    **DENSE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12, mlp_only_layers=[1], tie_word_embeddings=False
)
FUSED = {"fused_experts": True}
# Model, source, destination; further keys are those of a side.
CASES = [
    ("qwen3", {"data_parallel": 3}, {"data_parallel": 4}),
    ("tied qwen3", {"data_parallel": 7}, {"data_parallel": 2, "replicas": 2}),
    ("qwen3", {"data_parallel": 3, "tensor_parallel": 2}, {"data_parallel": 2}),
    ("qwen3", {"data_parallel": 2}, {"data_parallel": 2, "tensor_parallel": 2, "replicas": 2}),
    ("qwen3_moe", {"data_parallel": 3, **FUSED}, {"data_parallel": 2, **FUSED}),
    ("mixtral", {"data_parallel": 7, **FUSED}, {"data_parallel": 2, "replicas": 2, **FUSED}),
    ("qwen3_moe, six experts", {"data_parallel": 4, "expert_parallel": 2, **FUSED}, {"data_parallel": 3, **FUSED}),
    ("qwen3_moe, six experts", {"data_parallel": 2, **FUSED}, {"data_parallel": 8, "expert_parallel": 2, **FUSED}),
    ("qwen3_moe, six experts", {"data_parallel": 4, "expert_parallel": 2, "expert_shard_dim": 1, **FUSED},
     {"data_parallel": 3, "expert_parallel": 3, "replicas": 2, **FUSED}),
]  # fmt: skip


def tensor_parallel_plan():
    """As torchtitan and NeMo RL write it."""
    plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()), "lm_head": ColwiseParallel()}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan["model.layers.*." + name] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan["model.layers.*." + name] = RowwiseParallel()
    return plan


def shard_experts(model, side, expert_mesh, shard_mesh):
    """As torchtitan and NeMo Automodel do: whole experts over `expert_mesh`, FSDP over `shard_mesh`."""
    ranks = expert_mesh.size() * shard_mesh.size()
    for layer in model.model.layers:
        experts = getattr(layer.mlp, "experts", None)
        if experts is None:
            continue
        dim = side.get("expert_shard_dim", 1 if ranks > experts.num_experts else 0)
        for name, parameter in list(experts.named_parameters(recurse=False)):
            experts.register_parameter(name, torch.nn.Parameter(distribute_tensor(parameter.detach(), expert_mesh, [Shard(0)])))
        fully_shard(experts, mesh=shard_mesh, shard_placement_fn=lambda parameter, dim=dim: Shard(dim))


def shard_on_rank(rank, model_name, side, directory):
    sizes = {"replicas": 1, "data_parallel": 1, "tensor_parallel": 1}
    sizes |= {key: size for key, size in side.items() if key in sizes}
    world = sizes["replicas"] * sizes["data_parallel"] * sizes["tensor_parallel"]
    distributed.init_process_group("gloo", f"file://{directory}/rendezvous", rank=rank, world_size=world)
    expert_ranks = side.get("expert_parallel", 1)
    sizes = [sizes["replicas"], sizes["data_parallel"] // expert_ranks, expert_ranks, sizes["tensor_parallel"]]
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("replicas", "shards", "experts", "tensor"))
    data = mesh["shards", "experts"]._flatten("data")
    torch.manual_seed(0)  # the same weights on every rank and in every run
    model = transformers.AutoModelForCausalLM.from_config(MODELS[model_name], dtype=torch.bfloat16)
    if sizes[-1] > 1:
        parallelize_module(model, mesh["tensor"], tensor_parallel_plan())
    if expert_ranks > 1:
        shard_experts(model, side, mesh["experts"], mesh["replicas", "shards"] if sizes[0] > 1 else mesh["shards"])
    shards = mesh["replicas", "data"] if sizes[0] > 1 else data
    for layer in model.model.layers:
        fully_shard(layer, mesh=shards)
    fully_shard(model, mesh=shards)
    tensors = {}
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        tensors[name] = local.detach().clone().contiguous()
    save_file(tensors, directory / f"rank-{rank:05d}.safetensors")
    distributed.destroy_process_group()
    return world


def shard(model_name, side, directory):
    directory.mkdir()
    sizes = [side.get(key, 1) for key in ("replicas", "data_parallel", "tensor_parallel")]
    world = sizes[0] * sizes[1] * sizes[2]
    torch.multiprocessing.spawn(shard_on_rank, (model_name, side, directory), nprocs=world)
    return world


def differences(found, wanted):
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found or name not in wanted:
            yield f"{name}: only in {'the refit' if name in found else 'torch'}"
        elif found[name].shape != wanted[name].shape or found[name].dtype != wanted[name].dtype:
            yield f"{name}: {found[name].dtype} {tuple(found[name].shape)}; torch has {wanted[name].dtype} {tuple(wanted[name].shape)}"
        elif not torch.equal(found[name], wanted[name]):
            yield f"{name}: other values than torch's"


def run_case(number, model_name, source, destination, arguments, directory):
    config = MODELS[model_name].to_dict() | {"torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    sides = {"source": {"layout": "fsdp", **source}, "destination": {"layout": "fsdp", **destination}}
    (directory / "job.json").write_text(json.dumps({"model": "config.json", **sides}))
    ranks = shard(model_name, source, directory / "source")
    wanted_ranks = shard(model_name, destination, directory / "wanted")
    plan = directory / "plan.refit"
    subprocess.run([arguments.refitc, directory / "job.json", "-o", plan], check=True)
    subprocess.run([arguments.refit_run, plan, "--transport", "local", "--source-dir", directory / "source",
                    "--destination-dir", directory / "found"], check=True)  # fmt: skip
    wrong = 0
    for rank in range(wanted_ranks):
        found = load_file(directory / "found" / f"rank-{ranks + rank:05d}.safetensors")
        wanted = load_file(directory / "wanted" / f"rank-{rank:05d}.safetensors")
        for difference in differences(found, wanted):
            wrong += 1
            print(f"{model_name} {source} -> {destination}: rank {rank}: {difference}", file=sys.stderr)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for program in ("refitc", "refit-run"):
        parser.add_argument("--" + program, required=True, type=lambda path: os.path.abspath(path))
    arguments = parser.parse_args()
    wrong = 0
    for number, (model_name, source, destination) in enumerate(CASES):
        with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
            wrong += run_case(number, model_name, source, destination, arguments, pathlib.Path(directory))
    print(f"{len(CASES)} cases against torch {torch.__version__}, transformers {transformers.__version__}: {wrong} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
