#!/usr/bin/env bash
# Compares the vllm layout with a release of vLLM, on the CPU, and prints a table: release, family, mesh, equal or not.
# Installs vLLM's build for CPUs into build/venv-vllm (6 GB); packages.sh has its release. The release preset must be built.
#
# usage: tests/frameworks/vllm.sh [--case GLOB | --refitted DIRECTORY]
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=build/venv-vllm
. tests/frameworks/packages.sh

install_vllm
exec "$venv/bin/python" -B tests/frameworks/vllm_models_test.py --programs build/release/bin "$@"
