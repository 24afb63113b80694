#!/usr/bin/env python3
"""Refits between real processes over UCX, on this host and between network namespaces that stand for hosts.

usage: ucx_processes_test.py BIN CASE

BIN holds refitc and refit-run. Exit status 77: the case needs something that is not here; it says what.
"""
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

SECONDS = 240  # of any wait: the machine may be busy
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from network_hosts import NetworkHosts  # noqa: E402

# Two hosts, a trainer on one and two engines on the other; a second engine gives the plan relays.
JOB = {
    "model": {"parameters": [{"name": f"layers.{layer}.{kind}", "shape": shape, "dtype": "bf16"}
                             for layer in range(4)
                             for kind, shape in (("up", [1024, 512]), ("down", [512, 1024]), ("norm", [512]))]},
    "source": {"layout": "fsdp", "data_parallel": 2},
    "destination": {"layout": "fsdp", "data_parallel": 3},
    "topology": {"gpus_per_host": 8},
}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Test:
    def __init__(self, bin_dir, work):
        self.bin, self.work = pathlib.Path(bin_dir).resolve(), pathlib.Path(work)

    def compile(self, name, job):
        path, plan = self.work / f"{name}.json", self.work / f"{name}.refit"
        path.write_text(json.dumps(job))
        subprocess.run([self.bin / "refitc", path, "-o", plan], check=True)
        return plan

    def start(self, plan, ranks, arguments=(), **how):
        """refit-run, a process for each rank."""
        return self.start_ranks([self.bin / "refit-run", plan, "--transport", "ucx", "--check", *arguments], ranks, **how)

    @staticmethod
    def start_ranks(command, ranks, env=None, address="127.0.0.1", prefix=lambda rank: [], more=lambda rank: []):
        """A process for each rank, as torchrun would start it."""
        port = str(free_port())
        processes = []
        for rank in range(ranks):
            of_rank = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank),
                           MASTER_ADDR=address, MASTER_PORT=port, REFIT_SECRET="of the test, which is alone",
                           **(env or {}))
            processes.append(subprocess.Popen([*prefix(rank), *command, *more(rank)], env=of_rank, stdout=subprocess.PIPE,
                                              stderr=subprocess.PIPE, text=True))
        return processes

    @staticmethod
    def finish(processes):
        """The exit status, the output and the errors of each."""
        ends = []
        for process in processes:
            try:
                out, error = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                for left in processes:
                    left.kill()
                raise
            ends.append((process.returncode, out, error))
        return ends

    def expect_right(self, plan, ranks, arguments=(), **how):
        ends = self.finish(self.start(plan, ranks, (*arguments, "--iterations", "2", "--json"), **how))
        for rank, (status, out, error) in enumerate(ends):
            assert status == 0 and not error, f"rank {rank}: status {status}: {error}"
            assert (out != "") == (rank == 0), f"rank {rank} wrote {out!r}"
        result = json.loads(ends[0][1])
        assert result["passed"] and result["wrong_elements"] == 0, result
        assert result["checked_bytes"] == result["destination_bytes"] > 0, result
        return result


def ranks_of(job):
    """Of jobs whose sides have data and tensor parallelism and replicas alone."""
    def of(side):
        return (side.get("data_parallel", 1) * side.get("tensor_parallel", 1) * side.get("pipeline_parallel", 1) *
                side.get("replicas", 1))
    return of(job["source"]) + of(job["destination"])


def changed(job, **parts):
    return {**job, **parts}


def plans(test):
    """Every way through a plan: direct, staged, relays, several hosts, casts."""
    jobs = {
        "direct": JOB,
        "staged": changed(JOB, options={"peer": "staged", "bucket_bytes": 65536}),
        "hosts": changed(JOB, topology={"gpus_per_host": 2}),
        "relays": changed(JOB, destination={"layout": "fsdp", "data_parallel": 2, "replicas": 3}),
        "relays-between-hosts": changed(JOB, destination={"layout": "fsdp", "data_parallel": 2, "replicas": 3},
                                        topology={"gpus_per_host": 2}),
        "dealt": changed(JOB, destination={"layout": "fsdp", "data_parallel": 4}, topology={"gpus_per_host": 2},
                         options={"bucket_bytes": 65536}),
        "cast": changed(JOB, destination={"layout": "fsdp", "data_parallel": 3, "dtype": "fp32"}),
    }
    for name, job in jobs.items():
        result = test.expect_right(test.compile(name, job), ranks_of(job))
        # Told, not hidden.
        assert result.get("sends_direct_rounds", False) == (name in ("direct", "relays", "cast")), result
        print(f"{name}: right, {result['peak_staging_bytes']} bytes of staging on a rank", flush=True)


