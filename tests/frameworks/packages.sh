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
