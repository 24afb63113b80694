#!/usr/bin/env python3
"""fused_arithmetic_test.py REFITC REFITC_WITH_FMA SOURCES: both compilers make the same plans, byte for byte.

The second one's passes are built for CPUs with fused multiply-add.
"""
import concurrent.futures
import pathlib
import subprocess
import sys

SKIPPED = 77


def main():
    ours, fused, sources = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
    if " fma " not in pathlib.Path("/proc/cpuinfo").read_text().replace("\n", " "):
        print("skipped: this CPU has no fused multiply-add")
        return SKIPPED
    examples = [job for job in sorted((sources / "examples/jobs").glob("*.json")) if '"destination"' in job.read_text()]
    jobs = set(examples)
    jobs |= {job for job in (sources / "tests/golden/jobs").glob("tiny-*.json") if not job.name.endswith(".config.json")}
    assert len(jobs) > 20 and all(job.exists() for job in jobs), jobs

    def differs(job):
        first, second = (subprocess.run([refitc, job, "-o", "-"], capture_output=True) for refitc in (ours, fused))
        if first.returncode != 0 or second.returncode != 0:
            return f"{job}: {(first.stderr + second.stderr).decode()}"
        return f"{job}: the plans differ" if first.stdout != second.stdout else ""

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        faults = [fault for fault in pool.map(differs, sorted(jobs)) if fault]
    print(*faults, f"{len(jobs)} jobs, {len(faults)} with other plans", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
