"""The GPU half of end_to_end.py: a process for each rank, timed beside two kinds of broadcast.

Needs torch and refit built with CUDA, nothing else.
"""
import json
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import refit

QWEN3_0_6B = dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                  num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)
PACKED_BYTES = 1 << 30
COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROW_PARALLEL = ("o_proj", "down_proj")


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, head = config["hidden_size"], config["head_dim"]
        queries = config["num_attention_heads"] * head
        keys = config["num_key_value_heads"] * head

        def linear(inputs, outputs):
            return nn.Linear(inputs, outputs, bias=False)

        self.self_attn = nn.ModuleDict({
            "q_proj": linear(hidden, queries), "k_proj": linear(hidden, keys), "v_proj": linear(hidden, keys),
            "o_proj": linear(queries, hidden), "q_norm": nn.RMSNorm(head), "k_norm": nn.RMSNorm(head)})
        self.mlp = nn.ModuleDict({
            name: linear(hidden, config["intermediate_size"]) for name in ("gate_proj", "up_proj")})
        self.mlp["down_proj"] = linear(config["intermediate_size"], hidden)
        self.input_layernorm = nn.RMSNorm(hidden)
        self.post_attention_layernorm = nn.RMSNorm(hidden)


class Shapes(nn.Module):
    """The parameters of a Qwen3 model, without its forward."""

    def __init__(self, config):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.model.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.model.norm = nn.RMSNorm(config["hidden_size"])
        if not config.get("tie_word_embeddings"):
            self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)


def value(name, shape, step, device):
    """What a parameter holds after a step, everywhere the same."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()) + step)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)


def placement(name):
    module = name.split(".")[-2]
    return Shard(0) if module in COLUMN_PARALLEL else Shard(1) if module in ROW_PARALLEL else Replicate()


def fill(parameters, step, device):
    """Stands for a training step."""
    for name, parameter in parameters.items():
        full = value(name, parameter.shape, step, device)
        parameter.detach().copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements,
                                                   src_data_rank=None))


def wrong_parameters(parameters, step, device):
    wrong = []
    for name, parameter in parameters.items():
        full = value(name, parameter.shape, step, device)
        wanted = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
        if not torch.equal(parameter.detach().to_local(), wanted):
            wrong.append(name)
    return wrong


def keep_part(parameter, full):
    parameter.detach().to_local().copy_(distribute_tensor(
        full, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local())


def broadcast_each(parameters, shapes, is_source, group, device):
    """The source gathers each tensor, its rank 0 sends it to all destination ranks, who keep their part."""
    for name, shape in shapes.items():
        full = parameters[name].detach().full_tensor() if is_source else torch.empty(
            shape, device=device, dtype=torch.bfloat16)
        if group is not None:
            dist.broadcast(full, src=0, group=group)
        if not is_source:
            keep_part(parameters[name], full)


def broadcast_packed(parameters, shapes, is_source, group, device):
    """The same with tensors packed to a gibibyte."""
    packs, size = [[]], 0
    for name, shape in shapes.items():
        if size + shape.numel() * 2 > PACKED_BYTES and packs[-1]:
            packs.append([])
            size = 0
        packs[-1].append(name)
        size += shape.numel() * 2
    for names in packs:
        if is_source:
            flat = torch.cat([parameters[name].detach().full_tensor().flatten() for name in names])
        else:
            flat = torch.empty(sum(shapes[name].numel() for name in names), device=device, dtype=torch.bfloat16)
        if group is not None:
            dist.broadcast(flat, src=0, group=group)
        if not is_source:
            for name, full in zip(names, flat.split([shapes[name].numel() for name in names])):
                keep_part(parameters[name], full.view(shapes[name]))


def on_gpus(config, source_ranks, peer, iterations, json_path):
    config = config or QWEN3_0_6B
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    source_ranks = source_ranks or world_size // 2
    is_source = rank < source_ranks
    # All ranks make both meshes, and the group that the broadcasts use.
    source_mesh = DeviceMesh("cuda", list(range(source_ranks)), mesh_dim_names=("dp",))
    destination_mesh = DeviceMesh("cuda", list(range(source_ranks, world_size)), mesh_dim_names=("tp",))
    receivers = dist.new_group([0, *range(source_ranks, world_size)])
    group = receivers if rank == 0 or not is_source else None

    with torch.device("meta"):
        model = Shapes(config).to(torch.bfloat16)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if is_source:
        for layer in model.model.layers:
            fully_shard(layer, mesh=source_mesh)
        fully_shard(model, mesh=source_mesh)
        model.to_empty(device=device)
        parameters = dict(model.named_parameters())
    else:
        parameters = {name: nn.Parameter(distribute_tensor(
            torch.zeros(shape, device=device, dtype=torch.bfloat16), destination_mesh, [placement(name)],
            src_data_rank=None)) for name, shape in shapes.items()}

    description = refit.describe(parameters, "source" if is_source else "destination",
                                 first_rank=0 if is_source else source_ranks)
    descriptions = [None] * world_size
    dist.all_gather_object(descriptions, description)
    box = [refit.compile(refit.merge(descriptions, options={"peer": peer})).to_bytes() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    plan = refit.Plan.from_bytes(box[0])
    executor = refit.Executor(plan, rank, device=device, rendezvous=refit.rendezvous.from_process_group())
    executor.bind(parameters)

    def refit_once():
        executor.run()

    methods = {
        "refit": refit_once,
        "broadcast each tensor": lambda: broadcast_each(parameters, shapes, is_source, group, device),
        "broadcast packed": lambda: broadcast_packed(parameters, shapes, is_source, group, device),
    }
    measured = {}
    for number, (name, method) in enumerate(methods.items()):
        best = float("inf")
        for iteration in range(iterations + 1):  # the first one warms up
            step = number * 1000 + iteration
            if is_source:
                fill(parameters, step, device)
            torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            method()
            torch.cuda.synchronize()
            seconds = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            best = min(best, seconds.item()) if iteration > 0 else best
            if not is_source:
                wrong = wrong_parameters(parameters, step, device)
                assert not wrong, f"{name}: rank {rank} has wrong weights: {wrong[:3]}"
        measured[name] = best
    if rank == 0:
        size = sum(shape.numel() for shape in shapes.values()) * 2
        print(f"{size / 1e9:.2f} GB of weights, {source_ranks} FSDP2 ranks -> {world_size - source_ranks} "
              f"tensor-parallel ranks, every element checked after each; the refit is {peer}, NCCL is "
              f"{' of '.join(reversed(refit.nccl_library()))}")
        for name, seconds in measured.items():
            print(f"  {name:24s} {seconds * 1e3:9.2f} ms")
        if json_path:
            with open(json_path, "w") as out:
                json.dump({"weight_bytes": size, "peer": peer, "seconds": measured, "plan": plan.digest}, out, indent=1)
    executor.close()
    dist.destroy_process_group()
