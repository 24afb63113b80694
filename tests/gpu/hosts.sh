#!/usr/bin/env bash
# Refits between hosts that are one: NCCL is told that ranks are on different
# hosts, so that their messages go over its network transport (sockets of the
# loopback interface, if there is nothing better). Every byte is checked.
# Builds nothing.
#
# usage: tests/gpu/hosts.sh [BIN_DIR]     default: build/release/bin
set -euo pipefail
bin=${1:-$(dirname "$0")/../../build/release/bin}
gpus=$(nvidia-smi -L | wc -l)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-29611}

# Compiles the job in $work/job.json and runs it; `host` of a rank is a word of
# the third argument.
refit() {
  local name=$1 features=$2
  local -a hosts=($3)
  export WORLD_SIZE=${#hosts[@]}
  "$bin/refitc" "$work/job.json" -o "$work/plan.refit"
  "$bin/refit-verify" "$work/plan.refit" --job "$work/job.json"
  "$bin/refit-dump" "$work/plan.refit" >"$work/plan.txt"
  for feature in $features; do
    grep -q "$feature" "$work/plan.txt" || {
      echo "hosts.sh: $name: the plan has no $feature" >&2
      exit 1
    }
  done
  local pids=() failed=0 rank
  for ((rank = 0; rank < WORLD_SIZE; ++rank)); do
    RANK=$rank LOCAL_RANK=$((rank % gpus)) NCCL_HOSTID=refit-host-${hosts[rank]} \
      "$bin/refit-run" "$work/plan.refit" --transport nccl --check \
      --iterations 4 --timeout 60 --json >"$work/$rank.json" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  cat "$work/0.json"
  if [ "$failed" -ne 0 ] || ! grep -q '"passed": true' "$work/0.json"; then
    echo "hosts.sh: $name: failed" >&2
    exit 1
  fi
  echo "hosts.sh: $name: passed"
}

# Two ranks on two or three GPUs, four on more.
if [ "$gpus" -ge 4 ]; then side=2; else side=1; fi
hosts=$(if [ "$side" = 2 ]; then echo "0 0 1 1"; else echo "0 1"; fi)
cat >"$work/job.json" <<JOB
{
  "model": {"parameters": [
    {"name": "a", "shape": [4096, 2048], "dtype": "bf16"},
    {"name": "b", "shape": [2400, 7], "dtype": "fp32"}]},
  "source": {"layout": "generic", "meshes": {"m": {"axes": {"x": $side}}}, "tensors": [
    {"match": "*", "mesh": "m", "placements": ["Shard(0)"]}]},
  "destination": {"layout": "generic", "meshes": {"m": {"axes": {"x": $side}}}, "tensors": [
    {"match": "a", "mesh": "m", "placements": ["Shard(1)"]},
    {"match": "*", "mesh": "m", "placements": ["Shard(0)"]}]},
  "topology": {"hosts": [${hosts// /, }]},
  "options": {"bucket_bytes": 1048576, "staging_bytes": 4194304}
}
JOB
refit "two hosts" network "$hosts"

# One rank feeds replicas on other hosts: it broadcasts to one of each, or they
# pass on to each other what they are given. Ranks of different hosts may share a
# GPU. usage: replicas TRANSPORT "HOST …" GIGABYTES_PER_SECOND, between hosts
replicas() {
  local -a hosts=($2)
  cat >"$work/job.json" <<JOB
{
  "model": {"parameters": [
    {"name": "a", "shape": [4096, 2048], "dtype": "bf16"},
    {"name": "b", "shape": [2400, 7], "dtype": "fp32"}]},
  "source": {"layout": "generic", "meshes": {"m": {"axes": {"x": 1}}}, "tensors": [
    {"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
  "destination": {"layout": "generic", "meshes": {"m": {"axes": {"x": $((${#hosts[@]} - 1))}}}, "tensors": [
    {"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
  "topology": {"hosts": [${2// /, }], "network_gigabytes_per_second": $3,
               "transport": "$1"},
  "options": {"bucket_bytes": 1048576, "staging_bytes": 4194304}
}
JOB
}
replicas nccl "0 1 2 3" 2
refit "a broadcast to three hosts" "network broadcast" "0 1 2 3"
# Two ranks of a host, on two GPUs, deal out what one of them is broadcast.
replicas nccl "0 1 1 2 2" 0.5
for connections in 1 8; do
  export CUDA_DEVICE_MAX_CONNECTIONS=$connections
  refit "a broadcast dealt out, $connections connections" "network broadcast deal" "0 1 1 2 2"
done
unset CUDA_DEVICE_MAX_CONNECTIONS
replicas ucx "0 1 2 3" 2
refit "replicas of three hosts" "network relay" "0 1 2 3"
