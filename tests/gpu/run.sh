#!/usr/bin/env bash
# Runs the GPU tests of a tree that is built already; builds nothing.
#
# usage: tests/gpu/run.sh [BIN_DIR]     default: build/release/bin
#
# libnccl is looked for as workers do; REFIT_NCCL_LIBRARY names another file.
set -euo pipefail
bin=${1:-$(dirname "$0")/../../build/release/bin}
if ! nvidia-smi -L >/dev/null 2>&1; then
  echo "gpu tests: no GPU here, nothing was run" >&2
  exit 1
fi
for test in cuda_device_test refit_gpu_test shared_gpu_failure_gpu_test; do
  "$bin/$test" --gtest_brief=1
done
"$(dirname "$0")/deltas.sh" "$bin"
if [ "$(nvidia-smi -L | wc -l)" -ge 2 ]; then
  "$(dirname "$0")/hosts.sh" "$bin"
fi
