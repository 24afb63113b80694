#!/usr/bin/env python3
"""Checks that a shared library shows the functions of a C header, all of them and nothing else.

usage: check_exports.py HEADER.h LIBRARY.so
"""
import pathlib
import re
import subprocess
import sys


def declared(header):
    """The functions of the header: names before a parenthesis, outside comments and macros."""
    text = re.sub(r"/\*.*?\*/|^\s*#.*?$", "", header.read_text(), flags=re.DOTALL | re.MULTILINE)
    return set(re.findall(r"\b(refit_\w+)\s*\(", text))


def exported(library):
    lines = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1] for line in lines.splitlines()}


def main():
    header, library = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    wanted, found = declared(header), exported(library)
    for name in sorted(wanted - found):
        print(f"{library.name}: error: {name} of {header.name} is missing")
    for name in sorted(found - wanted):
        print(f"{library.name}: error: {name} is not in {header.name}")
    print(f"{len(wanted)} functions declared, {len(found)} symbols exported")
    return 1 if wanted != found or not wanted else 0


if __name__ == "__main__":
    sys.exit(main())
