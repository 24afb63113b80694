#!/usr/bin/env bash
# Compares layouts with the frameworks' own packages, on the CPU. Not part of tests/run.sh: it installs PyTorch, transformers and
# Megatron Core (about 6 GB) into build/frameworks. The release preset must be built.
#
# usage: tests/frameworks/run.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$PWD/build/frameworks/bin/python
[ -x "$python" ] || python3 -m venv build/frameworks
"$python" -m pip install --quiet torch numpy packaging transformers safetensors
"$python" -m pip install --quiet --no-deps megatron-core
cmake --preset release -DREFIT_FRAMEWORKS_PYTHON="$python" >/dev/null
ctest --test-dir build/release -L frameworks --output-on-failure
