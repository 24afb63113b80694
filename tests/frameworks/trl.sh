#!/usr/bin/env bash
# Tests refit.trl with a release of TRL: its own GRPOTrainer and vLLM's own server, on the CPU.
# Installs vLLM (6 GB, build/venv-vllm) and TRL (0.3 GB, build/venv-trl). The release preset and its package refit_package must be
# built. Workers that are processes need libucx0.
#
# usage: tests/frameworks/trl.sh [--case NAME …]
set -euo pipefail
cd "$(dirname "$0")/../.."

release=1.16.0 # the one number to raise for a new release

venv=build/venv-vllm
. tests/frameworks/packages.sh
install_vllm
vllm=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
venv=build/venv-trl
if ! "$venv/bin/python" -c "import importlib.metadata as metadata; assert metadata.version('trl') == '$release'" 2>/dev/null; then
  make_venv
  # What TRL imports before it trains, beside vLLM's environment.
  fetch --no-deps "trl==$release" accelerate peft datasets multiprocess dill xxhash pyarrow pandas python-dateutil pytz
  echo "$vllm" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-vllm.pth"
fi
export PYTHONDONTWRITEBYTECODE=1
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$venv/bin/python" tests/engines/entry_points.py "$site"
PYTHONPATH=$PWD/build/release/python:$PWD/tests/engines:$site "$venv/bin/python" tests/frameworks/trl_test.py "$@"
