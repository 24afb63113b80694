"""Measures what NCCL takes for each peer of a rank: memory of the GPU and of the host.

usage: python bench/nccl_peers.py [--library libnccl.so.2] [--megabytes 64]

Rank 0 exchanges messages with one more rank at a time, both ways, on all GPUs of this host. First
with ranks of one host, then with ranks that take each other for other hosts' (NCCL_HOSTID), which
NCCL reaches over its network: InfiniBand where it finds any, else sockets. Needs two GPUs and torch.
"""

import argparse
import ctypes
import multiprocessing
import os

NCCL_UNIQUE_ID_BYTES = 128
NCCL_INT8 = 0


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * NCCL_UNIQUE_ID_BYTES)]


def check(error, what):
    if error != 0:
        raise RuntimeError(f"{what}: NCCL error {error}")


def host_bytes():
    """What this process holds of the host's memory, with what it shares."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


def run_rank(rank, ranks, library, size_bytes, over_network, ids, barrier, results):
    if over_network:
        os.environ["NCCL_HOSTID"] = f"host{rank}"
    import torch

    nccl = ctypes.CDLL(library)
    nccl.ncclCommInitRank.argtypes = [
        ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
    for call in (nccl.ncclSend, nccl.ncclRecv):
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
                         ctypes.c_void_p, ctypes.c_void_p]
    torch.cuda.set_device(rank)
    stream = torch.cuda.Stream()
    sent = torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")
    received = torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()

    def taken():
        barrier.wait()
        free, total = torch.cuda.mem_get_info()
        return total - free, host_bytes()

    before = taken()
    if rank == 0:
        unique = UniqueId()
        check(nccl.ncclGetUniqueId(ctypes.byref(unique)), "ncclGetUniqueId")
        for _ in range(ranks):
            ids.put(bytes(unique))
    unique = UniqueId.from_buffer_copy(ids.get())
    communicator = ctypes.c_void_p()
    check(nccl.ncclCommInitRank(ctypes.byref(communicator), ranks, unique, rank),
          "ncclCommInitRank")
    marks = [before, taken()]
    for peer in range(1, ranks):
        for other in [peer] if rank == 0 else [0] if rank == peer else []:
            check(nccl.ncclGroupStart(), "ncclGroupStart")
            for call, tensor in ((nccl.ncclSend, sent), (nccl.ncclRecv, received)):
                check(call(tensor.data_ptr(), size_bytes, NCCL_INT8, other, communicator,
                           stream.cuda_stream), "ncclSend or ncclRecv")
            check(nccl.ncclGroupEnd(), "ncclGroupEnd")
            stream.synchronize()
        marks.append(taken())
    if rank == 0:
        results.put([[now - then for then, now in zip(a, b)] for a, b in zip(marks, marks[1:])])
    barrier.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", default="libnccl.so.2", help="NCCL (default libnccl.so.2)")
    parser.add_argument("--megabytes", type=int, default=64, help="MiB of a message (default 64)")
    options = parser.parse_args()
    import torch

    version = ctypes.c_int()
    check(ctypes.CDLL(options.library).ncclGetVersion(ctypes.byref(version)), "ncclGetVersion")
    ranks = torch.cuda.device_count()
    if ranks < 2:
        parser.error(f"this host has {ranks} GPUs; wanted 2 at least")
    print(f"NCCL {version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}, "
          f"{ranks} x {torch.cuda.get_device_name()}, MiB of rank 0")
    context = multiprocessing.get_context("spawn")
    for over_network in (False, True):
        ids, results, barrier = context.Queue(), context.Queue(), context.Barrier(ranks)
        processes = [
            context.Process(target=run_rank,
                            args=(rank, ranks, options.library, options.megabytes << 20,
                                  over_network, ids, barrier, results))
            for rank in range(ranks)]
        for process in processes:
            process.start()
        rows = results.get(timeout=120)
        for process in processes:
            process.join()
        print("between hosts" if over_network else "inside a host")
        for number, (device, host) in enumerate(rows):
            what = "the communicator" if number == 0 else f"peer {number}"
            print(f"  {what:18} GPU {device / 2**20:8.1f}  host {host / 2**20:8.1f}")


if __name__ == "__main__":
    main()
