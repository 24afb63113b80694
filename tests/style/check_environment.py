#!/usr/bin/env python3
"""Checks that docs/environment.md has each environment variable that the sources read, and no variable of Refit that none reads.

usage: check_environment.py ROOT
"""
import pathlib
import re
import sys

PAGE = "docs/environment.md"
# Examples of what is not on the page, a variable of tests and an option of CMake; and strings that are no variables.
OTHERS = ("REFIT_SEED", "REFIT_CUDA", "REFIT_DATA", "VLLM_CUTLASS")
SOURCES = ("bench", "compiler", "control", "executor", "plan", "python/refit", "python/src", "report", "runner", "simulator", "tools", "topology")
NAME = r"(?:RANK|(?:REFIT|NCCL|UCX|CUDA|OMPI|SLURM|MASTER|WORLD|LOCAL|TORCHELASTIC|VERL|VLLM|SGLANG|NEMO)_[A-Z0-9_]+)"


def names_in(text):
    """The strings of a file that are a variable's name, as getenv, environ or a table of ours gets them."""
    return {name for name in re.findall(rf"""["']({NAME})["']""", text)}


def main():
    root = pathlib.Path(sys.argv[1])
    page = (root / PAGE).read_text()
    documented = set(re.findall(rf"`({NAME})(?:=[^`]*)?`", page))
    read = {}
    for path in sorted(path for folder in SOURCES for path in (root / folder).rglob("*")):
        if path.suffix in (".cc", ".h", ".cu", ".py"):
            for name in names_in(path.read_text()):
                read.setdefault(name, path.relative_to(root))
    wrong = 0
    for name in sorted(set(read) - documented - set(OTHERS)):
        print(f"{read[name]}: error: {PAGE} has no row for {name}")
        wrong += 1
    for name in sorted(documented - set(read) - set(OTHERS)):
        if name.startswith("REFIT_"):
            print(f"{PAGE}: error: nothing reads {name}")
            wrong += 1
    print(f"{len(documented)} variables on the page, {len(read)} in the sources, {wrong} problems")
    return 1 if wrong or not documented or not read else 0


if __name__ == "__main__":
    sys.exit(main())
