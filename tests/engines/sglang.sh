#!/usr/bin/env bash
# Refits a live SGLang (the release that tests/sglang_venv.sh names) on the CPU, over UCX: needs libucx0. The release preset and
# its package refit_package must be built. SGLang finds refit.sglang by the entry point that pyproject.toml declares.
#
# usage: tests/engines/sglang.sh [--case NAME …]
set -euo pipefail
cd "$(dirname "$0")/../.."
tests/sglang_venv.sh
python=$PWD/build/venv-sglang/bin/python
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" -B tests/engines/entry_points.py "$site" sglang.srt.plugins:refit_test=sglang_worker:register
export PYTHONPATH="$PWD/build/release/python:$site:$PWD/tests/engines/sglang_site"
export SGLANG_USE_CPU_ENGINE=1 GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
export PYTHONPYCACHEPREFIX=$PWD/build/pycache
"$python" tests/engines/sglang_cpu.py "$@"
