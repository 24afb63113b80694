"""Ranks on the CPU that are processes of their own, as a trainer and an engine are."""
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

import refit

# A rank: told its number, its id in the second line of the standard input if it is not rank 0, which makes it.
RANK = textwrap.dedent("""
    import json, sys
    import numpy as np
    import refit

    rank, refits = int(sys.argv[1]), int(sys.argv[2])
    plan = refit.compile(json.loads(sys.stdin.readline()))
    if rank == 0:
        id = refit.rendezvous.unique_id()
        print(id.hex(), flush=True)
    else:
        id = bytes.fromhex(sys.stdin.readline())

    def weight(name, version):
        shape = (8, 6) if name.startswith("layers") else (6,)
        start = 1000 * version + 100 * len(name) + sum(name.encode())
        return np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)

    tensors = {name: np.full(info.shape, np.nan, np.float32) for name, info in plan.tensors(rank).items()}
    executor = refit.join(plan, rank, tensors, unique_id=id, device="cpu", timeout=120)
    print("joined", flush=True)
    for version in range(refits):
        if rank < 2:
            for name, tensor in tensors.items():
                whole = weight(name, version)
                tensor[...] = whole[4 * rank:4 * rank + 4] if whole.ndim == 2 else whole
        executor.run(timeout=120)
        if rank >= 2:
            for name, tensor in tensors.items():
                whole = weight(name, version)
                wanted = whole[:, 3 * (rank - 2):3 * (rank - 2) + 3] if whole.ndim == 2 else whole
                np.testing.assert_array_equal(tensor, wanted)
    print(json.dumps(executor.stats()), flush=True)
    executor.close()
""")


class Ranks:
    """The four processes of the tiny job."""

    def __init__(self, job, refits):
        self.processes = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(refits)],
                                           stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                           text=True) for rank in range(4)]
        for process in self.processes:
            self.say(process, json.dumps(job))
        id = self.processes[0].stdout.readline().strip()
        for process in self.processes[1:]:
            self.say(process, id)
        for process in self.processes:
            assert process.stdout.readline() == "joined\n", process.stderr.read()

    @staticmethod
    def say(process, line):
        process.stdin.write(line + "\n")
        process.stdin.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("peer", ["direct", "staged"])
def test_ranks_of_four_processes_refit_again_and_again(tiny_job, peer):
    with Ranks({**tiny_job, "options": {"peer": peer}}, 3) as ranks:
        for process in ranks.processes:
            out, error = process.communicate(timeout=120)
            assert process.returncode == 0, error
            stats = json.loads(out)
            # Told, not hidden: UCX sends what a plan has as direct.
            assert stats["peer_staged_bytes_sent"] == stats["bytes_sent"]
            assert stats["peer_direct_bytes_sent"] == 0


def test_ranks_name_the_process_that_was_killed(tiny_job):
    with Ranks(tiny_job, 10**9) as ranks:
        os.kill(ranks.processes[3].pid, signal.SIGKILL)
        for process in ranks.processes[:3]:
            _, error = process.communicate(timeout=120)
            assert process.returncode == 1
            assert "rank 3 is gone" in error, error


# A trainer or an engine that is placed in one plan after another: a command in each line of the standard input.
MEMBER = textwrap.dedent("""
    import json, sys
    import numpy as np
    import refit

    executor = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if "job" in command:
                plan, rank, id = refit.compile(command["job"]), command["rank"], bytes.fromhex(command["id"])
                if executor is None:
                    tensors = {name: np.full(info.shape, np.nan, np.float32) for name, info in plan.tensors(rank).items()}
                    executor = refit.join(plan, rank, tensors, unique_id=id, device="cpu", timeout=60)
                    trainer = plan.side(rank) == "source"
                else:
                    assert executor.replace(plan, rank, id, timeout=60).rank == rank
            else:
                if trainer:
                    tensors["w"][...] = command["version"]
                executor.run(timeout=60)
                assert (tensors["w"] == command["version"]).all()
            print("ok", flush=True)
        except refit.Error as error:
            print(error, flush=True)
""")


