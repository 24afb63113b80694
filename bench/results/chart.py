#!/usr/bin/env python3
"""Draws a JSON of results beside it as bars, an SVG for the README. Needs nothing but Python.

usage: chart.py RESULTS.json OUT.svg            writes OUT.svg
       chart.py --check RESULTS.json OUT.svg    exit status 1 if OUT.svg is not what RESULTS.json gives
"""
import html
import json
import pathlib
import sys

WIDTH, LEFT, RIGHT, BAR, GAP = 760, 110, 190, 22, 10
OURS, OTHERS, TEXT, FAINT = "#1a7f5a", "#9aa5b1", "#1f2933", "#616e7c"


def text(x, y, words, size=13, color=TEXT, anchor="start", weight="normal"):
    return (f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}" font-weight="{weight}">'
            f"{html.escape(words)}</text>")


def number(value):
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def drawn(results):
    lines, y = [text(16, 28, results["title"], 16, weight="bold"), text(16, 48, results["note"], 12, FAINT)], 62
    for panel in results["panels"]:
        y += 24
        lines.append(text(16, y, panel["title"], 13, weight="bold"))
        y += 10
        most, ours = max(bar["median_ms"] for bar in panel["bars"]), panel["bars"][0]["median_ms"]
        for bar in panel["bars"]:
            median = bar["median_ms"]
            length, middle = max(2, round((WIDTH - LEFT - RIGHT) * median / most)), y + BAR - 7
            label = f"{number(median)} ms" + ("" if median == ours else f", {median / ours:.0f} times")
            lines += [text(LEFT - 8, middle, bar["backend"], anchor="end"),
                      f'<rect x="{LEFT}" y="{y}" width="{length}" height="{BAR}" rx="3" fill="{OURS if median == ours else OTHERS}"/>',
                      text(LEFT + length + 8, middle, label, weight="bold" if median == ours else "normal")]
            y += BAR + GAP
    y += 14
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" '
                      'font-family="system-ui, sans-serif" role="img">',
                      f"<title>{html.escape(results['title'])}</title>",
                      f'<rect width="{WIDTH}" height="{y}" rx="8" fill="#ffffff"/>', *lines, "</svg>"]) + "\n"


def main():
    check = sys.argv[1:2] == ["--check"]
    if len(sys.argv) != (4 if check else 3):
        print(__doc__, file=sys.stderr)
        return 2
    source, out = map(pathlib.Path, sys.argv[-2:])
    picture = drawn(json.loads(source.read_text()))
    if not check:
        out.write_text(picture)
    elif not out.exists() or out.read_text() != picture:
        print(f"{out}: error: not what {source} gives: run bench/results/chart.py {source} {out}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
