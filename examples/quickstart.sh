#!/usr/bin/env bash
# From a fresh Debian 12 or Ubuntu 24.04 (root or sudo, no GPU) to a proved plan
# of a real model, and a byte-exact run of another. A second run takes seconds.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s\n' "$*"; }
show() { printf '$ %s\n' "$*"; "$@"; }

step "install what is missing, build four programs (preset release, without CUDA)"
tests/install.sh
cmake --preset release -DREFIT_CUDA=OFF -DREFIT_PRECOMPILE=ON -DCMAKE_UNITY_BUILD=ON >/dev/null
cmake --build --preset release --target refitc_tool refit_verify_tool refit_diff_tool refit_run_tool

bin=build/release/bin
work=build/quickstart
mkdir -p "$work"

step "compile Qwen3-30B-A3B: Megatron TP2 PP2 DP2 EP4 -> two vLLM engines of TP4"
show $bin/refitc examples/jobs/qwen3-30b-a3b.json -o $work/qwen3-30b-a3b.refit --stats

step "prove it again, from the file alone"
show $bin/refit-verify $work/qwen3-30b-a3b.refit --job examples/jobs/qwen3-30b-a3b.json
echo "valid"

step "the same job with smaller buckets: what changes?"
show $bin/refitc examples/jobs/qwen3-30b-a3b-small-buckets.json -o $work/small-buckets.refit
status=0
show $bin/refit-diff $work/qwen3-30b-a3b.refit $work/small-buckets.refit || status=$?
if [ $status -ne 1 ]; then
  echo "refit-diff: exit status $status, wanted 1 (the plans differ)" >&2
  exit 1
fi

step "run Qwen3-0.6B at full size, all ranks on this CPU, every destination byte checked"
show $bin/refitc examples/jobs/qwen3-0.6b.json -o $work/qwen3-0.6b.refit
show $bin/refit-run $work/qwen3-0.6b.refit --transport local --check

printf '\nquickstart: all steps passed\n'
