#!/usr/bin/env python3
"""Holds refit-sim against refits over a real network: hosts of namespaces on a switch, with links of a set rate.

usage: simulator_network.py BIN [--rate MBIT] [--iterations N] [--limit PERCENT] [CASE ...]

BIN holds refitc, refit-run and refit-sim. Each host is a network namespace with one cable to a bridge in a namespace of its own.
Both ends of the cable send at --rate (tc's htb). Each rank is a process of the UCX transport over TCP, on the CPU. Links must be slow
enough that processors do not bind. Prints simulated and measured time of each case. Exit status: 0, or 1 when a case
is further off than --limit, or 77 when hosts cannot be made here (it takes root, ip, tc, unshare and nsenter).
"""
import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from network_hosts import NetworkHosts, run

SECONDS = 300  # of any wait: the machine may be busy
HOSTS = 8
# TCP's payload in an Ethernet frame of 1,500 bytes and its header, with time stamps.
PAYLOAD = 1448 / 1514
MODEL = {"parameters": [{"name": f"layers.{layer}.{kind}", "shape": shape, "dtype": "bf16"}
                        for layer in range(4)
                        for kind, shape in (("up", [1536, 512]), ("down", [512, 1536]), ("norm", [512]))]}


def fsdp(ranks, replicas=1):
    return {"layout": "fsdp", "data_parallel": ranks, "replicas": replicas}


def job(source, destination, gpus_per_host=1, **options):
    return {"model": MODEL, "source": source, "destination": destination,
            "topology": {"gpus_per_host": gpus_per_host}, "options": {"bucket_bytes": 1 << 20, **options}}


class Case:
    def __init__(self, text, job, slow=None, simulate=()):
        self.text, self.job, self.slow, self.simulate = text, job, slow or {}, simulate


CASES = {
    "all-to-all": Case("4 trainers to 4 engine ranks", job(fsdp(4), fsdp(4))),
    "few-to-many": Case("2 trainers to 6 engine ranks", job(fsdp(2), fsdp(6))),
    "many-to-few": Case("6 trainers to 2 engine ranks", job(fsdp(6), fsdp(2))),
    "relays": Case("1 trainer, 7 engines that relay", job(fsdp(1), fsdp(1, 7))),
    "relays-of-two": Case("2 trainers, 3 engines of 2 that relay", job(fsdp(2), fsdp(2, 3))),
    "small-buckets": Case("4 trainers to 4 engine ranks, messages of 128 KiB",
                          job(fsdp(4), fsdp(4), bucket_bytes=1 << 17)),
    "slow-nic": Case("4 trainers to 4 engine ranks, host 5 at half speed", job(fsdp(4), fsdp(4)), slow={5: 2},
                     simulate=("--slow-nic", "5=2")),
    # A host's two ranks share its cable: they are oversubscribed.
    "two-per-host": Case("8 trainers to 8 engine ranks, 2 on a host", job(fsdp(8), fsdp(8), gpus_per_host=2),
                         simulate=("--oversubscribe", "2")),
}


def set_rate(network, host, mbit):
    """Both ways of the host's cable. Each peer has a queue of its own, and the queues take turns: fair shares."""
    for at, device, field in ((host, "wire0", "dst"), (network.switch, f"port{host}", "src")):
        subprocess.run([*network.prefix(at), "tc", "qdisc", "del", "dev", device, "root"], stderr=subprocess.DEVNULL,
                       check=False)
        leaf = f"rate {mbit / HOSTS}mbit ceil {mbit}mbit burst 16kb cburst 16kb quantum 1514"
        lines = [f"qdisc add dev {device} root handle 1: htb default 100",
                 f"class add dev {device} parent 1: classid 1:1 htb rate {mbit}mbit burst 16kb cburst 16kb quantum 1514",
                 f"class add dev {device} parent 1:1 classid 1:100 htb {leaf}"]
        for peer in range(HOSTS):
            lines.append(f"class add dev {device} parent 1:1 classid 1:{10 + peer} htb {leaf}")
            lines.append(f"qdisc add dev {device} parent 1:{10 + peer} bfifo limit 128kb")
            lines.append(f"filter add dev {device} parent 1: protocol ip u32 match ip {field} {network.address(peer)}/32 "
                         f"flowid 1:{10 + peer}")
        network.at(at, "tc", "-batch", "-", text="\n".join(lines))


def measure(bin_dir, network, plan, case, iterations):
    """The median refit, as rank 0 reports it; the first connects and is left out."""
    per_host = case.job["topology"]["gpus_per_host"]
    ranks = sum(case.job[side]["data_parallel"] * case.job[side]["replicas"] for side in ("source", "destination"))
    processes = []
    for rank in range(ranks):
        of_rank = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank % per_host),
                       MASTER_ADDR=network.address(0), MASTER_PORT="29500", REFIT_SECRET="of this run, which is alone",
                       UCX_TLS="tcp,self,sm" if per_host > 1 else "tcp,self", UCX_NET_DEVICES="wire0")
        processes.append(subprocess.Popen(
            [*network.prefix(rank // per_host), bin_dir / "refit-run", plan, "--transport", "ucx", "--check", "--iterations",
             str(iterations + 1), "--json"], env=of_rank, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
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
    return [refit["seconds"] for refit in result["refits"]][1:]


def simulate(bin_dir, plan, case, mbit):
    gigabytes = mbit * 1e6 / 8 * PAYLOAD / 1e9
    return json.loads(run(bin_dir / "refit-sim", plan, "--executor", "cpu", "--json", "--peer-gigabytes-per-second", "1",
                          "--network-gigabytes-per-second", gigabytes, *case.simulate))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=pathlib.Path)
    parser.add_argument("--rate", type=int, default=80, help="of a link, in Mbit/s")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--limit", type=float, default=10, help="the largest error, in percent")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    arguments = parser.parse_intermixed_args()
    bin_dir = arguments.bin.resolve()
    far = []
    with contextlib.ExitStack() as stack:
        work = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        network = stack.enter_context(NetworkHosts(HOSTS))
        print(f"{HOSTS} hosts, links of {arguments.rate} Mbit/s, load of this machine {os.getloadavg()[0]:.1f}")
        print("| case | | simulated | measured, median | least | most | error |\n|---|---|---|---|---|---|---|")
        for name in arguments.cases:
            case = CASES[name]
            for host in range(HOSTS):
                set_rate(network, host, arguments.rate // case.slow.get(host, 1))
            path, plan = work / f"{name}.json", work / f"{name}.refit"
            path.write_text(json.dumps(case.job))
            run(bin_dir / "refitc", path, "-o", plan)
            simulated = simulate(bin_dir, plan, case, arguments.rate)["simulated_seconds"]
            seconds = measure(bin_dir, network, plan, case, arguments.iterations)
            median = statistics.median(seconds)
            error = 100 * (simulated / median - 1)
            print(f"| {name} | {case.text} | {simulated:.3f} s | {median:.3f} s | {min(seconds):.3f} | {max(seconds):.3f} | "
                  f"{error:+.1f} % |", flush=True)
            if abs(error) > arguments.limit:
                far.append(name)
    if far:
        print(f"further off than {arguments.limit} %: {', '.join(far)}")
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
