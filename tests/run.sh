#!/usr/bin/env bash
# Installs, builds and runs every test, those of the Python package with torch and transformers, and SGLang's model
# classes, too. It holds the adapters against wheels of verl, SkyRL, TRL and SGLang. Where these cannot be installed it says so and
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

compiler=()
case " ${parts[*]} " in *" asan "* | *" fuzz "*) compiler=(clang lld) ;; esac
tests/install.sh "${compiler[@]}"
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
  local file=build/times-$BASHPID
  times >"$file"
  printf '== %s  (after %d s, %s of CPU)\n' "$*" "$SECONDS" "$(tail -1 "$file")"
  rm "$file"
}

# beside NAME COMMAND…: runs it in the background; its output goes to build/NAME.log. One at a time.
beside_pid=
beside() {
  step "$1 starts, beside what follows"
  beside_name=$1
  set -m # with a process group of its own
  "${@:2}" >"build/$1.log" 2>&1 &
  beside_pid=$!
  set +m
}
# Waits for it, and prints what it said. Returns its exit status.
end_beside() {
  if [ -z "$beside_pid" ]; then return 0; fi
  local status=0
  wait "$beside_pid" || status=$?
  beside_pid=
  step "$beside_name ended with $status, and said:"
  cat "build/$beside_name.log"
  return "$status"
}
# Where a step fails, nothing stays behind it.
stop_beside() {
  if [ -n "$beside_pid" ]; then kill -- "-$beside_pid" 2>/dev/null || true; fi
}
trap stop_beside EXIT
trap 'exit 130' INT TERM

# One test more than cores runs at a time, because many wait for a deadline most of their time.
at_addresses=()
run_ctest() { "${at_addresses[@]}" ctest --preset "$1" -j"$(($(nproc) + 1))" "${@:2}"; }

run_preset() {
  local preset=$1 options=()
  if [ "$preset" = release ]; then
    # The quickstart leaves CUDA out of this build folder.
    options=(-U REFIT_CUDA -DREFIT_PRECOMPILE=ON -DCMAKE_UNITY_BUILD=ON -DREFIT_WARNINGS_AS_ERRORS=ON
      "-DREFIT_LEAVE_TESTS_TO_SANITIZER=$leave")
  fi
  if [ "$preset" = tsan ]; then options=("-DREFIT_TAKE_FROM=$take"); fi
  step "$preset: build"
  cmake --preset "$preset" "${options[@]}" >/dev/null
  cmake --build --preset "$preset"
  step "$preset: test"
  # Now and then the thread sanitizer finds its addresses taken, if they are drawn.
  at_addresses=()
  if [ "$preset" = tsan ] && setarch -R true 2>/dev/null; then at_addresses=(setarch -R); fi
  if [ "$preset" != release ]; then
    run_ctest "$preset"
    return
  fi
  local has_sglang=true without=()
  wait "$frameworks" || has_sglang=false
  # With torch the Python tests are those of ctest and more.
  if [ -d build/release/python ] && tests/torch_venv.sh; then without=(-E '^python$'); fi
  rm -f build/release-is-tested
  beside frameworks test_frameworks "$has_sglang" "${#without[@]}"
  run_ctest release "${without[@]}"
  touch build/release-is-tested
  # What follows them there runs beside the sanitizer's part, which needs nothing of build/release.
  if [ "$leave" = OFF ]; then end_beside; fi
}

# test_frameworks HAS_SGLANG HAS_TORCH: the tests of Python that are not ctest's; in `all`, the wheels then.
test_frameworks() {
  set -e
  if [ "$2" -ne 0 ]; then
    step "release: test Python with torch"
    PYTHONPATH=$PWD/build/release/python build/venv-torch/bin/python -m pytest -p no:cacheprovider --durations=5
  fi
  if [ -x build/venv/bin/python ]; then
    step "release: what adapters use of verl, SkyRL, TRL and SGLang"
    build/venv/bin/python -B tests/frameworks/signatures.py
  fi
  if "$1"; then
    step "release: SGLang's model classes"
    tests/frameworks/sglang.sh --case '*: tp2*'
  fi
  if [ "$leave" = ON ]; then
    # These change build/release.
    until [ -e build/release-is-tested ]; do sleep 1; done
    step "wheels"
    tests/wheels.sh
  fi
}

run_frameworks() {
  step "frameworks: an RL loop"
  examples/grpo/run.sh --steps 30
  cmake --build --preset release --target refit_tools refit_package
  for name in run vllm megatron trl jax ray verl skyrl; do
    step "frameworks: $name"
    "tests/frameworks/$name.sh"
  done
  echo "frameworks: NeMo-RL is left out, because it is no package; tests/frameworks/nemo_rl.sh takes a checkout of it"
}

for part in "${parts[@]}"; do
  case "$part" in
    frameworks)
      end_beside
      run_frameworks
      ;;
    # A wheel's tests wait most of their time, so they run beside the next part, unless that needs build/release. In `all` they
    # follow the frameworks' tests, which still run.
    wheels) if [ "$leave" = OFF ]; then beside wheels tests/wheels.sh; fi ;;
    fuzz)
      step "$part"
      "tests/$part.sh"
      ;;
    release | tsan)
      end_beside
      run_preset "$part"
      ;;
    *) run_preset "$part" ;;
  esac
done
end_beside
step "all passed"
