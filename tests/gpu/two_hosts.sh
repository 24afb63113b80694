#!/usr/bin/env bash
# A refit between two hosts that are one: NCCL is told that the sources and the
# destinations are on different hosts, so that their messages go over its network
# transport (sockets of the loopback interface, if there is nothing better).
# Every byte is checked. Of two ranks on two or three GPUs, of four on more;
# builds nothing.
#
# usage: tests/gpu/two_hosts.sh [BIN_DIR]     default: build/release/bin
set -euo pipefail
bin=${1:-$(dirname "$0")/../../build/release/bin}
if [ "$(nvidia-smi -L | wc -l)" -ge 4 ]; then side=2; else side=1; fi
hosts=$(if [ "$side" = 2 ]; then echo "0, 0, 1, 1"; else echo "0, 1"; fi)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

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
  "topology": {"hosts": [$hosts]},
  "options": {"bucket_bytes": 1048576, "staging_bytes": 4194304}
}
JOB
"$bin/refitc" "$work/job.json" -o "$work/plan.refit"
"$bin/refit-verify" "$work/plan.refit" --job "$work/job.json"
"$bin/refit-dump" "$work/plan.refit" | grep -q network || {
  echo "two_hosts.sh: the plan has no network route" >&2
  exit 1
}

export WORLD_SIZE=$((2 * side)) MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-29611}
pids=()
for ((rank = 0; rank < 2 * side; ++rank)); do
  RANK=$rank LOCAL_RANK=$rank NCCL_HOSTID=refit-host-$((rank / side)) \
    "$bin/refit-run" "$work/plan.refit" --transport nccl --check \
    --iterations 4 --timeout 60 --json >"$work/$rank.json" &
  pids+=($!)
done
failed=0
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
cat "$work/0.json"
if [ "$failed" -ne 0 ] || ! grep -q '"passed": true' "$work/0.json"; then
  echo "two_hosts.sh: failed" >&2
  exit 1
fi
echo "two_hosts.sh: passed"
