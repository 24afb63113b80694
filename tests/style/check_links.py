#!/usr/bin/env python3
"""Checks that every relative link of the Markdown files leads to a file of the repository, and to a heading of it.

usage: check_links.py ROOT
"""
import pathlib
import re
import sys


def text_of(path):
    """The file without code blocks and code spans, which hold no links."""
    kept, previous_is_blank, in_code = [], True, False
    for line in path.read_text().splitlines():
        indented = line.startswith("    ")
        in_code = indented and (in_code or previous_is_blank)
        kept.append("" if in_code else re.sub(r"`[^`]*`", "", line))
        previous_is_blank = not line.strip() or in_code
    return kept


def anchors(path):
    """The names that headings have as link targets, as repository hosts make them, and those of `<a id="…">`."""
    found = set()
    for line in path.read_text().splitlines():
        found.update(re.findall(r'<a id="([^"]+)">', line))
        heading = re.match(r"#+ (.*)", line)
        if heading:
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    pages = [page for page in sorted(root.rglob("*.md"))
             if not {"build", "install", ".git"} & set(page.relative_to(root).parts)]
    checked, wrong = 0, 0
    for page in pages:
        for number, line in enumerate(text_of(page), 1):
            for link in re.findall(r"\]\(([^)\s]+)\)", line):
                if re.match(r"[a-z]+:", link):
                    continue
                checked += 1
                file, _, anchor = link.partition("#")
                target = (page.parent / file).resolve() if file else page
                problem = ""
                if not target.is_relative_to(root) or not target.exists():
                    problem = "no such file"
                elif anchor and anchor not in anchors(target):
                    problem = "no such heading"
                if problem:
                    print(f"{page.relative_to(root)}:{number}: error: {link}: {problem}")
                    wrong += 1
    print(f"{len(pages)} pages, {checked} links checked, {wrong} wrong")
    return 1 if wrong or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
