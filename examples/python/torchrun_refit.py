#!/usr/bin/env python3
"""The smallest whole refit on GPUs: one torchrun, the first half of the ranks trains, the rest serves.

    torchrun --nproc-per-node 4 torchrun_refit.py
"""
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import refit


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sources = world_size // 2
    meshes = [DeviceMesh("cuda", list(range(sources))), DeviceMesh("cuda", list(range(sources, world_size)))]

    # A weight that trainers cut by rows and servers by columns.
    is_source = rank < sources
    whole = torch.arange(1024 * 1024, device=device, dtype=torch.bfloat16).view(1024, 1024)
    start = whole if is_source else torch.zeros_like(whole)
    tensors = {"weight": distribute_tensor(start, meshes[0 if is_source else 1], [Shard(0 if is_source else 1)],
                                           src_data_rank=None)}

    descriptions = [None] * world_size
    dist.all_gather_object(descriptions, refit.describe(
        tensors, "source" if is_source else "destination", first_rank=0 if is_source else sources))
    plan = refit.compile(refit.merge(descriptions))  # the same bytes on every rank

    with refit.Executor(plan, rank, device=device, rendezvous=refit.rendezvous.from_process_group()) as executor:
        executor.bind(tensors).run()
        columns = whole.chunk(world_size - sources, dim=1)
        assert is_source or torch.equal(tensors["weight"].to_local(), columns[rank - sources])
        print(f"rank {rank}: {executor.stats()['bytes_sent' if is_source else 'bytes_received']} bytes "
              f"{'sent' if is_source else 'received, all right'}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
