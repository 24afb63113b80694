#!/usr/bin/env python3
"""Checks that no file of C++ or CUDA has more than 600 lines, and no function more than 80. Tests may.

usage: check_lengths.py ROOT
"""
import pathlib
import re
import sys

FOLDERS = ("bench", "compiler", "control", "executor", "files", "plan", "python/src", "report", "runner", "simulator", "tools",
           "topology")
MOST_LINES = 600
MOST_LINES_OF_FUNCTION = 80
# What is indented in no function, and whose own blocks are looked at.
OUTER = re.compile(r"(?:namespace\b|extern \"C\")")
TYPE = re.compile(r"(?:template <.*> )?(?:class|struct|union|enum)\b[^(]*$")


def functions_of(lines, begin, end, indent=""):
    """(first line, last line, first words) of each function between two lines, as clang-format writes them; from 0."""
    head = None
    number = begin
    while number < end:
        line = lines[number]
        number += 1
        code = line[len(indent):].split("  //")[0].rstrip()
        if not code or code.startswith(("//", "#")) or not line.startswith(indent):
            head = None
            continue
        if head is None and not code.startswith((" ", "}")):
            head = number - 1
        if not code.endswith("{"):
            if code.endswith((";", "}", ":")):
                head = None
            continue
        if head is None:
            continue
        text = " ".join(part.strip() for part in lines[head:number])
        is_type = TYPE.match(text)
        if is_type or ("(" in text and not OUTER.match(text)):
            last = next((i for i in range(number, end) if lines[i].startswith(indent + "}")), number)
            if is_type:
                yield from functions_of(lines, number, last, indent + "  ")
            else:
                yield head, last, text.split("(")[0]
            number = last + 1
        head = None


def main():
    root = pathlib.Path(sys.argv[1])
    files, functions, wrong = 0, 0, 0
    for source in sorted(path for top in FOLDERS for path in (root / top).rglob("*")):
        if source.suffix not in (".h", ".cc", ".cu", ".cuh"):
            continue
        name = source.relative_to(root)
        lines = source.read_text().splitlines()
        files += 1
        if len(lines) > MOST_LINES:
            print(f"{name}: error: has {len(lines)} lines; wanted at most {MOST_LINES}")
            wrong += 1
        for first, last, text in functions_of(lines, 0, len(lines)):
            functions += 1
            if last - first >= MOST_LINES_OF_FUNCTION:
                print(f"{name}:{first + 1}: error: {text} has {last - first + 1} lines; wanted at most {MOST_LINES_OF_FUNCTION}")
                wrong += 1
    print(f"{files} files and {functions} functions checked, {wrong} too long")
    return 1 if wrong or not functions else 0


if __name__ == "__main__":
    sys.exit(main())
