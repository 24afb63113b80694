#!/usr/bin/env bash
# Says whether the newest releases of verl, SkyRL, TRL and SGLang still have what Refit's adapters use. It only reports, so that a release of
# somebody else's fails no test of ours: it exits 0. Downloads 45 MB.
#
# usage: tests/newest.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -B tests/frameworks/signatures.py --newest || echo "newest.sh: the lines above are what an adapter has to follow"