def deltas(test):
    """Refits that send only what changed, staged and between hosts."""
    delta = {"delta": {"dense_every": 0}}
    jobs = {
        "staged": changed(JOB, options={**delta, "peer": "staged"}),
        "hosts": changed(JOB, topology={"gpus_per_host": 2}, options=delta),
        "bitmap": changed(JOB, topology={"gpus_per_host": 2}, options={"delta": {"dense_every": 0, "changes": "bitmap"}}),
        # Direct rounds, sent in parts, beside staged ones.
        "mixed": {"model": {"parameters": [{"name": f"layers.{layer}.up", "shape": [1500, 512], "dtype": "bf16"}
                                           for layer in range(4)]},
                  "source": {"layout": "fsdp", "data_parallel": 2}, "destination": {"layout": "fsdp", "data_parallel": 4},
                  "topology": {"gpus_per_host": 4}, "options": {**delta, "bucket_bytes": 65536}},
    }
    for name, job in jobs.items():
        result = test.expect_right(test.compile(name, job), ranks_of(job), arguments=("--delta", "--change-rate", "0.01"))
        first, *others = [refit["delta"]["rung"] for refit in result["refits"]]
        text = subprocess.run([test.bin / "refit-run", test.work / f"{name}.refit", "--transport", "ucx", "--ranks-in-process",
                               "--check"], check=True, capture_output=True, text=True).stdout
        assert (" + snapshots " in text) == (name != "bitmap"), text
        assert first == "dense" and set(others) == {"1/64"}, (name, result["refits"])
        whole, *parts = [refit["delta"]["stored_bytes"] for refit in result["refits"]]
        assert all(part < whole / 25 for part in parts), (name, whole, parts)
        print(f"{name}: {parts} of {whole} bytes", flush=True)


def flags(test):
    """Ranks that were not started alike are told before the first refit, and not that bytes are wrong."""
    plan, ranks = test.compile("staged", changed(JOB, options={"peer": "staged", "delta": True})), ranks_of(JOB)
    alike = "--iterations 2 --delta --change-rate 0.01"
    for other in ("--iterations 2 --delta --change-rate 0.02", "--iterations 3 --delta --change-rate 0.01",
                  "--iterations 2", "--iterations 2 --digest --delta --change-rate 0.01"):
        ends = test.finish(test.start(plan, ranks, more=lambda rank: (other if rank == 1 else alike).split()))
        for status, out, error in ends:
            assert (status, out) == (2, ""), (status, out, error)
            assert error == (f"refit-run: error: rank 1 was started with {other}, and rank 0 with {alike}; start all ranks with the "
                             "same flags\n"), error
        print(ends[0][2].strip(), flush=True)


def unmet(test):
    """A rank that ends before it meets the others tells them why."""
    plan, ranks = test.compile("plan", JOB), ranks_of(JOB)
    for arguments, why in ((["missing.refit"], "missing.refit: No such file or directory"),
                           ([plan, "--delta"], "--delta needs a plan with staged rounds whose job has options.delta; all refits of this one are dense"),
                           ([plan, "--change-rate", "0.1"], "--change-rate needs --delta")):
        for bad in (0, 1):
            begin = time.monotonic()
            ends = test.finish(test.start_ranks(
                [test.bin / "refit-run", "--transport", "ucx", "--check", "--timeout", str(SECONDS)], ranks,
                more=lambda rank: arguments if rank == bad else [plan]))
            assert time.monotonic() - begin < SECONDS / 4
            for rank, (status, out, error) in enumerate(ends):
                told = why if rank == bad else f"the meeting was ended: rank {bad}: {why}"
                assert (status, out, error) == (2, "", f"refit-run: error: {told}\n"), (rank, status, out, error)


def histories(test):
    """Deltas over changes, refits that are left out, torn refits and new memory leave the bits of dense refits."""
    model = {"parameters": [{"name": f"layers.{layer}.up", "shape": [512, 256], "dtype": "bf16"} for layer in range(6)]}
    for changes in ("snapshot", "bitmap"):
        job = changed(JOB, model=model, topology={"gpus_per_host": 2},
                      options={"delta": {"dense_every": 0, "changes": changes}})
        plan, ranks = test.compile(f"histories-{changes}", job), ranks_of(job)
        for status, out, error in test.finish(
                test.start_ranks([test.bin / "delta_histories", plan, "ucx", "8"], ranks)):
            assert status == 0, error
            print(f"{changes}: {out}" if out else "", end="")
            if out:
                for kind in ("dense", "torn", "bound anew", "1/128", "1/64", "1/32", "1/2", "whole"):
                    assert f" {kind} " in out, kind


def goldens(test):
    """Real layouts: experts, hybrids, fp8 that is quantized in windows, relays between hosts."""
    for name in ("tiny-moe", "tiny-hybrid", "tiny-fp8-windows", "tiny-fan-out-hosts"):
        plan = test.work / f"{name}.refit"
        subprocess.run([test.bin / "refitc", ROOT / "tests" / "golden" / "jobs" / f"{name}.json", "-o", plan],
                       check=True)
        threads = json.loads(subprocess.run([test.bin / "refit-run", plan, "--check", "--json"], check=True,
                                            capture_output=True, text=True).stdout)
        processes = test.expect_right(plan, threads["source_ranks"] + threads["destination_ranks"])
        assert processes["checked_bytes"] == threads["checked_bytes"], (processes, threads)
        assert processes["scratch_bytes"] == threads["scratch_bytes"], (processes, threads)
        print(f"{name}: right", flush=True)


