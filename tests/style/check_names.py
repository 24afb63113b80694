#!/usr/bin/env python3
"""Checks that no two headers define a type of one name in one namespace.

Where both are linked into one program, the linker keeps one type's inline functions for both: memory is overwritten, and no
compiler says so.

usage: check_names.py ROOT
"""
import collections
import pathlib
import re
import sys

FOLDERS = ("bench", "compiler", "control", "executor", "plan", "report", "runner", "simulator", "tools")


def types_of(text):
    """(namespace, name) of each type that begins a line."""
    namespace = ""
    for line in text.splitlines():
        if found := re.match(r"namespace ([\w:]+) \{", line):
            namespace = found[1]
        elif found := re.match(r"(?:struct|class|enum class) (\w+)\b[^;]*\{", line):
            yield namespace, found[1]


def main():
    root = pathlib.Path(sys.argv[1])
    homes = collections.defaultdict(set)
    for folder in FOLDERS:
        for header in sorted((root / folder).rglob("*.h")):
            for name in types_of(header.read_text()):
                homes[name].add(str(header.relative_to(root)))
    twice = {name: files for name, files in homes.items() if len(files) > 1}
    for (namespace, name), files in sorted(twice.items()):
        print(f"{namespace}::{name} is defined in {' and in '.join(sorted(files))}; wanted one name each")
    sys.exit(1 if twice or not homes else 0)


if __name__ == "__main__":
    main()
