#!/usr/bin/env bash
# Tests refit.trl with a release of TRL: its own GRPOTrainer and vLLM's own server, on the CPU.
# Installs vLLM (6 GB, build/venv-vllm) and TRL (0.3 GB, build/venv-trl). The release preset and its package refit_package must be
# built. Workers that are processes need libucx0.
#
# usage: tests/frameworks/trl.sh [--case NAME …]
set -euo pipefail
cd "$(dirname "$0")/../.."

. tests/frameworks/packages.sh
install_trl
export PYTHONDONTWRITEBYTECODE=1
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$venv/bin/python" tests/engines/entry_points.py "$site"
PYTHONPATH=$PWD/build/release/python:$PWD/tests/engines:$site "$venv/bin/python" tests/frameworks/trl_test.py "$@"
