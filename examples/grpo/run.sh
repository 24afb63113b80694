#!/usr/bin/env bash
# A real RL loop on a CPU, from nothing: TRL's GRPOTrainer, a vLLM server, and Refit between them. README.md tells more.
# Installs vLLM's build for CPUs (build/venv-vllm, 6 GB) and TRL (build/venv-trl, 0.3 GB), and builds Refit's package, where these are
# missing. Needs Debian 12 or Ubuntu 24.04, and root or sudo where a package of the distribution is missing.
#
# usage: examples/grpo/run.sh [--steps N] [--sync refit|file|framework …] [--break worker|bit|version] [--gpus 1|4]
#
# GRPO_PYTHON: with --gpus, the Python of an environment that has vllm, trl, matplotlib and refit.
set -euo pipefail
cd "$(dirname "$0")/../.."

# Four processes import vLLM, so what Python compiled is kept, but not beside the sources: each import takes twice as long without it.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$PWD/build/pycache

python3 examples/grpo/grpo.py --check-arguments "$@"
case " $* " in *" --help "* | *" -h "*) exit 0 ;; esac
if [ -n "${GRPO_PYTHON:-}" ]; then exec "$GRPO_PYTHON" examples/grpo/grpo.py "$@"; fi
case " $* " in *" --gpus"*)
  echo "run.sh: --gpus needs GRPO_PYTHON, the Python of an environment that has vllm, trl, matplotlib and refit" >&2
  exit 2
  ;;
esac

mkdir -p build/grpo
log=build/grpo/setup.log
: >"$log"

# A bar on the terminal while a command runs: waiting WHAT SECONDS COMMAND…, with the seconds that it usually takes.
waiting() {
  local what=$1 usual=$2 start=$SECONDS full
  shift 2
  (set -e; "$@") >>"$log" 2>&1 &
  while kill -0 $! 2>/dev/null; do
    full=$((20 * (SECONDS - start) / usual))
    if [ -t 1 ]; then bar $((full < 19 ? full : 19)); fi
    sleep 0.5
  done
  if ! wait $!; then
    printf '\nrun.sh: %s: failed; %s ends with\n' "$what" "$log" >&2
    tail -5 "$log" >&2
    exit 1
  fi
  bar 20
  echo
}

bar() {
  printf '\r  '
  for ((i = 0; i < 20; i++)); do if [ "$i" -lt "$1" ]; then printf '█'; else printf '·'; fi; done
  printf ' %s: %d s' "$what" $((SECONDS - start))
}

install_frameworks() {
  . tests/frameworks/packages.sh
  install_trl
  "$venv/bin/python" -c 'import matplotlib' 2>/dev/null || fetch matplotlib
}

# The package alone, at -O1, which compiles faster, unless a release was configured here before.
refit=build/release
if [ ! -f "$refit/build.ninja" ]; then refit=build/grpo/refit; fi
build_refit() {
  tests/python_venv.sh
  if [ ! -f "$refit/build.ninja" ]; then
    cmake -G Ninja -S . -B "$refit" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" -DREFIT_CUDA=OFF \
      -DREFIT_BUILD_TESTS=OFF -DREFIT_PYTHON_PACKAGE=ON -DREFIT_PRECOMPILE=ON -DCMAKE_UNITY_BUILD=ON
  fi
  cmake --build "$refit" --target refit_package
}
# Downloads leave most of a CPU to the compiler.
set_up() {
  build_refit &
  install_frameworks
  wait $!
}

waiting "packages of the distribution are there" 30 tests/install.sh
waiting "vLLM and TRL are installed (2.5 GB to download), and Refit's package is built" 300 set_up
# vLLM finds refit.vllm by the entry point of an installed package; the build tree's is told here.
site=build/grpo/site
rm -rf "$site"
mkdir -p "$site"
build/venv-trl/bin/python tests/engines/entry_points.py "$site"
PYTHONPATH=$PWD/$refit/python:$PWD/$site exec build/venv-trl/bin/python examples/grpo/grpo.py "$@"
