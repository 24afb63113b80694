#!/usr/bin/env python3
"""What the programs do to the files that they write: what is there already, and signals.

usage: files_test.py BIN_DIR
"""
import json
import os
import pathlib
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

BIN = pathlib.Path(sys.argv.pop(1)).resolve()
ROOT = pathlib.Path(__file__).resolve().parents[2]
JOB = {
    "model": {"parameters": [{"name": "weight", "shape": [8, 6], "dtype": "fp32"}]},
    "source": {"layout": "generic", "meshes": {"m": {"axes": {"dp": 2}}},
               "tensors": [{"match": "*", "mesh": "m", "placements": ["Shard(0)"]}]},
    "destination": {"layout": "generic", "meshes": {"m": {"axes": {"tp": 2}}},
                    "tensors": [{"match": "*", "mesh": "m", "placements": ["Shard(1)"]}]},
}


def write_source(path, rows, columns):
    header = json.dumps({"weight": {"dtype": "F32", "shape": [rows, columns],
                                    "data_offsets": [0, 4 * rows * columns]}}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * rows * columns))


def default_signals():
    """In the child: a shell may have started this in the background, where SIGINT is ignored."""
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_DFL)


class FilesTest(unittest.TestCase):
    plan = None  # the job's, compiled by the first test

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.dir = pathlib.Path(scratch.name)
        self.job = self.dir / "job.json"
        self.job.write_text(json.dumps(JOB))
        self.out = self.dir / "out"
        self.out.mkdir()
        if FilesTest.plan is None:
            FilesTest.plan = self.compile("plan.refit").read_bytes()
        (self.out / "plan.refit").write_bytes(self.plan)

    def compile(self, name, status=0):
        path = self.out / name
        done = subprocess.run([BIN / "refitc", self.job, "-o", path], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, status, done.stderr)
        self.stderr = done.stderr
        return path

    def topology(self, *arguments, **variables):
        """What refit-topology says on stderr, of a host with GPUs or without."""
        return subprocess.run([BIN / "refit-topology", *arguments], env={**os.environ, **variables}, capture_output=True,
                              text=True, timeout=60).stderr

    def test_a_missing_topology_of_nccl_is_a_warning_where_the_environment_names_it(self):
        missing = str(self.dir / "missing.xml")
        why = f"{missing}: cannot be opened: No such file or directory"
        warning, *more = self.topology(NCCL_TOPO_FILE=missing).splitlines()
        self.assertEqual(warning, f"refit-topology: warning: NCCL_TOPO_FILE: {why}; going on without it")
        self.assertNotIn("missing.xml", "".join(more))
        self.assertEqual(self.topology("--nccl-topology", missing, NCCL_TOPO_FILE=missing), f"refit-topology: error: {why}\n")

    def assert_only(self, *names):
        self.assertEqual(sorted(path.name for path in self.out.iterdir()), sorted(["plan.refit", *names]))

    def test_a_new_file_is_as_the_umask_says(self):
        before = os.umask(0o027)
        try:
            path = self.compile("new")
        finally:
            os.umask(before)
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o640)

    def test_an_older_file_keeps_its_mode(self):
        path = self.out / "older"
        path.write_text("older")
        path.chmod(0o664)
        self.compile("older")
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o664)
        self.assertEqual(path.read_bytes(), self.plan)

    def test_a_link_stays_one_and_its_target_is_replaced(self):
        target = self.dir / "target"
        target.write_text("older")
        (self.out / "link").symlink_to("../target")
        self.compile("link")
        self.assertEqual(os.readlink(self.out / "link"), "../target")
        self.assertEqual(target.read_bytes(), self.plan)
        self.assert_only("link")

    def test_the_target_of_a_dangling_link_is_made(self):
        (self.out / "first").symlink_to("second")
        (self.out / "second").symlink_to(self.dir / "target")
        self.compile("first")
        self.assertTrue((self.out / "first").is_symlink() and (self.out / "second").is_symlink())
        self.assertEqual((self.dir / "target").read_bytes(), self.plan)

    def test_a_pipe_is_written_to(self):
        pipe = self.out / "pipe"
        os.mkfifo(pipe)
        read = []
        reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
        reader.start()
        self.compile("pipe")
        reader.join()
        self.assertEqual(read, [self.plan])
        self.assertTrue(stat.S_ISFIFO(pipe.stat().st_mode))

    def test_a_device_is_written_to(self):
        device = self.out / "null"
        try:
            os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
            device.open("wb").close()
        except PermissionError:
            self.skipTest("needs the right to make devices")
        self.compile("null")
        self.assertTrue(stat.S_ISCHR(device.stat().st_mode))

    def test_what_cannot_be_written_is_an_error_that_leaves_nothing(self):
        for name, reason in (("absent/plan.refit", "No such file or directory"), (".", "Is a directory")):
            self.compile(name, status=2)
            self.assertIn(f"cannot write: {reason}", self.stderr)
        self.assert_only()

    def test_a_signal_leaves_no_partial_file(self):
        source = self.dir / "source"
        source.mkdir()
        for rank in range(2):
            write_source(source / f"rank-{rank:05}.safetensors", 4, 6)
        older = self.out / "rank-00002.safetensors"
        older.write_text("older")
        for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(ending.name):
                run = subprocess.Popen([BIN / "refit-run", self.out / "plan.refit", "--source-dir", source,
                                        "--destination-dir", self.out, "--iterations", "1000000000"],
                                       preexec_fn=default_signals)
                deadline = time.monotonic() + 60
                while len(list(self.out.glob("*.partial"))) < 2 and time.monotonic() < deadline:
                    time.sleep(0.01)
                self.assertEqual(len(list(self.out.glob("*.partial"))), 2)
                run.send_signal(ending)
                self.assertEqual(run.wait(timeout=60), -ending)
                self.assert_only(older.name)
                self.assertEqual(older.read_text(), "older")

    def test_a_signal_while_a_file_is_written_leaves_nothing(self):
        job = ROOT / "examples" / "jobs" / "qwen3-4b-tp1-to-tp1x63.json"  # soon compiled, long written
        plan = self.dir / "large.refit"
        subprocess.run([BIN / "refitc", job, "-o", plan], check=True, timeout=60)
        written = self.out / "written"
        ended = {}
        for program, *arguments in (["refit-sim", plan, "--trace", written], ["refitc", job, "-o", written],
                                    ["refit-report", plan, "-o", written]):
            for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                with self.subTest(program, arguments=arguments[1:-1], ending=ending.name):
                    run = subprocess.Popen([BIN / program, *arguments], preexec_fn=default_signals)
                    while run.poll() is None and len(os.listdir(self.out)) < 2:
                        time.sleep(0.0005)
                    run.send_signal(ending)
                    status = run.wait(timeout=60)
                    self.assertIn(status, (0, -ending))  # 0: it was written by then
                    ended[program] = ended.get(program, 0) + (status == -ending)
                    left = sorted(set(os.listdir(self.out)) - {"plan.refit", "written"})
                    for name in [*left, "written"]:
                        (self.out / name).unlink(missing_ok=True)
                    self.assertEqual(left, [])
        self.assertGreater(ended["refit-sim"], 0)

    def test_a_child_of_a_program_ends_by_a_signal(self):
        run = subprocess.Popen([BIN / "refit-bench", "compile", ROOT / "examples" / "jobs" / "kimi-k2.json"],
                               stdout=subprocess.DEVNULL, preexec_fn=default_signals)
        children = []
        while run.poll() is None and not children:
            children = pathlib.Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        self.assertEqual(len(children), 1)
        os.kill(int(children[0]), signal.SIGTERM)
        self.assertEqual(run.wait(timeout=10), 2)  # the parent tells


if __name__ == "__main__":
    unittest.main()
