#!/usr/bin/env bash
# Compares the vllm layout with a release of vLLM, on the CPU, and prints a table: release, family, mesh, equal or not.
# Installs vLLM's build for CPUs into build/venv-vllm (6 GB); packages.sh has its release. The release preset must be built.
#
# usage: tests/frameworks/vllm.sh [--python-of RELEASE] [--case GLOB | --refitted DIRECTORY]
#
# --python-of: a release that has no build for CPUs yet. Its own Python files run with the kernels of the build for CPUs.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=build/venv-vllm
. tests/frameworks/packages.sh

install_vllm
if [ "${1:-}" = --python-of ]; then
  python_of "$2"
  shift 2
fi
exec "$venv/bin/python" -B tests/frameworks/vllm_models_test.py --programs build/release/bin "$@"
