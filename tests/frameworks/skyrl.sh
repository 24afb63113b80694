#!/usr/bin/env bash
# Tests refit.skyrl with a release of SkyRL: its own configuration, policy worker and client of the engines, on the CPU.
# Installs vLLM (6 GB, build/venv-vllm) and SkyRL (0.6 GB, build/venv-skyrl). The release preset must be built.
#
# usage: tests/frameworks/skyrl.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

release=0.4.0 # the one number to raise for a new release

venv=build/venv-vllm
. tests/frameworks/packages.sh
install_vllm
vllm=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
venv=build/venv-skyrl
if ! "$venv/bin/python" -c "import importlib.metadata as metadata; assert metadata.version('skyrl') == '$release'" 2>/dev/null; then
  make_venv
  # What SkyRL imports before it trains, beside vLLM's environment; it names as much again. It asks for Python 3.12, and what is
  # tested of it runs with 3.11, too.
  fetch --ignore-requires-python --no-deps "skyrl==$release" ray msgpack skyrl-gym loguru tensordict pyvers importlib_metadata orjson \
    omegaconf hydra-core 'antlr4-python3-runtime==4.9.*' peft accelerate cloudpathlib torchdata jaxtyping wadler_lindig datasets \
    multiprocess xxhash pyarrow pandas python-dateutil pytz dill
  echo "$vllm" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-vllm.pth"
fi
PYTHONPATH=build/release/python exec "$venv/bin/python" -B tests/frameworks/skyrl_test.py
