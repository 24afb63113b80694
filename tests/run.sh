#!/usr/bin/env bash
# Installs, builds and runs every test, those of the Python package with torch and transformers, and SGLang's model
# classes, too. Where these cannot be installed it says so and goes on.
#
# usage: tests/run.sh [PART…]     default: release
#
# parts: release, asan (with ubsan), tsan (the executor), dev: presets
#        fuzz: 30 s of each fuzzer    wheels: built as a release ships them
#        all: release wheels asan tsan fuzz, which CI runs
set -euo pipefail
cd "$(dirname "$0")/.."

parts=("$@")
if [ ${#parts[@]} -eq 0 ]; then parts=(release); fi
if [ "${parts[*]}" = all ]; then parts=(release wheels asan tsan fuzz); fi
for part in "${parts[@]}"; do
  case "$part" in
    release | asan | tsan | dev | fuzz | wheels) ;;
    *)
      echo "tests/run.sh: there is no part \"$part\"; there are release, asan, tsan, dev, fuzz and wheels, or all" >&2
      exit 2
      ;;
  esac
done

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

run_preset() {
  local preset=$1 package=build/$1/python options=()
  if [ "$preset" = release ]; then
    # The quickstart leaves CUDA out of this build folder.
    options=(-U REFIT_CUDA -DREFIT_PRECOMPILE=ON -DCMAKE_UNITY_BUILD=ON -DREFIT_WARNINGS_AS_ERRORS=ON)
  fi
  if [ "$preset" = asan ]; then tests/install.sh clang; fi
  step "$preset: build"
  cmake --preset "$preset" "${options[@]}" >/dev/null
  cmake --build --preset "$preset"
  step "$preset: test"
  ctest --preset "$preset" -j"$(nproc)"
  if [ -d "$package" ] && tests/torch_venv.sh; then
    step "$preset: test Python with torch"
    PYTHONPATH=$PWD/$package PYTHONPYCACHEPREFIX=$PWD/build/pycache \
      build/venv-torch/bin/python -m pytest -p no:cacheprovider --durations=5
  fi
  if [ "$preset" = release ] && tests/sglang_venv.sh; then
    step "$preset: SGLang's model classes"
    tests/frameworks/sglang.sh --case '*: tp2*'
  fi
}

for part in "${parts[@]}"; do
  case "$part" in
    fuzz | wheels)
      step "$part"
      "tests/$part.sh"
      ;;
    *) run_preset "$part" ;;
  esac
done
step "all passed"
