#!/usr/bin/env python3
"""Writes docs/support.md, what was run with which release, from tests/support.json. Needs nothing but Python.

usage: support.py ROOT            writes the page
       support.py --check ROOT    exit status 1 if the page is not what the file gives, or a row is incomplete
"""
import json
import pathlib
import re
import sys

DATA, PAGE = "tests/support.json", "docs/support.md"
KEYS = ("part", "release", "framework", "on", "date", "what", "test", "not_run", "details")
HEAD = """# What was run with which release

*`tests/style/support.py` writes this page from `tests/support.json`. Change that file, which also
says in sentences what each test does.*

"Framework" says what of it is real, and what the test stands in for. The date is the day of the
run, or of the last change to the test where nobody noted the day. Other releases may work: an
adapter compares what it replaces, and refuses what it does not know. `tests/newest.sh` says what
the newest releases of verl, SkyRL, TRL and SGLang changed.

Nobody has run two physical hosts, eight GPUs, RDMA, or direct rounds between Ray actors
([limits.md](limits.md)).
"""


def problems_of(root, data):
    for number, run in enumerate(data["runs"]):
        where = f"{DATA}: runs[{number}]"
        if missing := [key for key in KEYS if key not in run]:
            yield f"{where}: no {', '.join(missing)}"
            continue
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", run["date"]):
            yield f"{where}: date is \"{run['date']}\"; wanted YYYY-MM-DD"
        if not (root / run["test"].split()[0]).exists():
            yield f"{where}: no file {run['test'].split()[0]}"
        if not re.match("CPU|GPU", run["on"]):
            yield f"{where}: on is \"{run['on']}\"; wanted CPU… or GPU…"


def table(columns, rows):
    return ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|",
            *("| " + " | ".join(cell.replace("|", r"\|") for cell in row).replace("|  |", "| |") + " |" for row in rows), ""]


def page_of(data):
    lines = [HEAD, *table(("part", "release", "framework", "runs on", "date", "what ran", "not run", "test"), (
        (run["part"], run["release"], run["framework"], run["on"], run["date"], run["what"], run["not_run"], f"`{run['test']}`")
        for run in data["runs"]))]
    lines += ["## Libraries and machines", "",
              *table(("", "version", "how"), ((row["what"], row["version"], row["how"]) for row in data["libraries"]))]
    return "\n".join(lines).rstrip() + "\n"


def main():
    check = sys.argv[1:2] == ["--check"]
    if len(sys.argv) != (3 if check else 2):
        print(__doc__, file=sys.stderr)
        return 2
    root = pathlib.Path(sys.argv[-1])
    data = json.loads((root / DATA).read_text())
    problems = list(problems_of(root, data))
    for problem in problems:
        print(f"{problem}")
    text, page = page_of(data), root / PAGE
    if not check:
        page.write_text(text)
    elif not page.exists() or page.read_text() != text:
        print(f"{PAGE}: error: not what {DATA} gives: run tests/style/support.py .")
        return 1
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
