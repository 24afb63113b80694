#!/usr/bin/env bash
# Tests refit.nemo_rl with NeMo-RL's own classes, on the CPU: its configuration, synchronizer and workers' methods, and then its `setup`,
# policy workers and vLLM actors in a real Ray. NeMo-RL is no package, so you give a checkout of it:
#   git clone --depth 1 https://github.com/NVIDIA-NeMo/RL
# Installs vLLM (6 GB, build/venv-vllm), and Ray, NeMo Automodel and the transformers that NeMo-RL asks for (0.4 GB, build/venv-nemo-rl).
# The release preset must be built.
#
# usage: tests/frameworks/nemo_rl.sh CHECKOUT
set -euo pipefail
if [ ! -f "${1:-}/nemo_rl/package_info.py" ]; then
  echo "nemo_rl.sh: '${1:-}' is no checkout of NeMo-RL; wanted a folder with nemo_rl/package_info.py" >&2
  exit 2
fi
checkout=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.."

venv=build/venv-vllm
. tests/frameworks/packages.sh
install_vllm
vllm=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
venv=build/venv-nemo-rl
automodel=0.4.0 # of nemo-automodel, as the commit that NeMo-RL names calls itself
if ! "$venv/bin/python" -c "
import importlib.metadata as metadata
assert metadata.version('nemo-automodel') == '$automodel'" 2>/dev/null; then
  make_venv
  # What NeMo-RL imports before it trains, beside vLLM's environment; nemo_rl_cpu.py has what stands in for the rest. It asks for Python
  # 3.13, and what is tested of it runs with 3.11, too.
  fetch --no-deps ray msgpack accelerate 'transformers>=5.5,<5.9' 'tokenizers==0.22.*' 'huggingface-hub<2' "nemo-automodel==$automodel" \
    'torchao==0.17.*' torchdata hydra-core omegaconf 'antlr4-python3-runtime==4.9.*' prettytable wcwidth
  echo "$vllm" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-vllm.pth"
fi
# Each process imports NeMo-RL, torch and vLLM, so what is compiled of these is kept, as in verl.sh. Ray's workers have the lowest
# priority unless told otherwise, so that a loaded machine does not come to start them.
unset PYTHONDONTWRITEBYTECODE
export NO_VCS_VERSION=1 PYTHONPATH=$PWD/build/release/python:$checkout PYTHONPYCACHEPREFIX=$PWD/build/pycache \
  RAY_raylet_start_wait_time_s=180 RAY_worker_register_timeout_seconds=180 RAY_worker_niceness=0
"$venv/bin/python" tests/frameworks/nemo_rl_test.py
"$venv/bin/python" tests/frameworks/nemo_rl_ray_test.py "$checkout"
