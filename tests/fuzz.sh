#!/usr/bin/env bash
# Builds and runs each fuzzer, from what the tests hold and from new random bytes. A crash leaves its input in build/fuzz
# and ends with 1.
#
# usage: tests/fuzz.sh [SECONDS]     for each fuzzer; default: 30
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-30}

tests/install.sh clang lld
# The fuzzers are part of the tree of preset asan, so that its libraries are compiled once for both.
cmake --preset asan >/dev/null
cmake --build --preset fuzz
mkdir -p build/fuzz

# fuzz FUZZER SEEDS…: what is new in the corpus stays in build/fuzz, and helps the next run.
fuzz() {
  local name=$1 corpus=build/fuzz/corpus/$1
  shift
  mkdir -p "$corpus"
  if ! "build/asan/bin/$name" -max_total_time="$seconds" -timeout=20 -artifact_prefix="build/fuzz/$name-" \
    "$corpus" "$@" >"build/fuzz/$name.log" 2>&1; then
    tail -40 "build/fuzz/$name.log"
    echo "$name failed: build/fuzz/$name.log; tests/README.md says how its input is replayed" >&2
    return 1
  fi
  echo "$name: $(grep -o 'Done .*' "build/fuzz/$name.log")"
}

plans=build/fuzz/seeds/plans
mkdir -p "$plans"
find tests/compat -name '*.refit' -exec cp {} "$plans" \;
rules=build/fuzz/seeds/rules
mkdir -p "$rules"
cp compiler/model/families/*.json "$rules"
failed=0
# Two at a time. All run, whichever fails.
fuzz plan_file_fuzz "$plans" & first=$!
fuzz job_fuzz tests/golden/jobs tests/golden/errors & second=$!
wait "$first" || failed=1
wait "$second" || failed=1
fuzz control_frame_fuzz & first=$!
fuzz memory_export_fuzz & second=$!
wait "$first" || failed=1
wait "$second" || failed=1
fuzz rules_fuzz "$rules" & first=$!
fuzz message_code_fuzz & second=$!
wait "$first" || failed=1
wait "$second" || failed=1
exit "$failed"
