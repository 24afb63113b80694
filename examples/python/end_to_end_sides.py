"""What end_to_end.py has beside its models: what spans both sides, and the other ways to move the weights.

Each side is a torch.distributed world of its own, as a trainer and an inference engine are. What spans them needs no
GPU: a gloo group, torchrun's store, and where both sides share the GPUs (colocated) handles of memory.
"""
import datetime
import pickle
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing  # teaches the pickler tensors' handles
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

import refit

TIMEOUT = datetime.timedelta(minutes=10)
PACKED_BYTES = 1 << 30


class Span:
    """All processes of both sides: source ranks, then destination ranks."""

    def __init__(self):
        self.store, self.rank, self.size = next(dist.rendezvous("env://", timeout=TIMEOUT))
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("span", self.store), self.rank, self.size, TIMEOUT)
        self._gathered = 0

    def gather(self, value):
        """Every process's value, by rank."""
        self._gathered += 1
        self.store.set(f"gather/{self._gathered}/{self.rank}", pickle.dumps(value))
        return [pickle.loads(self.store.get(f"gather/{self._gathered}/{rank}")) for rank in range(self.size)]

    def barrier(self):
        self._gloo.barrier().wait()

    def largest(self, number):
        value = torch.tensor([number], dtype=torch.float64)
        self._gloo.allreduce(value, dist.ReduceOp.MAX).wait()
        return value.item()


class SharedMemoryExecutor:
    """On the CPU the executor's ranks are threads of one process. Here it is that of rank 0, which maps the live
    tensors of all others and refits them in place."""

    def __init__(self, plan, span, parameters):
        torch.multiprocessing.set_sharing_strategy("file_system")
        self._plan, self._span = plan, span
        self._mine = {name: refit.tensors.local_part(tensor.detach()) for name, tensor in parameters.items()}
        for part in self._mine.values():
            if part.numel() > 0:
                part.share_memory_()  # moves the storage: the model's own tensor is there now
        handles = span.gather({name: bytes(ForkingPickler.dumps(part)) for name, part in self._mine.items()})
        self._all = [{name: pickle.loads(handle) for name, handle in held.items()}
                     for held in handles] if span.rank == 0 else []
        span.barrier()

    def run(self):
        self._span.barrier()
        if self._all:
            refit.run_local(self._plan, self._all)
        self._span.barrier()

    def close(self):
        self._all = []


class Broadcast:
    """Source rank 0 broadcasts whole tensors to all destination ranks, on devices of their own."""

    NAME = "broadcast"

    def __init__(self, span, source_ranks, device):
        self._device, self._group = device, None
        members = [0, *range(source_ranks, span.size)]
        if span.rank in members:
            store = dist.PrefixStore("broadcast", span.store)
            index = members.index(span.rank)
            if device.type == "cuda":
                self._group = dist.ProcessGroupNCCL(store, index, len(members), dist.ProcessGroupNCCL.Options())
            else:
                self._group = dist.ProcessGroupGloo(store, index, len(members), TIMEOUT)

    def send(self, whole):
        if self._group is not None:
            self._group.broadcast(whole, root=0).wait()

    def receive(self, size, dtype):
        whole = torch.empty(size, device=self._device, dtype=dtype)
        self._group.broadcast(whole, root=0).wait()
        return whole

    def received(self):
        pass

    def close(self):
        if self._group is not None and self._device.type == "cuda":
            self._group.shutdown()


class HandOver:
    """Source rank i hands whole tensors to destination rank i, which shares its GPU, by handles of the memory."""

    NAME = "hand over"

    def __init__(self, span, source_ranks, device):
        self._store = dist.PrefixStore(f"hand_over/{span.rank % source_ranks}", span.store)
        self._device, self._number = device, 0

    def send(self, whole):
        self._number += 1
        self._store.set(f"handle/{self._number}", bytes(ForkingPickler.dumps(whole)))
        self._store.get(f"received/{self._number}")

    def receive(self, size, dtype):
        self._number += 1
        return pickle.loads(self._store.get(f"handle/{self._number}"))

    def received(self):
        synchronize(self._device)
        self._store.set(f"received/{self._number}", "")

    def close(self):
        pass


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def move_packed(parameters, shapes, is_source, carrier, bytes_max=PACKED_BYTES):
    """The source gathers its tensors and packs them, whole; the destination unpacks and keeps its parts. With
    `bytes_max` 0 each tensor goes alone."""
    for names in _packs(parameters, shapes, bytes_max):
        dtype = parameters[names[0]].dtype
        if is_source:
            whole = [parameters[name].detach().full_tensor() for name in names]
            carrier.send(whole[0].contiguous() if len(names) == 1 else torch.cat([part.flatten() for part in whole]))
            continue
        sizes = [torch.Size(shapes[name]).numel() for name in names]
        packed = carrier.receive(shapes[names[0]] if len(names) == 1 else [sum(sizes)], dtype)
        for name, whole in zip(names, packed.flatten().split(sizes)):
            _keep_part(parameters[name].detach(), whole.view(shapes[name]))
        del packed, whole
        carrier.received()


def _packs(parameters, shapes, bytes_max):
    packs, packed_bytes = [], 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * parameters[name].element_size()
        if not packs or packed_bytes + size > bytes_max:
            packs.append([])
            packed_bytes = 0
        packs[-1].append(name)
        packed_bytes += size
    return packs


def _keep_part(parameter, whole):
    if hasattr(parameter, "placements"):
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
    refit.tensors.local_part(parameter).copy_(whole)
