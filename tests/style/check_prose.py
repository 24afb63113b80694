#!/usr/bin/env python3
"""Checks openings that make a reader look for a noun, and the width of lines, in the pages for readers.

No sentence begins with "Of " or "So do"; no list item or paragraph with "It ", and none with "Of" or "So do". A table begins its lines.

usage: check_prose.py ROOT
"""
import pathlib
import re
import sys

PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md", "examples/**/*.md")
COLUMNS = 105  # 100 is the rule; a link or a word of code may hang over


def problems_of(lines):
    """(line number, problem) of one page."""
    in_code, previous_is_blank = False, True
    for number, line in enumerate(lines, 1):
        indented = line.startswith("    ")
        in_code = indented and (in_code or previous_is_blank)
        starts_text = previous_is_blank or bool(re.match(r"\s*(- |\d+\. )", line))
        previous_is_blank = not line.strip() or in_code
        if in_code or line.lstrip().startswith(("#", "|")):
            continue
        if "|---|" in line:
            yield number, "a table stands inside a line"
        text = re.sub(r"`[^`]*`", "`…`", line)
        if found := re.search(r"(?:^|[.:;] )(Of|So do(?:es)?) ", re.sub(r"^\s*(- |\d+\. )?", "", text)):
            yield number, f'a sentence begins with "{found[1]}"'
        if starts_text and re.match(r"\s*(- |\d+\. )?It (?!is not only)", text):
            yield number, 'a list item or paragraph begins with "It"'
        if len(line) > COLUMNS and " " in line[:COLUMNS].strip() and "](" not in line:
            yield number, f"{len(line)} columns; wanted 100"


def main():
    root = pathlib.Path(sys.argv[1])
    pages = sorted({page for pattern in PAGES for page in root.glob(pattern)})
    wrong = 0
    for page in pages:
        for number, problem in problems_of(page.read_text().splitlines()):
            print(f"{page.relative_to(root)}:{number}: error: {problem}")
            wrong += 1
    print(f"{len(pages)} pages checked, {wrong} problems")
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
