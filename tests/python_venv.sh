#!/usr/bin/env bash
# Makes build/venv, with what the Python package's build and its tests without
# torch need, and mypy and ruff. Where no package index can be reached the package is left out.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_CONSTRAINT=$PWD/tests/constraints.txt

venv=build/venv
mypy=2.4.1 ruff=0.17.6 # later ones may find more
packages=(nanobind numpy pytest ml_dtypes matplotlib "mypy==$mypy" "ruff==$ruff")
if [ -x "$venv/bin/python" ] && "$venv/bin/python" -c "
import importlib.metadata as metadata
import nanobind, numpy, pytest, ml_dtypes, matplotlib
assert (metadata.version('mypy'), metadata.version('ruff')) == ('$mypy', '$ruff')" 2>/dev/null; then exit 0; fi
python=/usr/bin/python3
if [ ! -x "$python" ]; then python=python3; fi
mkdir -p build
if ! { "$python" -m venv "$venv" && "$venv/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}"; } >&2; then
  rm -rf "$venv"
  echo "Python: ${packages[*]} cannot be installed; the package is left out" >&2
fi
