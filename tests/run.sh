#!/usr/bin/env bash
# Installs, builds and runs every test.
#
# usage: tests/run.sh [PRESET…]     default: release; also asan (with ubsan), tsan, dev
set -euo pipefail
cd "$(dirname "$0")/.."

tests/install.sh
presets=("$@")
if [ ${#presets[@]} -eq 0 ]; then presets=(release); fi

echo "CUDA: nothing to build yet, this version runs plans on the CPU"
for preset in "${presets[@]}"; do
  echo "== $preset: build"
  cmake --preset "$preset" >/dev/null
  cmake --build --preset "$preset"
  echo "== $preset: test"
  ctest --preset "$preset" -j"$(nproc)"
done
