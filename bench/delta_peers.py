#!/usr/bin/env python3
"""Times refits between two hosts by the share of values that changed: ours, and the ways of others, in one run and one table.

usage: delta_peers.py BIN [--device cuda|cpu] [--tensors N] [--rows N] [--rates R,R,…] [--iterations N] [--without-zstd]

BIN holds refitc and refit-run. One rank feeds another; both may be on one GPU, which NCCL then takes for two hosts
(NCCL_HOSTID) and joins by sockets. Needs PyTorch, and libzstd for the last way. After each refit every way compares all
elements. The others' ways, as their sources do it:

broadcast   all weights, packed into buffers of 1 GiB
int32       a snapshot beside the weights; an int32 index and a value for each change, broadcast, and stored by index
zstd        a snapshot in host memory, compared there; indices and values go through zstd and TCP, and are stored by index

Changes are scattered evenly. Prints the best of --iterations refits, in ms.
"""
import argparse
import ctypes
import ctypes.util
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

SECONDS = 600  # of any wait
BUCKET_BYTES = 1 << 30
ZSTD_LEVEL = 1


def environment(rank, port, master):
    return dict(os.environ, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR=master, MASTER_PORT=str(port),
                NCCL_HOSTID=f"refit-host-{rank}", REFIT_SECRET="of this run, which is alone")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def on_both(command):
    """Runs it as both ranks; what rank 0 prints."""
    port = free_port()
    processes = [subprocess.Popen([*map(str, command)], env=environment(rank, port, "127.0.0.1"), stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        ends = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, (_, error)) in enumerate(zip(processes, ends)):
        if process.returncode != 0:
            raise RuntimeError(f"rank {rank}: status {process.returncode}: {error}")
    return ends[0][0]


def ours(options, rates):
    """Best seconds of a plan without deltas, and of one with them by rate, with the rung."""
    transport = "nccl" if options.device == "cuda" else "ucx"
    side = {"layout": "generic", "meshes": {"m": {"axes": {"x": 1}}},
            "tensors": [{"match": "*", "mesh": "m", "placements": ["Replicate"]}]}
    shape = [options.rows, options.rows]
    job = {"model": {"parameters": [{"name": f"layers.{i}.weight", "shape": shape, "dtype": "bf16"}
                                    for i in range(options.tensors)]},
           "source": side, "destination": side, "topology": {"hosts": [0, 1]}}
    with tempfile.TemporaryDirectory() as work:
        path = pathlib.Path(work) / "job.json"

        def refits(delta, *arguments):
            path.write_text(json.dumps({**job, "options": {"delta": delta}}))
            plan = path.with_suffix(".refit")
            subprocess.run([options.bin / "refitc", path, "-o", plan], check=True)
            result = json.loads(on_both([options.bin / "refit-run", plan, "--transport", transport, "--check", "--json",
                                         *arguments]))
            if not result["passed"]:
                raise RuntimeError(f"wrong elements: {result}")
            return result["refits"][1:]

        whole = min(refit["seconds"] for refit in refits(False, "--iterations", options.iterations + 1))
        deltas = {}
        for rate in rates:
            found = refits({"dense_every": 0}, "--delta", "--change-rate", rate, "--iterations", options.iterations)
            deltas[rate] = min(refit["seconds"] for refit in found), found[-1]["delta"]["rung"]
    return whole, deltas


class Zstd:
    def __init__(self):
        self.lib = ctypes.CDLL(ctypes.util.find_library("zstd") or "libzstd.so.1")
        for name in ("ZSTD_compress", "ZSTD_decompress", "ZSTD_compressBound"):
            getattr(self.lib, name).restype = ctypes.c_size_t

    def _call(self, function, to, frm, *arguments):
        size = function(ctypes.c_void_p(to.ctypes.data), ctypes.c_size_t(to.nbytes), ctypes.c_void_p(frm.ctypes.data),
                        ctypes.c_size_t(frm.nbytes), *arguments)
        if self.lib.ZSTD_isError(ctypes.c_size_t(size)):
            raise RuntimeError("zstd failed")
        return size

    def compress(self, data):
        import numpy
        to = numpy.empty(self.lib.ZSTD_compressBound(ctypes.c_size_t(data.nbytes)), numpy.uint8)
        return to[:self._call(self.lib.ZSTD_compress, to, data, ZSTD_LEVEL)]

    def decompress(self, data, size):
        import numpy
        to = numpy.empty(size, numpy.uint8)
        self._call(self.lib.ZSTD_decompress, to, data)
        return to


class Peer:
    """One of two ranks that refit as others do: rank 0 holds what changes, rank 1 takes it."""

    def __init__(self, options):
        import numpy
        import torch
        import torch.distributed as dist
        self.torch, self.numpy, self.dist, self.options = torch, numpy, dist, options
        self.rank = int(os.environ["RANK"])
        self.sends = self.rank == 0
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
        self.host_group = dist.new_group(backend="gloo")
        self.device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
        count = options.rows * options.rows
        # As bits: all of them are compared.
        self.weights = [torch.full((count,), i, dtype=torch.int16, device=self.device) for i in range(options.tensors)]
        self.expected = [weight.clone() for weight in self.weights]
        self.snapshot = [weight.clone() for weight in self.weights] if self.sends else []
        self.pinned = [self.host(weight.cpu()) for weight in self.weights] if self.sends else []
        self.on_host = [weight.cpu().numpy().copy() for weight in self.weights] if self.sends else []
        self.zstd = None
        self.random = torch.Generator(self.device)
        self.random.manual_seed(1)  # both ranks draw the same

    def host(self, tensor):
        return tensor.pin_memory() if self.device.type == "cuda" else tensor.clone()

    def change(self, rate):
        for i, expected in enumerate(self.expected):
            draws = self.torch.rand(expected.numel(), device=self.device, generator=self.random)
            expected ^= (draws < rate).to(self.torch.int16)
            if self.sends:
                self.weights[i].copy_(expected)

    def wait(self):
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def timed(self, refit):
        self.wait()
        self.dist.barrier(group=self.host_group)
        begin = time.perf_counter()
        refit()
        self.wait()
        self.dist.barrier(group=self.host_group)
        seconds = time.perf_counter() - begin
        for weight, expected in zip(self.weights, self.expected):
            if not self.torch.equal(weight, expected):
                raise RuntimeError("wrong elements")
        return seconds

    def broadcast(self):
        per_bucket = max(1, BUCKET_BYTES // (2 * self.weights[0].numel()))
        for i in range(0, len(self.weights), per_bucket):
            of = self.weights[i:i + per_bucket]
            bucket = self.torch.cat(of) if self.sends else self.torch.empty(sum(w.numel() for w in of),
                                                                            dtype=self.torch.int16, device=self.device)
            self.dist.broadcast(bucket.view(self.torch.uint8), 0)
            if not self.sends:
                for weight, part in zip(of, bucket.split([w.numel() for w in of])):
                    weight.copy_(part)

    def int32(self):
        torch = self.torch
        counts = torch.zeros(len(self.weights), dtype=torch.int64, device=self.device)
        if self.sends:
            places = [(weight != held).nonzero().view(-1) for weight, held in zip(self.weights, self.snapshot)]
            counts.copy_(torch.tensor([len(each) for each in places]))
            index = torch.cat(places).to(torch.int32)
            values = torch.cat([weight[at] for weight, at in zip(self.weights, places)])
        self.dist.broadcast(counts, 0)
        sizes = counts.tolist()
        if not self.sends:
            index = torch.empty(sum(sizes), dtype=torch.int32, device=self.device)
            values = torch.empty(sum(sizes), dtype=torch.int16, device=self.device)
        self.dist.broadcast(index, 0)
        self.dist.broadcast(values.view(torch.uint8), 0)
        for weight, at, value in zip(self.snapshot if self.sends else self.weights, index.split(sizes), values.split(sizes)):
            weight[at.long()] = value

    def zstd_on_host(self):
        torch, numpy = self.torch, self.numpy
        self.zstd = self.zstd or Zstd()
        if self.sends:
            for host, weight in zip(self.pinned, self.weights):
                host.copy_(weight, non_blocking=True)
            self.wait()
            parts, sizes = [], []
            for host, held in zip(self.pinned, self.on_host):
                now = host.numpy()
                at = numpy.flatnonzero(now != held).astype(numpy.uint32)
                held[at] = now[at]
                # Distances are small numbers, which compress well.
                parts += [numpy.diff(at, prepend=numpy.uint32(0)).view(numpy.uint8), now[at].view(numpy.uint8)]
                sizes.append(len(at))
            plain = numpy.concatenate(parts)
            packed = self.zstd.compress(plain)
            head = torch.tensor([len(packed), len(plain), *sizes])
        else:
            head = torch.zeros(2 + len(self.weights), dtype=torch.int64)
        self.dist.broadcast(head, 0, group=self.host_group)
        packed_size, plain_size, *sizes = head.tolist()
        data = torch.from_numpy(packed) if self.sends else torch.empty(packed_size, dtype=torch.uint8)
        self.dist.broadcast(data, 0, group=self.host_group)
        if self.sends:
            return
        plain = self.zstd.decompress(data.numpy(), plain_size)
        end = 0
        for weight, size in zip(self.weights, sizes):
            at = numpy.cumsum(plain[end:end + 4 * size].view(numpy.uint32), dtype=numpy.int64)
            value = plain[end + 4 * size:end + 6 * size].view(numpy.int16)
            end += 6 * size
            weight[torch.from_numpy(at).to(self.device)] = torch.from_numpy(value.copy()).to(self.device)

    def sweep(self, rates, iterations):
        ways = {"broadcast": self.broadcast, "int32": self.int32}
        if not self.options.without_zstd:
            ways["zstd"] = self.zstd_on_host
        best = {}
        for name, way in ways.items():
            for held, weight in zip(self.snapshot, self.weights):
                held.copy_(weight)
            for held, weight in zip(self.on_host, self.weights):
                held[:] = weight.cpu().numpy()
            best[name] = {}
            for rate in [rates[0]] if name == "broadcast" else rates:
                seconds = []
                for _ in range(iterations + 1):  # the first makes connections and memory
                    self.change(rate)
                    seconds.append(self.timed(way))
                best[name][rate] = min(seconds[1:])
        return best


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=pathlib.Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tensors", type=int, default=24)
    parser.add_argument("--rows", type=int, default=8192, help="and columns of each")
    parser.add_argument("--rates", default="0.001,0.003,0.01,0.03,0.1,0.3,0.6")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--without-zstd", action="store_true", help="it takes minutes")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.bin = options.bin.resolve()
    rates = [float(rate) for rate in options.rates.split(",")]
    if options.peer:
        peer = Peer(options)
        best = peer.sweep(rates, options.iterations)
        if peer.rank == 0:
            print(json.dumps({name: list(of.values()) for name, of in best.items()}))
        peer.dist.destroy_process_group()
        return 0
    peers = json.loads(on_both([sys.executable, "-B", __file__, *sys.argv[1:], "--peer"]).splitlines()[-1])
    whole, deltas = ours(options, rates)
    bytes_ = options.tensors * options.rows ** 2 * 2
    broadcast = peers["broadcast"][0]
    print(f"{bytes_ / 1e9:.2f} GB of bf16, ms, best of {options.iterations}. Dense: plan {whole * 1e3:.1f}, "
          f"broadcast {broadcast * 1e3:.1f}\n")
    others = {"int32 and value": peers["int32"]}
    if not options.without_zstd:
        others["host snapshot, zstd"] = peers["zstd"]
    print("| changed | plan with deltas | rung | " + "".join(f"{name} | / ours | " for name in others))
    print("|---|---|---|" + "---|---|" * len(others))
    for i, rate in enumerate(rates):
        seconds, rung = deltas[rate]
        print(f"| {100 * rate:g} % | {seconds * 1e3:.1f} | {rung} | "
              + "".join(f"{of[i] * 1e3:.1f} | {of[i] / seconds:.1f} | " for of in others.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
