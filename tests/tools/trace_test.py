#!/usr/bin/env python3
"""refit-run --trace: what ranks measured, with the names of refit-sim's trace.

usage: trace_test.py BIN_DIR
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

BIN = pathlib.Path(sys.argv.pop(1)).resolve()
FIRST_MEASURED = 1_000_000
TRACKS = {1: "rounds", 2: "pack", 3: "unpack", 4: "quantize", 5: "received", 6: "rounds on its GPU"}


def side(ranks, placement):
    return {"layout": "generic", "meshes": {"m": {"axes": {"a": ranks}}},
            "tensors": [{"match": "*", "mesh": "m", "placements": [placement]}]}


def job(hosts, receivers=3, **keys):
    """Two trainers that feed three receivers, or as many as is said."""
    return {"model": {"parameters": [{"name": "w", "shape": [512, 384], "dtype": "bf16"}]},
            "source": side(2, "Shard(0)"), "destination": side(receivers, "Shard(1)"),
            "topology": {"hosts": hosts}, "options": {"bucket_bytes": 16384, "staging_bytes": 131072}, **keys}


class Trace:
    """One file's events, by kind."""

    def __init__(self, path, first_process):
        events = json.loads(path.read_text())["traceEvents"]
        self.processes = {e["pid"] - first_process: e["args"]["name"] for e in events if e["name"] == "process_name"}
        self.tracks = {(e["pid"] - first_process, e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        self.slices = [(e["pid"] - first_process, e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
        self.starts = {e["id"]: (e["pid"] - first_process, e["ts"]) for e in events if e["ph"] == "s"}
        self.ends = {e["id"]: (e["pid"] - first_process, e["ts"]) for e in events if e["ph"] == "f"}

    def names(self, track):
        """By rank, the names of the slices on a track."""
        names = {}
        for rank, tid, name, _, _ in self.slices:
            if TRACKS[tid] == track:
                names.setdefault(rank, set()).add(name)
        return names

    def arrows(self):
        return sorted((self.starts[i][0], self.ends[i][0]) for i in self.starts)


class TraceTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.dir = pathlib.Path(scratch.name)
        self.plan = self.dir / "plan.refit"

    def run_program(self, *command, status=0):
        done = subprocess.run([BIN / command[0], *command[1:]], capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, status, done.stderr)
        return done.stdout + done.stderr

    def compile(self, hosts, **keys):
        (self.dir / "job.json").write_text(json.dumps(job(hosts, **keys)))
        self.run_program("refitc", self.dir / "job.json", "-o", self.plan)

    def simulated(self, *arguments):
        self.run_program("refit-sim", self.plan, "--trace", self.dir / "simulated.json", *arguments)
        return Trace(self.dir / "simulated.json", 0)

    def measured(self, *arguments):
        told = self.run_program("refit-run", self.plan, "--check", "--trace", self.dir / "measured.json", *arguments)
        self.assertIn("check: passed", told)
        return Trace(self.dir / "measured.json", FIRST_MEASURED)

    def expect_alike(self, measured, simulated):
        self.assertEqual(measured.processes, {rank: name + ", measured" for rank, name in simulated.processes.items()})
        self.assertEqual(measured.tracks, simulated.tracks)
        # A rank that others store into has a round, too: it grants its memory, and waits.
        for track in ("rounds", "pack", "unpack", "received"):
            for rank, names in simulated.names(track).items():
                self.assertLessEqual(names, measured.names(track).get(rank, set()), f"{track} of rank {rank}")
        self.assertEqual(measured.starts.keys(), measured.ends.keys())
        for number, (_, begin) in measured.starts.items():
            self.assertGreaterEqual(measured.ends[number][1], begin)
        self.assertEqual(min(begin for _, _, _, begin, _ in measured.slices), 0)
        self.assertTrue(all(duration >= 0 for *_, duration in measured.slices))

    def test_staged_rounds_of_threads(self):
        self.compile([0, 0, 1, 1, 1])
        measured, simulated = self.measured(), self.simulated()
        self.expect_alike(measured, simulated)
        self.assertEqual(measured.names("rounds"), simulated.names("rounds"))
        self.assertEqual(measured.names("unpack"), simulated.names("unpack"))
        self.assertEqual(measured.arrows(), simulated.arrows())
        self.assertGreater(len(measured.arrows()), 12)

    def test_direct_rounds_of_threads(self):
        self.compile([0, 0, 0, 0, 0])
        measured, simulated = self.measured(), self.simulated()
        self.expect_alike(measured, simulated)
        self.assertEqual(measured.arrows(), simulated.arrows())
        self.assertEqual({name for names in measured.names("rounds").values() for name in names}, {"refit round 0 peer direct"})

    def test_rounds_on_one_gpu_go_beside_others(self):
        self.compile([0, 0, 0, 0], receivers=2, colocated=True)
        measured, simulated = self.measured(), self.simulated()
        self.expect_alike(measured, simulated)
        for trace in (measured, simulated):
            self.assertEqual(trace.names("rounds on its GPU")[0], {"refit round 0 local direct"})
            self.assertEqual(trace.names("rounds")[0], {"refit round 1 peer direct"})

    def test_ranks_over_ucx(self):
        self.compile([0, 0, 1, 1, 1])
        self.expect_alike(self.measured("--transport", "ucx", "--ranks-in-process"), self.simulated("--executor", "cpu"))

    def test_both_fit_into_one_file(self):
        self.compile([0, 0, 1, 1, 1])
        self.measured("--iterations", "2")
        self.simulated()
        both = [json.loads((self.dir / name).read_text())["traceEvents"] for name in ("simulated.json", "measured.json")]
        self.assertFalse({e["pid"] for e in both[0]} & {e["pid"] for e in both[1]})

    def test_misuses(self):
        self.compile([0, 0, 0, 0, 0])
        self.assertIn("--trace needs --check",
                      self.run_program("refit-run", self.plan, "--source-dir", self.dir, "--destination-dir", self.dir / "out",
                                       "--trace", self.dir / "t.json", status=2))
        self.assertIn("output is the plan", self.run_program("refit-run", self.plan, "--check", "--trace", self.plan, status=2))


if __name__ == "__main__":
    unittest.main()
