#!/usr/bin/env python3
"""refit-bench links between real processes: hosts of namespaces, with cables of a set rate.

usage: links_test.py BIN hosts|slow|errors
"""
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
from network_hosts import NetworkHosts, run  # noqa: E402

SECONDS = 120
RATE = 80  # Mbit/s
# Without the headers of TCP and Ethernet, in GB/s.
GIGABYTES_PER_SECOND = RATE / 8e3 * 1448 / 1514
MODEL = {"parameters": [{"name": f"layers.{layer}.weight", "shape": [1024, 512], "dtype": "bf16"} for layer in range(8)]}


def near(value, wanted, share=0.2):
    assert abs(value / wanted - 1) < share, f"{value}, wanted {wanted}"


def set_rate(network, host, mbit):
    network.at(host, "tc", "qdisc", "add", "dev", "wire0", "root", "tbf", "rate", f"{mbit}mbit", "burst", "16kb", "latency", "100ms")


def start(bin_dir, network, hosts, *arguments):
    """A process for each rank; those of a host follow each other. Returns what they printed, after they ended."""
    processes = []
    for rank, host in enumerate(hosts):
        of_rank = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(len(hosts)), LOCAL_RANK=str(rank - hosts.index(host)),
                       MASTER_ADDR=network.address(0), MASTER_PORT="29500", REFIT_SECRET="of this run, which is alone",
                       UCX_TLS="tcp,self,sm", UCX_NET_DEVICES="wire0", NCCL_HOSTID=f"host-{host}")
        processes.append(subprocess.Popen([*network.prefix(host), bin_dir / "refit-bench", "links", "--transport", "ucx",
                                           *(arguments[rank] if isinstance(arguments[0], tuple) else arguments)],
                                          env=of_rank, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        return [(*process.communicate(timeout=SECONDS), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()


def hosts(bin_dir, work):
    """Two ranks on each of two hosts. The job that takes the topology in predicts what the cable carries."""
    with NetworkHosts(2) as network:
        for host in range(2):
            set_rate(network, host, RATE)
        ends = start(bin_dir, network, [0, 0, 1, 1], "--megabytes", "1", "--iterations", "3", "--json")
    assert all(status == 0 for _, _, status in ends), ends
    assert [bool(out) for out, _, _ in ends] == [True, False, False, False], ends
    result = json.loads(ends[0][0])
    matrix = result["nvbandwidth"]["testcases"][0]["bandwidth_matrix"]
    for sender, row in enumerate(matrix):
        for receiver, speed in enumerate(row):
            if sender == receiver:
                assert speed == "N/A", matrix
            elif sender // 2 == receiver // 2:
                assert float(speed) > 5 * GIGABYTES_PER_SECOND, matrix
            else:
                near(float(speed), GIGABYTES_PER_SECOND)
    topology = result["topology"]
    assert topology["gpus_per_host"] == 2, topology
    near(topology["network_gigabytes_per_second"], GIGABYTES_PER_SECOND)
    # Two ranks share the cable, which pairs that take turns do not show.
    job = {"model": MODEL, "source": {"layout": "fsdp", "data_parallel": 2}, "destination": {"layout": "fsdp", "data_parallel": 2},
           "topology": {**topology, "gpus_per_nic": 2}}
    path = work / "job.json"
    path.write_text(json.dumps(job))
    stats = json.loads(run(bin_dir / "refitc", path, "-o", work / "plan.refit", "--stats=json"))
    near(stats["predicted_seconds"], 8 * 2 ** 20 / (GIGABYTES_PER_SECOND * 1e9))


def slow(bin_dir, _):
    """What the third host sends is slow: its two pairs are named, and nothing else."""
    with NetworkHosts(3) as network:
        for host, mbit in enumerate((RATE, RATE, RATE // 4)):
            set_rate(network, host, mbit)
        ends = start(bin_dir, network, [0, 1, 2], "--megabytes", "1", "--iterations", "3")
    assert all(status == 0 for _, _, status in ends), ends
    text = ends[0][0]
    named = sorted(line.split(",")[0] for line in text.splitlines() if line.startswith("slow"))
    assert named == [f"slow pair: rank 2 (host-2) to rank {rank} (host-{rank})" for rank in (0, 1)], text
    near(json.loads(text[text.index("{"):])["topology"]["network_gigabytes_per_second"], GIGABYTES_PER_SECOND)


def errors(bin_dir, _):
    """Processes of one machine, without namespaces, and mistakes."""
    def bench(*arguments, status=2):
        end = subprocess.run([bin_dir / "refit-bench", "links", *arguments], capture_output=True, text=True, timeout=SECONDS,
                             check=False, env={name: value for name, value in os.environ.items() if name != "WORLD_SIZE"})
        assert end.returncode == status, end
        return end.stdout if status == 0 else end.stderr

    out = bench("--transport", "ucx", "--ranks", "3", "--megabytes", "1", "--iterations", "1", status=0)
    assert out.startswith("Running rank_to_rank_ucx.\n") and "gpus_per_host\": 3" in out, out
    for arguments, message in (
            ((), "--transport local needs --ranks"),
            (("--transport", "x"), "--transport is x; wanted local, ucx or nccl"),
            (("--ranks", "2", "job.json"), 'links takes no file, not "job.json"'),
            (("--ranks", "2", "--growth", "2"), "--growth is an option of compile, not of links"),
            (("--ranks", "1"), "--ranks is 1; wanted an integer from 2 to 4096"),
            (("--transport", "ucx"), "WORLD_SIZE is not set (nor OMPI_COMM_WORLD_SIZE nor SLURM_NTASKS), it should be a number "
                                     "from 1 to 1048576")):
        assert bench(*arguments).strip() == f"refit-bench: error: {message}", bench(*arguments)
    def bench_in(megabytes):
        limit = 3500 << 20
        return subprocess.run([bin_dir / "refit-bench", "links", "--ranks", "2", "--megabytes", megabytes, "--iterations", "1"],
                              capture_output=True, text=True, timeout=SECONDS, check=False,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))  # fmt: skip

    # AddressSanitizer needs terabytes of addresses.
    if b"__asan_init" not in (bin_dir / "refit-bench").read_bytes():
        end = bench_in("1")
        assert end.returncode == 0, end
        # One of the two ranks has no memory: the other does not wait for it.
        end = bench_in("1024")
        assert (end.returncode, end.stdout) == (2, "") and "1073741824 bytes" in end.stderr, end
    with NetworkHosts(1) as network:
        ends = start(bin_dir, network, [0, 0], ("--megabytes", "1"), ("--megabytes", "2"))
        assert [status for _, _, status in ends] == [2, 2], ends
        assert "ranks measure different messages: rank 0 has 1048576 bytes, 5 times, rank 1 has 2097152 bytes" in ends[0][1], ends


def main():
    cases = {case.__name__: case for case in (hosts, slow, errors)}
    # AddressSanitizer's search for leaks may crash on threads of UCX.
    os.environ["ASAN_OPTIONS"] = "detect_leaks=0"
    with tempfile.TemporaryDirectory() as work:
        cases[sys.argv[2]](pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(work))


if __name__ == "__main__":
    main()
