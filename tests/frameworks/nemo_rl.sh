#!/usr/bin/env bash
# Tests refit.nemo_rl with NeMo-RL's own classes, on the CPU. NeMo-RL is no package, so you give a checkout of it:
#   git clone --depth 1 https://github.com/NVIDIA-NeMo/RL
# Installs vLLM (6 GB, build/venv-vllm), and Ray and the transformers that NeMo-RL asks for (0.4 GB, build/venv-nemo-rl). The release
# preset must be built.
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
if ! "$venv/bin/python" -c "import ray, transformers; assert transformers.__version__ < '5.9'" 2>/dev/null; then
  make_venv
  fetch --no-deps ray msgpack accelerate 'transformers>=5.5,<5.9' 'tokenizers==0.22.*' 'huggingface-hub<2'
  echo "$vllm" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-vllm.pth"
fi
NO_VCS_VERSION=1 PYTHONPATH=build/release/python:$checkout exec "$venv/bin/python" -B tests/frameworks/nemo_rl_test.py
