#!/usr/bin/env python3
"""The `refit` view of any config.json, or another one, as params.py --list writes it: one tensor a line.

usage: list_config.py CONFIG.json [VIEW]
"""
import json
import sys

import params

with open(sys.argv[1]) as f:
    config = json.load(f)
# The one family whose config.json says nothing of them.
quirks = {"mtp_layers": 1} if config["model_type"] == "qwen3_next" else {}
for t in params.view(params.expand(config, quirks), sys.argv[2] if len(sys.argv) > 2 else "refit"):
    print(t.name, t.dtype, "x".join(map(str, t.shape)), sep="\t")
