#!/usr/bin/env bash
# Measures one trainer that feeds several engines, each on a host of its own,
# beside its bytes alone and a packed broadcast of the model, in one run. This
# host plays all of them: NCCL is told that ranks are on different hosts, so
# that their messages go over its network transport (sockets of the loopback
# interface, if there is nothing better). Builds nothing.
#
# usage: examples/hosts-benchmark.sh [ENGINES] [MODEL] [BIN_DIR]
#        default: 3 qwen3-0.6b build/release/bin; MODEL: a file of
#        examples/models without .json
#
# Where there are fewer GPUs than ranks, some share one: they take turns of about
# 2 ms unless MPS runs (nvidia-cuda-mps-control -d).
# HOSTS_TRANSPORT=ucx measures the plan that broadcasts nothing, over NCCL too.
set -euo pipefail
cd "$(dirname "$0")/.."
engines=${1:-3}
model=${2:-qwen3-0.6b}
bin=${3:-build/release/bin}
. examples/find-programs.sh "$bin" refitc refit-bench
gpus=$(nvidia-smi -L | wc -l)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/job.json" <<JOB
{
  "model": "$PWD/examples/models/$model.json",
  "source": {"layout": "fsdp", "data_parallel": 1},
  "destination": {"layout": "vllm", "tensor_parallel": 1, "replicas": $engines},
  "topology": {"gpus_per_host": 1, "network_gigabytes_per_second": ${HOSTS_GIGABYTES_PER_SECOND:-4},
               "transport": "${HOSTS_TRANSPORT:-nccl}"}
}
JOB
"$bin/refitc" "$work/job.json" -o "$work/plan.refit"
count=$((engines + 1))
for ((rank = 0; rank < count; ++rank)); do
  RANK=$rank LOCAL_RANK=$((rank % gpus)) WORLD_SIZE=$count MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-29543} \
    NCCL_HOSTID=refit-host-$rank "$bin/refit-bench" transfer "$work/plan.refit" \
    --one-rank --peers --iterations "${HOSTS_ITERATIONS:-3}" &
done
wait
