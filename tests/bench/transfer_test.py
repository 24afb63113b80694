#!/usr/bin/env python3
"""What refit-bench transfer says of options that cannot be measured here, before it looks for a GPU.

usage: transfer_test.py BIN FAKE_NCCL_LIBRARY
"""
import os
import pathlib
import subprocess
import sys
import tempfile

PARAMETERS = '[{"name": "w", "shape": [64, 64], "dtype": "bf16"}]'
SIDE = '{"layout": "fsdp", "data_parallel": 1}'


def main():
    bin_dir, nccl = (pathlib.Path(argument).resolve() for argument in sys.argv[1:])
    with tempfile.TemporaryDirectory() as work:
        def plan(name, more=""):
            path = pathlib.Path(work, name)
            job = path.with_suffix(".json")
            job.write_text(f'{{"model": {{"parameters": {PARAMETERS}}}, "source": {SIDE}, '
                           f'"destination": {SIDE}{more}}}')
            subprocess.run([bin_dir / "refitc", job, "-o", path], check=True)
            return path

        direct = plan("direct.refit")
        staged = plan("staged.refit", ', "options": {"peer": "staged"}')
        colocated = plan("colocated.refit", ', "colocated": true')
        for arguments, message in (
                ((direct, "--against", "m2n"), 'no method "m2n"; wanted nccl_m2n, nccl_m2n_groups or windows'),
                ((direct, "--against", "nccl_m2n"), "nccl_m2n needs a process for each rank: start them with --one-rank"),
                ((direct, "--against", "nccl_m2n", "--one-rank"),
                 f"nccl_m2n needs NCCL 2.30.5 or later, and {nccl} is 2.28.9; REFIT_NCCL_LIBRARY may name another file"),
                ((colocated, "--against", "nccl_m2n", "--one-rank"),
                 "nccl_m2n needs a GPU for each rank, and this plan's ranks share GPUs"),
                ((direct, "--against", "windows"),
                 'the plan has no staged messages; "options": {"peer": "staged"} in the job makes some'),
                ((staged, "--against", "windows"),
                 f"windows need NCCL 2.27 or later, and {nccl} (2.28.9) has no ncclMemAlloc; "
                 "REFIT_NCCL_LIBRARY may name another file")):
            end = subprocess.run([bin_dir / "refit-bench", "transfer", *arguments], capture_output=True, text=True, check=False,
                                 env={**os.environ, "REFIT_NCCL_LIBRARY": str(nccl)})
            assert (end.returncode, end.stdout) == (2, ""), end
            assert end.stderr == f"refit-bench: error: --against: {message}\n", end


if __name__ == "__main__":
    main()
