#!/usr/bin/env python3
"""Times delta refits between two hosts, by the share of values that changed.

usage: network_deltas.py BIN [--rate MBIT] [--megabytes N] [--iterations N] [--bitmap]

BIN holds refitc and refit-run. The hosts are namespaces (network_hosts.py) with a cable that carries --rate each way (tc's
tbf). One trainer feeds one engine, both on the CPU, by the UCX transport over TCP. Prints the median of the refits behind the
first as rank 0 reports them: with what finds, encodes and applies the changes, and with the check of digests. With --bitmap
the trainer marks what it changes, and compares nothing.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from network_hosts import NetworkHosts, run

SECONDS = 600  # of any wait: the machine may be busy
RATES = (0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.6, 1)


def job(megabytes, delta):
    side = {"layout": "fsdp", "data_parallel": 1}
    return {"model": {"parameters": [{"name": f"layers.{layer}.weight", "shape": [1024, 512], "dtype": "bf16"}
                                     for layer in range(megabytes)]},
            "source": side, "destination": side, "topology": {"gpus_per_host": 1}, "options": {"delta": delta}}


def refits(network, bin_dir, plan, *arguments):
    processes = []
    for rank in range(2):
        of_rank = dict(os.environ, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR=network.address(0),
                       MASTER_PORT="29500", REFIT_SECRET="of this run, which is alone", UCX_TLS="tcp,self",
                       UCX_NET_DEVICES="wire0")
        processes.append(subprocess.Popen(
            [*network.prefix(rank), bin_dir / "refit-run", plan, "--transport", "ucx", "--check", "--json", *arguments],
            env=of_rank, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        ends = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, (_, error)) in enumerate(zip(processes, ends)):
        if process.returncode != 0:
            raise RuntimeError(f"rank {rank}: status {process.returncode}: {error}")
    result = json.loads(ends[0][0])
    if not result["passed"]:
        raise RuntimeError(f"wrong bytes: {result}")
    return result["refits"][1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=pathlib.Path)
    parser.add_argument("--rate", type=int, default=1000, help="of the cable, in Mbit/s")
    parser.add_argument("--megabytes", type=int, default=64, help="of weights")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--bitmap", action="store_true")
    arguments = parser.parse_args()
    bin_dir, count = arguments.bin.resolve(), str(arguments.iterations)
    for program in ("refitc", "refit-run"):
        if not (bin_dir / program).is_file():
            print(f"network_deltas.py: no {program} in {arguments.bin}; build first: cmake --preset release && "
                  "cmake --build --preset release --target refit_tools", file=sys.stderr)
            return 2
    with tempfile.TemporaryDirectory() as work, NetworkHosts(2) as network:
        for host in range(2):
            network.at(host, "tc", "qdisc", "add", "dev", "wire0", "root", "tbf", "rate", f"{arguments.rate}mbit", "burst",
                       "256kb", "latency", "50ms")

        def compile_job(delta):
            path = pathlib.Path(work) / "job.json"
            path.write_text(json.dumps(job(arguments.megabytes, delta)))
            run(bin_dir / "refitc", path, "-o", path.with_suffix(".refit"))
            return path.with_suffix(".refit")

        whole = refits(network, bin_dir, compile_job(False), "--iterations", str(arguments.iterations + 1))
        dense = statistics.median(refit["seconds"] for refit in whole)
        print(f"{arguments.megabytes} MiB of bf16 over {arguments.rate} Mbit/s, load of this machine {os.getloadavg()[0]:.1f}")
        print("| changed | rung | bytes | refit | of dense |\n|---|---|---|---|---|")
        print(f"| plan without deltas | | {arguments.megabytes << 20} | {dense * 1e3:.1f} ms | 1 |")
        plan = compile_job({"dense_every": 0, "changes": "bitmap" if arguments.bitmap else "snapshot"})
        for rate in RATES:
            deltas = refits(network, bin_dir, plan, "--delta", "--change-rate", str(rate), "--iterations", count)
            seconds = statistics.median(refit["seconds"] for refit in deltas)
            last = deltas[-1]["delta"]
            print(f"| {100 * rate:g} % | {last['rung']} | {last['stored_bytes']} | {seconds * 1e3:.1f} ms | "
                  f"1/{dense / seconds:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
