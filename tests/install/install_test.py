#!/usr/bin/env python3
"""Installs a build to a temporary prefix, moves it, and builds and runs workers from it.

usage: install_test.py SOURCE_DIR BUILD_DIR CC CXX
"""
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SOURCE, BUILD = (pathlib.Path(path).resolve() for path in sys.argv[1:3])
CC, CXX = sys.argv[3:5]
del sys.argv[1:]
HERE = pathlib.Path(__file__).resolve().parent
MESH = {"layout": "generic", "meshes": {"m": {"axes": {"ranks": 2}}}}
JOB = {
    "model": {"parameters": [{"name": "weight", "shape": [8, 6], "dtype": "fp32"}]},
    "source": {**MESH, "tensors": [{"match": "*", "mesh": "m", "placements": ["Shard(0)"]}]},
    "destination": {**MESH, "tensors": [{"match": "*", "mesh": "m", "placements": ["Shard(1)"]}]},
}


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], text=True, capture_output=True, **options)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


class InstallTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.dir = pathlib.Path(scratch.name)
        run("cmake", "--install", BUILD, "--prefix", cls.dir / "first")
        cls.prefix = (cls.dir / "first").rename(cls.dir / "moved")
        (cls.dir / "job.json").write_text(json.dumps(JOB))
        cls.plan = cls.dir / "plan.refit"
        cls.libraries = [path.parent for path in cls.prefix.rglob("librefit.so")]
        cls.environment = {
            **os.environ, "LD_LIBRARY_PATH": ":".join(map(str, cls.libraries)),
            "PKG_CONFIG_PATH": ":".join(str(path.parent) for path in cls.prefix.rglob("refit.pc"))}
        run(cls.prefix / "bin" / "refitc", cls.dir / "job.json", "-o", cls.plan, env=cls.environment)

    def test_every_header_compiles_alone(self):
        """C's as C, C++'s as C++, with nothing but the installed tree and the libraries that it asks for."""
        c_root, cxx_root = self.prefix / "include", self.prefix / "include" / "refit-cxx"
        self.assertEqual(sorted(path.name for path in (c_root / "refit").iterdir()), ["refit.h", "refit_reports.h"])
        run(CC, "-std=c99", "-pedantic", "-Wall", "-Werror", "-fsyntax-only", "-x", "c", "-", f"-I{c_root}",
            input="#include <refit/refit.h>\n")
        headers = sorted(path.relative_to(cxx_root) for path in cxx_root.rglob("*.h"))
        self.assertIn(pathlib.Path("refit/executor.h"), headers)
        def compile_alone(header):
            run(CXX, "-std=c++20", "-Wall", "-Werror", "-fsyntax-only", "-x", "c++", "-", f"-I{cxx_root}",
                input=f'#include "{header}"\n')

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_alone, headers))

    def test_pkg_config_builds_a_worker_in_c(self):
        worker = self.dir / "c_worker"
        flags = run("pkg-config", "--cflags", "--libs", "refit", env=self.environment).split()
        run(CC, SOURCE / "examples" / "worker_threads.c", "-Wall", "-Werror", "-o", worker, *flags, "-lpthread")
        self.assertEqual(run(worker, self.plan, env=self.environment), "2 refits of 4 ranks\n")

    def test_find_package_builds_workers_in_c_and_cxx(self):
        build = self.dir / "build"
        run("cmake", "-S", HERE / "consumer", "-B", build, f"-DCMAKE_PREFIX_PATH={self.prefix}",
            f"-DCMAKE_C_COMPILER={CC}", f"-DCMAKE_CXX_COMPILER={CXX}", f"-DEXAMPLES={SOURCE / 'examples'}")
        run("cmake", "--build", build)
        self.assertEqual(run(build / "c_worker", self.plan), "2 refits of 4 ranks\n")
        self.assertEqual(run(build / "cxx_worker", self.plan), "4 ranks connected\n")


if __name__ == "__main__":
    unittest.main()
