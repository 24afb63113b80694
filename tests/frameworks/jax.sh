#!/usr/bin/env bash
# Tests examples/jax: a JAX trainer without torch feeds a vLLM on the CPU by Refit's C library.
# Installs JAX for CPUs (0.4 GB, build/venv-jax), and vLLM (6 GB, build/venv-vllm). The release preset and its package refit_package
# must be built. The ranks are processes, so libucx0 is needed.
#
# usage: tests/frameworks/jax.sh [--engine torch|vllm]
set -euo pipefail
cd "$(dirname "$0")/../.."

. tests/frameworks/packages.sh
venv=build/venv-jax
if ! "$venv/bin/python" -c "import jax" 2>/dev/null; then
  make_venv
  fetch "jax[cpu]"
fi
venv=build/venv-vllm
install_vllm
if [ $# -eq 0 ]; then set -- --engine vllm; fi
PYTHONPATH=$PWD/build/release/python exec "$venv/bin/python" -B tests/frameworks/jax_test.py --jax build/venv-jax/bin/python "$@"
