#!/usr/bin/env bash
# Tests refit.skyrl with a release of SkyRL, on the CPU: its own configuration, policy worker and client of the engines, and then its
# trainer, policy workers and servers in a real Ray. Installs vLLM (6 GB, build/venv-vllm) and SkyRL (0.6 GB, build/venv-skyrl). The
# release preset must be built.
#
# usage: tests/frameworks/skyrl.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

release=0.4.0 # the numbers to raise for a new release
router=0.1.17 # of vllm-router, before SkyRL's servers

venv=build/venv-vllm
. tests/frameworks/packages.sh
install_vllm
vllm=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
venv=build/venv-skyrl
if ! "$venv/bin/python" -c "
import importlib.metadata as metadata
assert (metadata.version('skyrl'), metadata.version('vllm-router')) == ('$release', '$router')" 2>/dev/null; then
  make_venv
  # What SkyRL imports before it trains, beside vLLM's environment; it names as much again. It asks for Python 3.12, and what is
  # tested of it runs with 3.11, too.
  fetch --ignore-requires-python --no-deps "skyrl==$release" ray msgpack skyrl-gym loguru tensordict pyvers importlib_metadata orjson \
    omegaconf hydra-core 'antlr4-python3-runtime==4.9.*' peft accelerate cloudpathlib torchdata jaxtyping wadler_lindig datasets \
    multiprocess xxhash pyarrow pandas python-dateutil pytz dill "vllm-router==$router"
  echo "$vllm" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-vllm.pth"
fi
PYTHONPATH=build/release/python "$venv/bin/python" -B tests/frameworks/skyrl_test.py
# As in verl.sh.
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$venv/bin/python" -B tests/engines/entry_points.py "$site"
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$PWD/build/pycache RAY_raylet_start_wait_time_s=180 RAY_worker_register_timeout_seconds=180
PYTHONPATH=$PWD/build/release/python:$site "$venv/bin/python" tests/frameworks/skyrl_ray_test.py
