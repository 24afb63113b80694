#!/usr/bin/env bash
# Tests refit.verl with a release of verl, on the CPU: its own registries, checkpoint engine, model engine and server adapter, and then
# all of these in a real Ray, with verl's manager and vLLM's engine. Installs vLLM (6 GB, build/venv-vllm) and verl (0.6 GB,
# build/venv-verl). The release preset must be built.
#
# usage: tests/frameworks/verl.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

release=0.9.1 # the one number to raise for a new release

venv=build/venv-vllm
. tests/frameworks/packages.sh
install_vllm
vllm=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
venv=build/venv-verl
if ! "$venv/bin/python" -c "import importlib.metadata as metadata; assert metadata.version('verl') == '$release'" 2>/dev/null; then
  make_venv
  # What verl imports before it trains, beside vLLM's environment; it names as much again.
  fetch --no-deps "verl==$release" ray msgpack tensordict pyvers importlib_metadata orjson codetiming omegaconf hydra-core \
    'antlr4-python3-runtime==4.9.*' pyarrow pandas python-dateutil pytz datasets multiprocess xxhash peft accelerate torchdata
  echo "$vllm" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-vllm.pth"
fi
PYTHONPATH=build/release/python "$venv/bin/python" -B tests/frameworks/verl_test.py
# vLLM finds refit.vllm by the entry point that pyproject.toml declares. A dozen processes import verl, torch and vLLM, so what is
# compiled of these is kept. Ray gives its processes 30 s to start, which a loaded machine exceeds.
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$venv/bin/python" -B tests/engines/entry_points.py "$site"
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$PWD/build/pycache RAY_raylet_start_wait_time_s=180 RAY_worker_register_timeout_seconds=180
PYTHONPATH=$PWD/build/release/python:$site "$venv/bin/python" tests/frameworks/verl_ray_test.py
