#!/usr/bin/env python3
"""refit-run --delta: a dense refit, then refits of which each sends what changed. refit-sim expects the same of them.

usage: delta_runs_test.py BIN_DIR
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

BIN = pathlib.Path(sys.argv.pop(1)).resolve()
REPLICATED = {"match": "*", "mesh": "m", "placements": ["Replicate"]}
MESHES = {"m": {"axes": {"a": 2}}}


def job(delta):
    """Two ranks a side, a cast, and a norm that all ranks hold."""
    return {
        "model": {"parameters": [{"name": "w", "shape": [256, 256], "dtype": "fp32"},
                                 {"name": "norm", "shape": [513], "dtype": "bf16"}]},
        "source": {"layout": "generic", "meshes": MESHES,
                   "tensors": [{"match": "w", "mesh": "m", "placements": ["Shard(0)"]}, REPLICATED]},
        "destination": {"layout": "generic", "meshes": MESHES, "dtype": "bf16",
                        "tensors": [{"match": "w", "mesh": "m", "placements": ["Shard(1)"]}, REPLICATED]},
        "options": {"delta": delta},
    }


TIMES = (r"\(agree [\d.]+, find 0\.0+, encode 0\.0+, wire [\d.]+, apply 0\.0+, keep [\d.]+, check [\d.]+; "
         r"move [\d.]+, total [\d.]+\)")
ELEMENTS = 256 * 256 + 2 * 513  # once for each receiver


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
            for rate in (0, 0.02, 1):
                with self.subTest(changes=changes, rate=rate):
                    self.compile({"changes": changes})
                    told = json.loads(self.run_plan("--change-rate", str(rate), "--iterations", "3", "--json"))
                    self.assertTrue(told["passed"])
                    self.assertEqual(told["checked_bytes"], told["destination_bytes"])
                    dense, *deltas = [refit["delta"] for refit in told["refits"]]
                    self.assertEqual((dense["rung"], dense["why_dense"], dense["version"]),
                                     ("dense", "rank 0 bound since its last refit", 1))
                    self.assertEqual(dense["stored_bytes"], 2 * ELEMENTS)
                    self.assertEqual((dense["change_rate"], dense["changed_elements"]), (None, None))  # not counted
                    self.assertEqual([(delta["rung"], delta["why_dense"], delta["base_version"], delta["version"])
                                      for delta in deltas], [("direct", "", i, i + 1) for i in (1, 2, 3)])
                    for told in (dense, *deltas):
                        self.assert_times(told, staged=False)
                    for delta in deltas:
                        self.assertEqual((delta["elements"], delta["dense_bytes"]), (ELEMENTS, 2 * ELEMENTS))
                        self.assertAlmostEqual(delta["change_rate"], rate, delta=rate * (1 - rate) * 0.3)
                        self.assertEqual(delta["changed_elements"], round(delta["change_rate"] * ELEMENTS))
                        if changes == "bitmap" or rate in (0, 1):
                            self.assertEqual(delta["stored_bytes"], 2 * delta["changed_elements"])
                        else:  # lines of the cache: of 16 fp32 or 32 bf16 elements
                            self.assertTrue(2 * delta["changed_elements"] < delta["stored_bytes"] < 0.6 * 2 * ELEMENTS)

    def assert_times(self, told, staged):
        delta = told["rung"] != "dense"
        self.assertEqual([told[f"{part}_seconds"] > 0 for part in ("find", "encode", "wire", "apply", "check", "keep", "move", "agree", "total")],
                         [delta and staged, staged, True, staged, delta, True, True, True, True], told)
        self.assertLess(max(told["move_seconds"], told["agree_seconds"], told["check_seconds"]), told["total_seconds"])

    def test_staged_rounds_tell_what_each_part_took(self):
        path = self.dir / "job.json"
        path.write_text(json.dumps({**job(True), "topology": {"gpus_per_host": 2}}))
        subprocess.run([BIN / "refitc", path, "-o", self.dir / "plan.refit"], check=True, timeout=60)
        for refit in json.loads(self.run_plan("--json"))["refits"]:
            self.assert_times(refit["delta"], staged=True)

    def simulate(self, *arguments):
        return subprocess.run([BIN / "refit-sim", self.dir / "plan.refit", *arguments], capture_output=True, text=True,
                              timeout=60)

    def test_the_simulator_expects_what_is_sent(self):
        """Staged rounds: the rung, and the bytes of all messages, whole ones and merged ones too."""
        for changes, bucket_bytes in (("snapshot", 0), ("bitmap", 0), ("bitmap", 65536)):
            of = job({"check": False, "changes": changes})
            of["model"]["parameters"][0]["shape"] = [1024, 512]
            if bucket_bytes:
                of["options"].update(bucket_bytes=bucket_bytes, staging_bytes=2 * bucket_bytes)
            path = self.dir / "job.json"
            path.write_text(json.dumps({**of, "topology": {"gpus_per_host": 2}}))
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
                used = [each for each in expected["rounds"] if each["messages"] > 0]
                self.assertEqual(len(used) < len(expected["rounds"]), bucket_bytes > 0 and rate < 0.6, rate)
            wanted = {0: "1/128", 0.005: "1/128", 0.0072: "1/128", 0.012: "1/64", 0.04: "1/16", 0.2: "1/4", 0.4: "1/2",
                      0.6: "whole"}
            self.assertEqual(rungs, {rate: wanted[rate] for rate in rungs})

    def test_a_rung_on_which_all_is_whole_is_told_as_such(self):
        of = job({"check": False})
        of["model"]["parameters"] = of["model"]["parameters"][1:]  # too small to be encoded
        for side in ("source", "destination"):
            of[side]["tensors"] = of[side]["tensors"][1:]
        path = self.dir / "job.json"
        path.write_text(json.dumps({**of, "topology": {"gpus_per_host": 2}}))
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
        self.assertIn("plan.refit: --change-rate is given, and the plan's job has no options.delta: all its refits are "
                      "dense", done.stderr)
        self.compile(True)
        done = self.simulate("--change-rate", "0.01", "--executor", "cpu")
        self.assertIn("the plan has no staged rounds: its refits over UCX are dense", done.stderr)
        done = self.simulate("--change-rate", "1.5")
        self.assertIn('--change-rate is "1.5"; wanted a number from 0 to 1', done.stderr)

    def test_the_interval_makes_a_refit_dense(self):
        self.compile({"dense_every": 2})
        told = json.loads(self.run_plan("--iterations", "2", "--json"))
        self.assertEqual([refit["delta"]["rung"] for refit in told["refits"]], ["dense", "direct", "dense"])
        self.assertEqual(told["refits"][2]["delta"]["why_dense"], "every refit of 2 is")

    def test_the_text_has_a_line_for_each_refit(self):
        self.compile({"changes": "bitmap"})
        lines = self.run_plan("--change-rate", "1").splitlines()
        self.assertEqual(lines[1].split(",")[0], "check: passed")
        self.assertRegex(lines[2], r"^refit 0: rung dense \(rank 0 bound since its last refit\), stored 133124 of dense 133124 bytes "
                                   r"\(100.000 %\), [\d.]+ s " + TIMES + ", version 1$")
        self.assertRegex(lines[3], r"^refit 1: rung direct, change rate 100.000 % \(66562 of 66562 elements\), stored "
                                   r"133124 of dense 133124 bytes \(100.000 %\), [\d.]+ s " + TIMES +
                         ", version 2, base version 1$")

    def test_the_simulator_tells_the_average_with_dense_refits(self):
        for every in (0, 1, 4):
            self.compile({"dense_every": every})
            told = json.loads(self.simulate("--change-rate", "0.01", "--json").stdout)
            self.assertEqual((told["rung"], told["dense_every"]), ("direct", every))
            delta, dense = told["simulated_seconds"], told["dense_seconds"]
            average = {0: delta, 1: dense, 4: (3 * delta + dense) / 4}[every]
            self.assertAlmostEqual(told["average_seconds"], average, delta=1e-9 * dense)
            lines = self.simulate("--change-rate", "0.01").stdout.splitlines()
            self.assertRegex(lines[1], r"^delta          rung direct, change rate 1 %, stored \d+ of dense \d+ bytes "
                                       r"\([\d.]+ %\); [\d.]+ x a dense refit of this plan, [\d.e-]+ s$")
            wanted = f"average        {average:.6g} s, with a dense refit in {every} (dense_every)"
            self.assertEqual(wanted in lines, every > 0, lines)

    def test_ranks_that_meet_over_ucx_are_dense(self):
        self.compile({"changes": "bitmap"})
        text = self.run_plan("--transport", "ucx", "--ranks-in-process")
        self.assertIn("check: passed", text)
        self.assertEqual(len(re.findall(r"^refit \d: rung dense \(as all refits over this transport\), \d+ bytes, ", text,
                                        re.MULTILINE)), 2)


if __name__ == "__main__":
    unittest.main()