class Members:
    def __init__(self):
        self.processes = []

    def add(self):
        self.processes.append(subprocess.Popen([sys.executable, "-W", "ignore", "-c", MEMBER], stdin=subprocess.PIPE,
                                               stdout=subprocess.PIPE, text=True))

    def tell(self, commands):
        """The replies of all, who are told at once."""
        for process, command in zip(self.processes, commands):
            Ranks.say(process, json.dumps(command))
        return [process.stdout.readline().rstrip() for process in self.processes]

    def place(self):
        ranks = len(self.processes)
        side = {"layout": "generic", "tensors": [{"match": "*", "mesh": "m", "placements": ["Replicate"]}]}
        job = {"model": [{"name": "w", "shape": [64, 6], "dtype": "fp32"}], "topology": {"gpus_per_host": 8},
               "source": {**side, "meshes": {"m": {"axes": {"dp": 2}}}}, "destination": {**side, "meshes": {"m": {"axes": {"dp": ranks - 2}}}}}
        id = refit.rendezvous.host_meeting(ranks, "127.0.0.1").hex()
        return self.tell({"job": job, "rank": rank, "id": id} for rank in range(ranks))

    def run(self, version):
        return self.tell({"version": version} for _ in self.processes)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("lost", [0, 3])
def test_a_rank_is_lost_and_the_others_go_on_until_another_comes(lost):
    with Members() as members:
        for _ in range(5):
            members.add()
        assert members.place() == ["ok"] * 5
        assert members.run(1) == ["ok"] * 5
        members.processes[lost].kill()
        members.processes.pop(lost).communicate()
        assert all(f"rank {lost} is gone" in reply for reply in members.run(2))
        if lost == 0:  # its place is taken, where the plan has one for it
            members.add()
            members.processes.insert(0, members.processes.pop())
        assert members.place() == ["ok"] * len(members.processes)
        assert members.run(2) == ["ok"] * len(members.processes)
        members.add()
        assert members.place() == ["ok"] * len(members.processes)
        assert members.run(3) == ["ok"] * len(members.processes)


def test_the_library_of_ucx_is_told():
    file, version = refit.ucx_library()
    assert "libucp" in file and version.startswith("1.")


# Ranks of one process that meet, as if they were two. A child is forked beside them.
FORKS = textwrap.dedent("""
    import os, sys, threading
    import numpy as np
    import refit

    plan = refit.compile({"model": {"parameters": [{"name": "w", "shape": [8, 8], "dtype": "fp32"}]}, "source": {"layout": "fsdp"},
                          "destination": {"layout": "fsdp"}, "topology": {"gpus_per_host": 2}})
    id, executors = refit.rendezvous.unique_id(), [None, None]

    def both(work):
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]

    def join(rank):
        tensors = {name: np.full(info.shape, 1 - rank, "f4") for name, info in plan.tensors(rank).items()}
        executors[rank] = refit.join(plan, rank, tensors, unique_id=id, device="cpu", timeout=60)

    both(join)
    child = os.fork()
    if child == 0:
        try:
            executors[0].run(timeout=60)
        except refit.FailedPrecondition as error:
            print(error, flush=True)
        executors[1].close()
        sys.exit(7)  # whatever is left is destroyed
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "of", os.getpid(), flush=True)
    both(lambda rank: executors[rank].run(timeout=60))
    print(executors[0].refits, executors[1].refits)
""")


def test_a_child_after_fork_leaves_its_parents_executors_alone():
    child = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60)
    refused, told, refits = child.stdout.splitlines()
    process = told.partition(" of ")[2]
    assert told == f"child 7 of {process}", child.stderr
    assert refused == (f"the executor belongs to process {process}, from which this one was forked: make an executor in this process")
    assert refits == "1 1"
