#!/usr/bin/env python3
"""Checks that every folder includes only what docs/architecture.md lets it know.

usage: check_layers.py ROOT
"""
import pathlib
import re
import sys

LAYOUT = {"plan", "compiler", "compiler/ir", "compiler/job", "compiler/layout", "compiler/model"}

# What a folder's sources may include, besides their own folder.
MAY_INCLUDE = {
    "plan": set(),
    "plan/schedule": {"plan"},
    "plan/proof": {"plan", "plan/schedule"},
    "plan/text": {"plan"},
    "plan/diff": {"plan", "plan/text"},
    "compiler/ir": {"plan"},
    "compiler/job": {"plan", "compiler", "compiler/ir", "topology"},
    "compiler/model": {"plan", "compiler", "compiler/ir", "compiler/job"},
    "compiler/layout": LAYOUT,
    "compiler/layout/common": LAYOUT,
    "compiler/layout/serving": LAYOUT | {"compiler/layout/common"},
    # No framework knows another.
    "compiler/layout/fsdp": LAYOUT | {"compiler/layout/common"},
    "compiler/layout/generic": LAYOUT | {"compiler/layout/common"},
    "compiler/layout/megatron": LAYOUT | {"compiler/layout/common"},
    "compiler/layout/sglang": LAYOUT | {"compiler/layout/common", "compiler/layout/serving"},
    "compiler/layout/vllm": LAYOUT | {"compiler/layout/common", "compiler/layout/serving"},
    "compiler/passes": {"plan", "compiler", "compiler/ir", "compiler/job", "compiler/layout", "compiler/model", "simulator"},
    "compiler/emit": {"plan", "compiler/ir"},
    "compiler": {
        "plan", "plan/proof", "plan/diff", "compiler/ir", "compiler/job", "compiler/model", "compiler/layout", "compiler/passes",
        "compiler/emit", "simulator",
    },
    "files": set(),
    "topology": set(),
    "control": {"plan", "refit"},
    "executor": {"plan", "plan/schedule", "control", "refit"},
    "runner": {"files", "plan", "plan/schedule", "plan/text", "control", "refit", "executor"},
    "simulator": {"plan", "plan/schedule", "plan/text"},
    "report": {"plan", "plan/proof", "plan/text", "plan/diff", "compiler", "compiler/job", "simulator"},
    "bench": {"plan", "plan/proof", "plan/schedule", "plan/text", "control", "executor", "refit", "runner", "compiler", "compiler/job"},
}


def folder(path, folders):
    """The longest known folder that `path` is in; its first part when none is known."""
    for name in sorted(folders, key=len, reverse=True):
        if path.startswith(name + "/"):
            return name
    return path.split("/")[0]


def main():
    root = pathlib.Path(sys.argv[1])
    checked, wrong = 0, 0
    for top in sorted({name.split("/")[0] for name in MAY_INCLUDE}):
        for source in sorted((root / top).rglob("*.[ch]*")):
            if source.suffix not in (".h", ".cc", ".cu"):
                continue
            here = folder(str(source.relative_to(root)), MAY_INCLUDE)
            checked += 1
            for number, line in enumerate(source.read_text().splitlines(), 1):
                found = re.match(r'#include "([^"]+/[^"]+)"', line)
                if not found or found[1].startswith(("absl/", "flatbuffers/", "rapidjson/")):
                    continue
                # Workers link the executor: LLVM's headers are the compiler's alone, and no header of ours has them.
                if found[1].startswith("llvm/ADT/") and here.startswith("compiler/") and source.suffix == ".cc":
                    continue
                there = folder(found[1], MAY_INCLUDE)
                if there != here and there not in MAY_INCLUDE[here]:
                    print(f"{source.relative_to(root)}:{number}: error: {here} must not include {found[1]}")
                    wrong += 1
    print(f"{checked} files checked, {wrong} wrong includes")
    return 1 if wrong or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
