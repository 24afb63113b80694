#!/usr/bin/env bash
# Installs, builds and runs every test, those of the Python package with torch and transformers, and SGLang's model
# classes, too. It holds the adapters against wheels of verl, SkyRL and TRL. Where these cannot be installed it says so and
# goes on.
#
# usage: tests/run.sh [PART…]     default: release
#
# parts: release, asan (with ubsan), tsan (the executor), dev: presets
#        fuzz: 30 s of each fuzzer    wheels: built as a release ships them
#        frameworks: an RL loop of 30 steps, then the frameworks' own packages, 20 GB under build/; by hand
#        all: release wheels asan fuzz tsan, which CI runs. Here release leaves to asan the test binaries that do the same
#             there, and tsan takes the libraries without threads from release.
set -euo pipefail
cd "$(dirname "$0")/.."
# What Python compiled is kept, but not beside the sources: torch takes twice as long to import without it.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$PWD/build/pycache

parts=("$@")
if [ ${#parts[@]} -eq 0 ]; then parts=(release); fi
leave=OFF take=
if [ "${parts[*]}" = all ]; then
  parts=(release wheels asan fuzz tsan)
  leave=ON take=$PWD/build/release
fi
for part in "${parts[@]}"; do
  case "$part" in
    release | asan | tsan | dev | fuzz | wheels | frameworks) ;;
    *)
      echo "tests/run.sh: there is no part \"$part\"; there are release, asan, tsan, dev, fuzz, wheels and frameworks, or all" >&2
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
# torch, transformers and SGLang are downloaded while the release is built.
frameworks=
case " ${parts[*]} " in *" release "*)
  tests/sglang_venv.sh &
  frameworks=$!
  ;;
esac

step() {
  times >build/times
  printf '== %s  (after %d s, %s of CPU)\n' "$*" "$SECONDS" "$(tail -1 build/times)"
}

# One test more than cores runs at a time, because many wait for a deadline most of their time.
run_ctest() { ctest --preset "$1" -j"$(($(nproc) + 1))" "${@:2}"; }

run_preset() {
  local preset=$1 options=()
  if [ "$preset" = release ]; then
    # The quickstart leaves CUDA out of this build folder.
    options=(-U REFIT_CUDA -DREFIT_PRECOMPILE=ON -DCMAKE_UNITY_BUILD=ON -DREFIT_WARNINGS_AS_ERRORS=ON
      "-DREFIT_LEAVE_TESTS_TO_SANITIZER=$leave")
  fi
  if [ "$preset" = tsan ]; then options=("-DREFIT_TAKE_FROM=$take"); fi
  if [ "$preset" = asan ]; then tests/install.sh clang lld; fi
  step "$preset: build"
  cmake --preset "$preset" "${options[@]}" >/dev/null
  cmake --build --preset "$preset"
  step "$preset: test"
  if [ "$preset" != release ]; then
    run_ctest "$preset"
    return
  fi
  local has_sglang=true
  wait "$frameworks" || has_sglang=false
  if [ -d build/release/python ] && tests/torch_venv.sh; then
    # With torch the Python tests are those of ctest and more.
    run_ctest release -E '^python$'
    step "release: test Python with torch"
    PYTHONPATH=$PWD/build/release/python build/venv-torch/bin/python -m pytest -p no:cacheprovider --durations=5
  else
    run_ctest release
  fi
  if [ -x build/venv/bin/python ]; then
    step "release: what adapters use of verl, SkyRL and TRL"
    build/venv/bin/python -B tests/frameworks/signatures.py
  fi
  if "$has_sglang"; then
    step "release: SGLang's model classes"
    tests/frameworks/sglang.sh --case '*: tp2*'
  fi
}

run_frameworks() {
  step "frameworks: an RL loop"
  examples/grpo/run.sh --steps 30
  cmake --build --preset release --target refit_tools refit_package
  for name in run vllm megatron trl verl skyrl nemo_rl; do
    step "frameworks: $name"
    "tests/frameworks/$name.sh"
  done
}

for part in "${parts[@]}"; do
  case "$part" in
    frameworks) run_frameworks ;;
    fuzz | wheels)
      step "$part"
      "tests/$part.sh"
      ;;
    *) run_preset "$part" ;;
  esac
done
step "all passed"
