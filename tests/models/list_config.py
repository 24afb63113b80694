#!/usr/bin/env python3
"""The `refit` view of any config.json: one tensor a line, as params.py --list writes it."""
import json
import sys

import params

with open(sys.argv[1]) as f:
    config = json.load(f)
for t in params.view(params.expand(config), "refit"):
    print(t.name, t.dtype, "x".join(map(str, t.shape)), sep="\t")
