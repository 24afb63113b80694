#!/usr/bin/env bash
# Installs, builds and runs every test, those of the Python package with torch and transformers, and SGLang's model
# classes, too. Where these cannot be installed it says so and goes on.
#
# usage: tests/run.sh [PRESET…]     default: release; also asan (with ubsan), tsan, dev
set -euo pipefail
cd "$(dirname "$0")/.."

presets=("$@")
if [ ${#presets[@]} -eq 0 ]; then presets=(release); fi

tests/install.sh
tests/python_venv.sh
if command -v nvcc >/dev/null; then
  echo "CUDA: the CUDA parts are built; tests/gpu/run.sh runs their tests where GPUs are"
else
  echo "CUDA: no nvcc here, the CUDA parts are left out"
fi

step() {
  times >build/times
  printf '== %s  (after %d s, %s of CPU)\n' "$*" "$SECONDS" "$(tail -1 build/times)"
}

for preset in "${presets[@]}"; do
  options=()
  if [ "$preset" = release ]; then options=(-DREFIT_PRECOMPILE=ON -DCMAKE_UNITY_BUILD=ON); fi
  step "$preset: build"
  cmake --preset "$preset" "${options[@]}" >/dev/null
  cmake --build --preset "$preset"
  step "$preset: test"
  ctest --preset "$preset" -j"$(nproc)"
  package=build/$preset/python
  if [ -d "$package" ] && tests/torch_venv.sh; then
    step "$preset: test Python with torch"
    PYTHONPATH=$PWD/$package PYTHONPYCACHEPREFIX=$PWD/build/pycache \
      build/venv-torch/bin/python -m pytest -p no:cacheprovider --durations=5
  fi
  if [ "$preset" = release ] && tests/sglang_venv.sh; then
    echo "== $preset: SGLang's model classes"
    tests/frameworks/sglang.sh --case '*: tp2*'
  fi
done
step "all passed"
