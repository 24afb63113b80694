#!/usr/bin/env python3
"""refit-run --delta: a dense refit, then refits of which each sends what changed. refit-sim expects the same of them.

usage: delta_runs_test.py BIN_DIR
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

BIN = pathlib.Path(sys.argv.pop(1)).resolve()
REPLICATED = {"match": "*", "mesh": "m", "placements": ["Replicate"]}
MESHES = {"m": {"axes": {"a": 2}}}


def job(delta):
    """Two ranks a side on a host each, a cast, and a norm that all ranks hold."""
    return {
        "model": {"parameters": [{"name": "w", "shape": [1024, 512], "dtype": "fp32"},
                                 {"name": "norm", "shape": [513], "dtype": "bf16"}]},
        "source": {"layout": "generic", "meshes": MESHES,
                   "tensors": [{"match": "w", "mesh": "m", "placements": ["Shard(0)"]}, REPLICATED]},
        "destination": {"layout": "generic", "meshes": MESHES, "dtype": "bf16",
                        "tensors": [{"match": "w", "mesh": "m", "placements": ["Shard(1)"]}, REPLICATED]},
        "topology": {"gpus_per_host": 2},
        "options": {"delta": delta},
    }


TIMES = (r"\(agree [\d.]+, find [\d.]+, encode [\d.]+, wire [\d.]+, apply [\d.]+, keep [\d.]+, check [\d.]+; "
         r"move [\d.]+, total [\d.]+\)")
ELEMENTS = 1024 * 512 + 2 * 513  # once for each receiver
DENSE_BYTES = 2 * ELEMENTS + 2 * 14  # with what aligns "w" behind "norm"


class DeltaRunsTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.dir = pathlib.Path(scratch.name)

    def compile(self, delta):
        path = self.dir / "job.json"
        path.write_text(json.dumps(job(delta)))
        subprocess.run([BIN / "refitc", path, "-o", self.dir / "plan.refit"], check=True, timeout=60)

    def run_plan(self, *arguments):
        done = subprocess.run([BIN / "refit-run", self.dir / "plan.refit", "--delta", *arguments], capture_output=True,
                              text=True, timeout=120)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def test_each_refit_tells_what_it_sent(self):
        for changes in ("snapshot", "bitmap"):
            for rate, rung in ((0, "1/128"), (0.02, "1/32"), (1, "whole")):
                with self.subTest(changes=changes, rate=rate):
                    self.compile({"changes": changes})
                    told = json.loads(self.run_plan("--change-rate", str(rate), "--iterations", "3", "--json"))
                    self.assertTrue(told["passed"])
                    self.assertEqual(told["checked_bytes"], told["destination_bytes"])
                    dense, *deltas = [refit["delta"] for refit in told["refits"]]
                    self.assertEqual((dense["rung"], dense["why_dense"], dense["version"]),
                                     ("dense", "rank 0 bound since its last refit", 1))
                    self.assertEqual(dense["stored_bytes"], DENSE_BYTES)
                    self.assertEqual((dense["change_rate"], dense["changed_elements"]), (None, None))  # not counted
                    self.assertEqual([(delta["rung"], delta["why_dense"], delta["base_version"], delta["version"])
                                      for delta in deltas], [(rung, "", i, i + 1) for i in (1, 2, 3)])
                    for told in (dense, *deltas):
                        self.assert_times(told)
                    for delta in deltas:
                        self.assertEqual((delta["elements"], delta["dense_bytes"]), (ELEMENTS, DENSE_BYTES))
                        self.assertAlmostEqual(delta["change_rate"], rate, delta=rate * (1 - rate) * 0.3)
                        self.assertEqual(delta["changed_elements"], round(delta["change_rate"] * ELEMENTS))
                        if rung == "whole":
                            self.assertEqual(delta["stored_bytes"], DENSE_BYTES)
                        else:
                            self.assertLess(delta["stored_bytes"], 0.06 * DENSE_BYTES)

    def assert_times(self, told):
        delta = told["rung"] != "dense"
        self.assertEqual([told[f"{part}_seconds"] > 0 for part in ("find", "encode", "wire", "apply", "check", "keep", "move", "agree", "total")],
                         [delta, True, True, True, delta, True, True, True, True], told)
        self.assertLess(max(told["move_seconds"], told["agree_seconds"], told["check_seconds"]), told["total_seconds"])

    def simulate(self, *arguments):
        return subprocess.run([BIN / "refit-sim", self.dir / "plan.refit", *arguments], capture_output=True, text=True,
                              timeout=60)

    def test_the_simulator_expects_what_is_sent(self):
        """The rung, and the bytes of all messages, whole ones too."""
        for changes, bucket_bytes in (("snapshot", 0), ("bitmap", 0), ("bitmap", 65536)):
            of = job({"check": False, "changes": changes})
            if bucket_bytes:
                of["options"].update(bucket_bytes=bucket_bytes, staging_bytes=2 * bucket_bytes)
            path = self.dir / "job.json"
            path.write_text(json.dumps(of))
            subprocess.run([BIN / "refitc", path, "-o", self.dir / "plan.refit"], check=True, timeout=60)
            rungs = {}
            for rate in (0, 0.005, 0.0072, 0.012, 0.04, 0.2, 0.4, 0.6):
                if bucket_bytes and rate == 0.0072:
                    continue  # of small messages chance decides
                told = json.loads(self.run_plan("--change-rate", str(rate), "--json"))
                told = told["refits"][1]["delta"]
                expected = json.loads(self.simulate("--change-rate", str(rate), "--json").stdout)
                rungs[rate] = told["rung"]
                for fact in ("rung", "stored_bytes", "dense_bytes"):
                    self.assertEqual(expected[fact], told[fact], rate)
                self.assertEqual(sum(each["size_bytes"] for each in expected["rounds"]), told["stored_bytes"], rate)
                kinds = {task["kind"] for task in expected["critical_path"]}
                self.assertLessEqual(kinds, {"find", "agree", "encode", "start", "message", "apply", "keep"})
                self.assertLessEqual({"find", "agree", "encode", "message"}, kinds)
            wanted = {0: "1/128", 0.005: "1/128", 0.0072: "1/128", 0.012: "1/64", 0.04: "1/16", 0.2: "1/4", 0.4: "1/2",
                      0.6: "whole"}
            self.assertEqual(rungs, {rate: wanted[rate] for rate in rungs})

    def test_a_rung_on_which_all_is_whole_is_told_as_such(self):
        of = job({"check": False})
        of["model"]["parameters"] = of["model"]["parameters"][1:]  # too small to be encoded
        for side in ("source", "destination"):
            of[side]["tensors"] = of[side]["tensors"][1:]
        path = self.dir / "job.json"
        path.write_text(json.dumps(of))
        subprocess.run([BIN / "refitc", path, "-o", self.dir / "plan.refit"], check=True, timeout=60)
        told = json.loads(self.run_plan("--change-rate", "0.01", "--json"))["refits"][1]["delta"]
        expected = json.loads(self.simulate("--change-rate", "0.01", "--json").stdout)
        self.assertEqual((told["rung"], expected["rung"]), ("whole", "whole"))

    def test_a_page_tells_how_many_deltas_it_leaves_out(self):
        self.compile({"dense_every": 3})
        measured = self.dir / "run.json"
        measured.write_text(self.run_plan("--iterations", "4", "--json"))
        told = json.loads(measured.read_text())["refits"]
        dense = [number for number, refit in enumerate(told) if refit["delta"]["rung"] == "dense"]
        self.assertEqual(dense, [0, 3])
        page = subprocess.run([BIN / "refit-report", self.dir / "plan.refit", "--measured", measured, "--json"], check=True,
                              capture_output=True, text=True, timeout=60)
        data = json.loads(page.stdout)["measured"]
        self.assertEqual((data["delta_refits"], data["refits"]), (3, dense))
        self.assertEqual(data["seconds"], [told[number]["seconds"] for number in dense])

    def test_the_simulator_needs_a_plan_of_deltas(self):
        self.compile(False)
        done = self.simulate("--change-rate", "0.01")
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("plan.refit: --change-rate is given, and all refits of the plan are dense: its job has no options.delta, or "
                      "the plan no staged rounds", done.stderr)
        self.compile(True)
        done = self.simulate("--change-rate", "1.5")
        self.assertIn('--change-rate is "1.5"; wanted a number from 0 to 1', done.stderr)

    def test_the_interval_makes_a_refit_dense(self):
        self.compile({"dense_every": 2})
        told = json.loads(self.run_plan("--iterations", "2", "--json"))
        self.assertEqual([refit["delta"]["rung"] for refit in told["refits"]], ["dense", "1/64", "dense"])
        self.assertEqual(told["refits"][2]["delta"]["why_dense"], "every refit of 2 is")

    def test_the_text_has_a_line_for_each_refit(self):
        self.compile({"changes": "bitmap"})
        lines = self.run_plan("--change-rate", "1").splitlines()
        self.assertEqual(lines[1].split(",")[0], "check: passed")
        sent = f"stored {DENSE_BYTES} of dense {DENSE_BYTES} bytes"
        self.assertRegex(lines[2], r"^refit 0: rung dense \(rank 0 bound since its last refit\), " + sent + r" \(100.000 %\), [\d.]+ s "
                         + TIMES + ", version 1$")
        self.assertRegex(lines[3], rf"^refit 1: rung whole, change rate 100.000 % \({ELEMENTS} of {ELEMENTS} elements\), " + sent
                         + r" \(100.000 %\), [\d.]+ s " + TIMES + ", version 2, base version 1$")

    def test_the_simulator_tells_the_average_with_dense_refits(self):
        for every in (0, 1, 4):
            self.compile({"dense_every": every})
            told = json.loads(self.simulate("--change-rate", "0.01", "--json").stdout)
            self.assertEqual((told["rung"], told["dense_every"]), ("1/64", every))
            delta, dense = told["simulated_seconds"], told["dense_seconds"]
            average = {0: delta, 1: dense, 4: (3 * delta + dense) / 4}[every]
            self.assertAlmostEqual(told["average_seconds"], average, delta=1e-9 * dense)
            lines = self.simulate("--change-rate", "0.01").stdout.splitlines()
            self.assertRegex(lines[1], r"^delta          rung 1/64, change rate 1 %, stored \d+ of dense \d+ bytes "
                                       r"\([\d.]+ %\); [\d.]+ x a dense refit of this plan, [\d.e-]+ s$")
            wanted = f"average        {average:.6g} s, with a dense refit in {every} (dense_every)"
            self.assertEqual(wanted in lines, every > 0, lines)


if __name__ == "__main__":
    unittest.main()
