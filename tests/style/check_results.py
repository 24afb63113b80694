#!/usr/bin/env python3
"""Checks that every file of bench/results says when, where and how it was measured, and that a page names it.

usage: check_results.py ROOT
"""
import json
import pathlib
import re
import sys

CHART_KEYS = {"title", "note", "date", "machine", "command", "remarks", "panels"}


def problems_of(results):
    """What is wrong with the value of one file."""
    if "panels" in results:
        if missing := sorted(CHART_KEYS - set(results)):
            yield f"no {', '.join(missing)}; chart.py and its readers want them"
        return
    if not results.get("question", "").endswith("?"):
        yield "no \"question\" that ends with a question mark"
    if not results.get("measurements"):
        yield "no \"measurements\""
    for number, run in enumerate(results.get("measurements", [])):
        where = f"measurements[{number}]"
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", run.get("date") or ""):
            yield f"{where}: date is {run.get('date')!r}; wanted YYYY-MM-DD"
        if len(run.get("machine") or "") < 4:
            yield f"{where}: no machine"
        if "command" in run and not (run["command"] and all(run["command"])):
            yield f"{where}: an empty command"
        wanted = len(run.get("columns", []))
        if not run.get("rows"):
            yield f"{where}: no rows"
        for row in run.get("rows", []):
            if len(row) != wanted:
                yield f"{where}: the row of {row[0]!r} has {len(row)} cells; wanted {wanted}, as columns has"


def main():
    root = pathlib.Path(sys.argv[1])
    pages = "\n".join(page.read_text() for page in sorted((root / "docs").rglob("*.md")))
    checked, wrong = 0, 0
    for file in sorted((root / "bench/results").glob("*.json")):
        checked += 1
        found = list(problems_of(json.loads(file.read_text())))
        if not re.search(r"(?<![\w-])" + re.escape(file.name), pages):
            found.append("no page of docs/ names it")
        for problem in found:
            print(f"{file.relative_to(root)}: error: {problem}")
        wrong += len(found)
    print(f"{checked} files checked, {wrong} problems")
    return 1 if wrong or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
