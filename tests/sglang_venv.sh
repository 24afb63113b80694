#!/usr/bin/env bash
# Makes build/venv-sglang: SGLang on the torch of build/venv-torch, without a GPU's packages. Exits with 1 and one line where
# it cannot be installed.
#
# SGLang names torch and its kernels for one release of CUDA, 8 GB. What its Python imports on a CPU is small; packages of
# kernels stay empty (tests/frameworks/sglang_stand_ins.py).
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_CONSTRAINT=$PWD/tests/constraints.txt

release=0.5.23 # the numbers to raise for a new SGLang: its own, and what it pins
alone=(transformers==5.19.0 compressed-tensors==0.18.0 xgrammar==0.2.7 apache-tvm-ffi==0.1.11 outlines==0.1.11 gguf llguidance
  loguru torchvision)
with_needs=(IPython aiohttp dill einops fastapi interegular msgspec openai==2.8.0 openai-harmony orjson partial_json_parser
  pillow prometheus-client psutil pybase64 python-multipart pyzmq requests sentencepiece setproctitle tiktoken uvicorn uvloop
  xxhash zstandard)

venv=build/venv-sglang
has_release() {
  "$venv/bin/python" -c "from importlib.metadata import version; import torch; assert version('sglang') == '$release'"
}
if [ -x "$venv/bin/python" ] && has_release 2>/dev/null; then exit 0; fi
tests/torch_venv.sh

fetch() { "$venv/bin/pip" install --quiet --no-compile --no-cache-dir --disable-pip-version-check "$@"; }
make_venv() {
  local torch=build/venv-torch/bin/python
  rm -rf "$venv" && "$torch" -m venv "$venv" || return 1
  "$torch" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])' > \
    "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth" || return 1
  fetch --no-deps "sglang==$release" "${alone[@]}" && fetch "${with_needs[@]}" && has_release
}
log=build/venv-sglang.log
if ! make_venv > "$log" 2>&1; then
  rm -rf "$venv"
  echo "SGLang $release cannot be installed, its tests are left out: $(grep -v '^$' "$log" | tail -1)" >&2
  exit 1
fi
