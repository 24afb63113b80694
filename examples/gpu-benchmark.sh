#!/usr/bin/env bash
# Measures the plans of examples/jobs/gpu on this host's GPUs, each beside its
# bytes alone and beside broadcasts of the whole model. Some are also measured
# without and with a check, with one hardware queue of CUDA and with eight.
# Builds nothing: exits with 2 where its programs are missing.
#
# usage: examples/gpu-benchmark.sh [2|4|8] [BIN_DIR]
#
# libnccl is looked for as workers do; REFIT_NCCL_LIBRARY names another file.
# Where REFIT_NCCL_M2N_LIBRARY names NVIDIA's libnccl_m2n, direct plans are also
# measured beside that, and staged messages in windows. Both need NCCL 2.30.5 or
# later.
set -euo pipefail
cd "$(dirname "$0")/.."
gpus=${1:-4}
bin=${2:-build/release/bin}
. examples/find-programs.sh "$bin" refitc refit-bench
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# One process per rank, as a launcher would start them.
ranks() {
  local count=$1
  shift
  for ((rank = 0; rank < count; ++rank)); do
    RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$count MASTER_ADDR=127.0.0.1 MASTER_PORT=29541 "$@" &
  done
  wait
}

# A lone refit without and with a check. CUDA gives a process so many hardware
# queues: 8 by default, 1 where the trainer is Megatron, which asks for that.
check_rows() {
  local connections
  for connections in 1 8; do
    printf 'CUDA_DEVICE_MAX_CONNECTIONS=%s: ' "$connections"
    CUDA_DEVICE_MAX_CONNECTIONS=$connections "$bin/refit-bench" transfer "$1" --iterations 5 |
      grep -o 'one Run and Wait .*'
  done
}

m2n=${REFIT_NCCL_M2N_LIBRARY:-}
for job in examples/jobs/gpu/"$gpus"-*.json; do
  name=$(basename "$job" .json)
  printf '\n== %s\n' "$name"
  "$bin/refitc" "$job" -o "$work/$name.refit"
  case $name in
    *-colocated) ranks $((2 * gpus)) "$bin/refit-bench" transfer "$work/$name.refit" --one-rank --iterations 10 ;;
    *-fp8*) "$bin/refit-bench" transfer "$work/$name.refit" --iterations 10 ;;
    *-staged)
      if [ -n "$m2n" ]; then
        ranks "$gpus" "$bin/refit-bench" transfer "$work/$name.refit" --one-rank --iterations 10 --against windows
      else
        "$bin/refit-bench" transfer "$work/$name.refit" --iterations 10
      fi
      ;;
    *-two-engines | *-0.6b*) "$bin/refit-bench" transfer "$work/$name.refit" --iterations 10 ;;
    *)
      if [ -n "$m2n" ]; then
        ranks "$gpus" "$bin/refit-bench" transfer "$work/$name.refit" --one-rank --peers --iterations 10 --against nccl_m2n
      else
        "$bin/refit-bench" transfer "$work/$name.refit" --peers --iterations 10
      fi
      ;;
  esac
  case $name in
    2-qwen3-30b-a3b | 2-qwen3-30b-a3b-staged | *-ep-to-tp* | *-replicas*) check_rows "$work/$name.refit" ;;
  esac
done