def tcp(test):
    """The same wire that hosts use."""
    test.expect_right(test.compile("direct", JOB), ranks_of(JOB), env={"UCX_TLS": "tcp,self"})


def killed(test):
    """kill -9 of a rank in the middle of refits ends the others soon, and they name it."""
    plan, ranks = test.compile("direct", JOB), ranks_of(JOB)
    for tls in ("", "tcp,self"):
        for victim in (ranks - 1, 1):
            env = {"UCX_TLS": tls} if tls else {}
            processes = test.start(plan, ranks, ("--iterations", "1000000"), env=env)
            time.sleep(2)
            begin = time.monotonic()
            processes[victim].send_signal(signal.SIGKILL)
            ends = test.finish(processes)
            seconds = time.monotonic() - begin
            for rank, (status, _, error) in enumerate(ends):
                if rank == victim:
                    assert status == -signal.SIGKILL, status
                    continue
                assert status == 2, f"rank {rank}: status {status}: {error}"
                # UCX may have a line of its own to say before.
                assert f"rank {victim}" in error.splitlines()[-1], f"rank {rank} does not name rank {victim}: {error}"
            assert seconds < 60, seconds
            print(f"UCX_TLS={tls}: rank {victim} was killed, the others ended after {seconds:.1f} s:\n"
                  f"  {ends[0][2].splitlines()[-1]}", flush=True)


def stopped(test):
    """A rank that hangs (SIGSTOP) is waited for until the deadline, and named."""
    plan, ranks = test.compile("direct", JOB), ranks_of(JOB)
    processes = test.start(plan, ranks, ("--iterations", "1000000", "--timeout", "8"))
    time.sleep(2)
    processes[1].send_signal(signal.SIGSTOP)
    try:
        ends = test.finish(processes[:1] + processes[2:])
    finally:
        processes[1].kill()
        processes[1].communicate()
    for status, _, error in ends:
        assert status == 2 and "deadline" in error, error
    assert any(re.search(r"rank 1\b", error) for _, _, error in ends), ends
    print(ends[0][2].strip())


def missing(test):
    """Without a UCX every rank says so, and what to do."""
    plan, ranks = test.compile("direct", JOB), ranks_of(JOB)
    for status, _, error in test.finish(test.start(plan, ranks, env={"REFIT_UCX_LIBRARY": "/nowhere/libucp.so.0"})):
        assert status == 2, error
        assert "no UCX: none is loaded in this process, and the file that REFIT_UCX_LIBRARY names cannot be: " in error
        assert "/nowhere/libucp.so.0" in error, error


def hosts(test):
    """A trainer on one host, two engines on another: shared memory inside a host, TCP between them, at 1 Gbit/s."""
    job = changed(JOB, destination={"layout": "fsdp", "data_parallel": 1, "replicas": 2},
                  topology={"gpus_per_host": 2})
    ranks = ranks_of(job)
    plan = test.compile("hosts", job)
    with NetworkHosts(2) as both:
        where = {"address": both.address(0), "prefix": lambda rank: both.prefix(rank // 2)}
        before = both.sent_bytes(0)
        result = test.expect_right(plan, ranks, **where)
        sent = both.sent_bytes(0) - before
        refits = len(result["refits"])
        weights = result["destination_bytes"] / 2
        # The engines pass on to each other what the trainer sends once.
        assert refits * weights < sent < refits * weights * 1.2 + 1e6, (sent, weights)
        print(f"{sent} bytes crossed the wire in {refits} refits of two engines that hold {weights:.0f} bytes each")

        for host in range(2):
            both.at(host, "tc", "qdisc", "add", "dev", "wire0", "root", "tbf", "rate", "1gbit", "burst", "256kb",
                    "latency", "50ms")
        result = test.expect_right(plan, ranks, **where)
        fastest = min(refit["seconds"] for refit in result["refits"])
        speed = weights / fastest
        print(f"a wire of 0.125 GB/s carries {speed / 1e9:.3f} GB/s of weights")
        assert speed < 1.1 * 0.125e9 + 0.5e9 * 0.256e6 / weights, speed

        processes = test.start(plan, ranks, ("--iterations", "1000000", "--timeout", "8"), **where)
        time.sleep(3)
        both.at(1, "ip", "link", "set", "wire0", "down")
        for status, _, error in test.finish(processes):
            assert status == 2 and "rank" in error, error
            print(f"without the wire: {error.splitlines()[-1]}")


def main():
    cases = {case.__name__: case for case in (plans, deltas, flags, unmet, histories, goldens, tcp, killed, stopped, missing, hosts)}
    # A rank whose peer is gone leaves UCX's worker and its thread behind, and UCX frees less than it takes of worlds that end.
    # AddressSanitizer's search for leaks crashes on about one such process in ten.
    os.environ["ASAN_OPTIONS"] = "detect_leaks=0"
    with tempfile.TemporaryDirectory() as work:
        return cases[sys.argv[2]](Test(sys.argv[1], work)) or 0


if __name__ == "__main__":
    sys.exit(main())
