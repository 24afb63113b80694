#!/usr/bin/env bash
# Refits of which only what changed is sent in staged rounds, over NCCL between
# two ranks that are told to be on different hosts; one GPU is enough. Every
# element is checked, in dense refits, at five rates of change and in random
# histories. Prints the rung, the bytes and the time of each refit. Builds
# nothing.
#
# usage: tests/gpu/deltas.sh [BIN_DIR]     default: build/release/bin
set -euo pipefail
bin=${1:-$(dirname "$0")/../../build/release/bin}
gpus=$(nvidia-smi -L | wc -l)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-29612} WORLD_SIZE=2

# Runs a command as both ranks. The output of rank 0 must have a line that
# begins as `wanted`.
both() {
  local name=$1 wanted=$2 pids=() failed=0 rank
  shift 2
  for rank in 0 1; do
    RANK=$rank LOCAL_RANK=$((rank % gpus)) NCCL_HOSTID=refit-host-$rank \
      "$@" >"$work/$rank.txt" 2>"$work/$rank.err" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  echo "== $name"
  cat "$work/0.txt"
  if [ "$failed" -ne 0 ] || ! grep -q "^$wanted" "$work/0.txt"; then
    cat "$work"/*.err >&2
    echo "deltas.sh: $name: failed" >&2
    exit 1
  fi
}

# Runs the plan of $work/job.json, with the further options.
refit() {
  local name=$1
  shift
  both "$name" "check: passed" "$bin/refit-run" "$work/plan.refit" \
    --transport nccl --timeout 120 "$@"
}

compile() {
  "$bin/refitc" "$work/job.json" -o "$work/plan.refit"
  "$bin/refit-verify" "$work/plan.refit" --job "$work/job.json" >/dev/null
}

# Deltas at each rate; the first refit of each run is dense.
deltas() {
  local name=$1 rate
  for rate in 0 0.001 0.01 0.1 1; do
    refit "$name, change rate $rate" --delta --change-rate "$rate" --iterations 4
  done
  # The last run's refits were deltas, with all messages whole.
  grep -q "rung whole" "$work/0.txt" || {
    echo "deltas.sh: $name: no delta refit" >&2
    exit 1
  }
}

# Elements of all sizes in one message, some of which the receiver casts.
for changes in snapshot bitmap; do
  cat >"$work/job.json" <<JOB
{
  "model": {"parameters": [
    {"name": "a", "shape": [1031, 517], "dtype": "bf16"},
    {"name": "b", "shape": [333, 777], "dtype": "fp32"},
    {"name": "c", "shape": [100001], "dtype": "int8"},
    {"name": "d", "shape": [4099], "dtype": "fp32"}]},
  "source": {"layout": "generic", "meshes": {"m": {"axes": {"x": 1}}}, "tensors": [
    {"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
  "destination": {"layout": "generic", "meshes": {"m": {"axes": {"x": 1}}}, "tensors": [
    {"match": "d", "mesh": "m", "placements": ["Replicate"], "dtype": "bf16"},
    {"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
  "topology": {"hosts": [0, 1]},
  "options": {"delta": {"dense_every": 0, "changes": "$changes"},
              "bucket_bytes": 524288, "staging_bytes": 2097152}
}
JOB
  compile
  deltas "elements of all sizes, $changes"
  both "random histories, $changes" "40 histories" \
    "$bin/delta_histories" "$work/plan.refit" nccl 40
done

# 12 layers as wide as Qwen3-4B's: 3.2 GB.
cat >"$work/config.json" <<'JSON'
{"model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 12,
 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
 "intermediate_size": 9728, "vocab_size": 151936, "tie_word_embeddings": true,
 "torch_dtype": "bfloat16"}
JSON
job() {
  cat >"$work/job.json" <<JOB
{"model": "config.json",
 "source": {"layout": "megatron", "tensor_parallel": 1},
 "destination": {"layout": "vllm", "tensor_parallel": 1},
 "topology": {"hosts": [0, 1]},
 "options": {$1}}
JOB
  compile
}
job ""
refit "12 layers of Qwen3-4B, dense plan" --check --iterations 4
job '"delta": {"dense_every": 0}'
deltas "12 layers of Qwen3-4B"
job '"delta": {"dense_every": 0, "check": false}'
deltas "12 layers of Qwen3-4B, without the check of each refit"
job '"delta": {"dense_every": 0, "changes": "bitmap"}'
deltas "12 layers of Qwen3-4B, bitmaps"
job '"delta": {"dense_every": 0, "changes": "bitmap", "check": false}'
deltas "12 layers of Qwen3-4B, bitmaps, without the check of each refit"
