#!/usr/bin/env bash
# Compares the megatron layout with releases of Megatron Core and Megatron Bridge, on the CPU, and prints a table: family, mesh,
# equal or not. Then Megatron Core trains, and its parameters are sent after steps. Installs both into build/venv-megatron (5 GB with
# PyTorch). The release preset must be built.
#
# usage: tests/frameworks/megatron.sh [--with-vllm] [--case GLOB]
#
# --case: 'FAMILY: MESH'; then only that layout is compared, and nothing trains.
# --with-vllm: also takes what Megatron's ranks hold, for two cases, by a plan to vLLM's own classes (vllm.sh, 6 GB more).
set -euo pipefail
cd "$(dirname "$0")/../.."

core=0.16.1 # the numbers to raise for new releases
bridge=0.3.1
transformers=4.57.6 # the Bridge takes none of 5

chain=
if [ "${1-}" = --with-vllm ]; then
  chain=yes
  shift
fi
venv=build/venv-megatron
. tests/frameworks/packages.sh
if ! "$venv/bin/python" -c "
import importlib.metadata as metadata
assert (metadata.version('megatron-core'), metadata.version('megatron-bridge')) == ('$core', '$bridge')" 2>/dev/null; then
  make_venv
  fetch --no-deps torch
  needs_of torch > "$venv/needs.txt"
  # The two name some sixty packages more, of kernels and of training: kernel_stand_ins.py stands for the former.
  fetch -r "$venv/needs.txt" "transformers==$transformers" numpy packaging safetensors omegaconf einops rich regex pyyaml six tqdm \
    pillow requests typing-extensions opentelemetry-api dill psutil
  fetch --no-deps triton accelerate "megatron-core==$core" "megatron-bridge==$bridge"
fi

keep=build/megatron-refits
rm -rf "$keep"
mkdir -p "$keep"
PYTHONPATH=build/release/python "$venv/bin/python" -B tests/frameworks/megatron_bridge_test.py --programs build/release/bin \
  --keep "$keep" "$@"
if [ $# -eq 0 ]; then PYTHONPATH=build/release/python "$venv/bin/python" -B tests/frameworks/megatron_training_test.py; fi
if [ -n "$chain" ]; then tests/frameworks/vllm.sh --refitted "$keep"; fi
