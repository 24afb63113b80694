#!/usr/bin/env python3
"""Checks that a file of rules holds all that the compiler knows of a model family.

No source may write a family's name: it asks for a trait of compiler/model/family.h.

usage: check_families.py ROOT
"""
import pathlib
import re
import sys

FAMILIES = "compiler/model/families"
CODE = ("bench", "compiler", "control", "executor", "plan", "python/refit", "python/src", "runner", "tools")


def main():
    root = pathlib.Path(sys.argv[1])
    names = [rules.stem for rules in sorted((root / FAMILIES).glob("*.json"))]
    quoted = re.compile(r"""["'](%s)["']""" % "|".join(names))
    checked, wrong = 0, 0
    for source in sorted(path for top in CODE for path in (root / top).rglob("*")):
        name = str(source.relative_to(root))
        if source.suffix not in (".h", ".cc", ".cu", ".py") or name.startswith(FAMILIES):
            continue
        checked += 1
        for number, line in enumerate(source.read_text().splitlines(), 1):
            if found := quoted.search(line):
                print(f"{name}:{number}: error: names the family {found[1]}; wanted a trait of compiler/model/family.h")
                wrong += 1
    print(f"{len(names)} families, {checked} files checked, {wrong} names")
    return 1 if wrong or not checked or not names else 0


if __name__ == "__main__":
    sys.exit(main())
