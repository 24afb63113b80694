#!/usr/bin/env bash
# Makes build/venv-torch: torch and transformers, as the Python tests need them on a CPU. Exits with 1 and one line where
# they cannot be installed.
#
# The only Linux builds of torch that every package index has are CUDA's, so its libraries come with it: 2.5 GB to
# download, 4.1 GB on disk, two minutes. Left out is what torch imports on GPUs alone: Triton, CUDA's Python bindings, cuSOLVER.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_CONSTRAINT=$PWD/tests/constraints.txt

torch=2.15.0 transformers=5.24.0 # the numbers to raise for new releases
venv=build/venv-torch
if [ -x "$venv/bin/python" ] && "$venv/bin/python" -c 'import torch, transformers, accelerate, pytest, ml_dtypes, matplotlib' 2>/dev/null; then exit 0; fi
python=/usr/bin/python3
if [ ! -x "$python" ]; then python=python3; fi

make_venv() {
  rm -rf "$venv" && "$python" -m venv "$venv" && fetch --no-deps "torch==$torch" || return 1
  # What torch says that it needs, less what is left out.
  "$venv/bin/python" > "$venv/torch-needs.txt" <<'PY' || return 1
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for requirement in map(Requirement, requires("torch")):
    if requirement.name in ("triton", "cuda-bindings"):
        continue
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        requirement.extras -= {"cusolver", "nvtx"}
        print(requirement)
PY
  fetch -r "$venv/torch-needs.txt" "transformers==$transformers" numpy psutil pytest ml_dtypes matplotlib && fetch --no-deps accelerate &&
    "$venv/bin/python" -c 'import torch, transformers, accelerate, ml_dtypes, matplotlib'
}

fetch() { "$venv/bin/pip" install --quiet --no-compile --no-cache-dir --disable-pip-version-check "$@"; }

mkdir -p build
log=build/venv-torch.log
if ! make_venv >"$log" 2>&1; then
  rm -rf "$venv"
  echo "torch and transformers cannot be installed, their tests are left out: $(grep -v '^$' "$log" | tail -1)" >&2
  exit 1
fi
