#!/usr/bin/env bash
# Compares the sglang layout with SGLang's own classes (the release that tests/sglang_venv.sh names), on the CPU, and prints a
# table: release, family, mesh, equal or not. The release preset must be built.
#
# usage: tests/frameworks/sglang.sh [--case GLOB]
set -euo pipefail
cd "$(dirname "$0")/../.."
tests/sglang_venv.sh
unset PYTHONDONTWRITEBYTECODE
PYTHONPYCACHEPREFIX=$PWD/build/pycache exec build/venv-sglang/bin/python tests/frameworks/sglang_models_test.py --programs build/release/bin "$@"
