#!/usr/bin/env python3
"""Compiles and proves every job of examples/jobs at full size, then runs each, scaled down, on this CPU.

usage: examples/refit_tables.py [--bin DIRECTORY] [--job GLOB] [--full-size-only | --published]

One line a job. compile and verify are seconds of wall time; file is the plan's size; moved, bound and predicted are
refitc's own statistics: bytes over all messages, the lower bound of the topology and the predicted time; balance is the
busiest sender's bytes over the mean. "run" says that refit-run wrote every element of every destination rank of the same
mesh right, with a model of the same structure (layers, heads, experts) and smaller matrices.

--published prints instead the table of bench/results/published-tables.json: the jobs that others published a refit time
of, with refit-sim's time beside it.

Standard library only. Exit status: 0 all well, 1 some job failed.
"""
import argparse
import fnmatch
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent

# What a matrix is wide and high is not structure; how often it is cut, is. So counts (layers, heads, groups, experts)
# stay, and each of these sizes becomes the value beside it. All divide by 32, the widest cut of the jobs.
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64, "moe_latent_size": 32, "vocab_size": 1000, "head_dim": 8,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4,
    "mamba_head_dim": 4, "ssm_state_size": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
}
SMALL_TOWER = {
    "hidden_size": 64, "intermediate_size": 128, "vt_hidden_size": 64, "vt_intermediate_size": 128, "mm_hidden_size": 64,
    "text_hidden_size": 64,
}
# Of jobs that quantize, sizes that are cut stay multiples of a 128 x 128 block for every rank; fewer experts make up for it.
SMALL_IN_BLOCKS = SMALL | {
    "hidden_size": 128, "intermediate_size": 512, "moe_intermediate_size": 256, "num_experts": 32, "head_dim": 128,
    "shared_expert_intermediate_size": 512, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}
SMALL_SCRATCH = 1 << 23

# Refit times in seconds, least and most, as published in NeMo-RL's pull requests 2808 and 2971: H100 hosts of 8 GPUs, 400 Gb/s
# a GPU.
NEMO, NEMO_NEWER = "#2808", "#2971"
PUBLISHED = {
    "qwen3-4b-dp8-to-dp8": {NEMO: (0.07, 0.08)},
    "qwen3-4b-dp8-to-tp8": {NEMO: (0.07, 0.08), NEMO_NEWER: (0.21, 0.34)},
    "qwen3-4b-pp2-dp4-to-tp4x2": {NEMO: (0.09, 0.09)},
    "qwen3-4b-pp4-dp2-to-tp4x2": {NEMO: (0.13, 0.15)},
    "qwen3-4b-tp2-pp2-dp2-to-tp4x2": {NEMO: (0.13, 0.13)},
    "qwen3-4b-tp2-dp4-to-tp4x2": {NEMO: (0.11, 0.15)},
    "qwen3-30b-a3b-ep4-tp2-dp2-to-tp4x4": {NEMO: (0.54, 0.67), NEMO_NEWER: (1.13, 1.53)},
    "qwen3-30b-a3b-ep4-tp2-pp2-to-tp4x4": {NEMO: (0.48, 0.52), NEMO_NEWER: (0.74, 1.17)},
    "qwen3-30b-a3b-ep8-pp2-to-tp2x8": {NEMO: (0.51, 0.55), NEMO_NEWER: (1.21, 1.52)},
    "qwen3-30b-a3b-ep8-pp2-to-tp8x2": {NEMO: (0.50, 0.51), NEMO_NEWER: (0.74, 1.00)},
    "qwen3-30b-a3b-tp2-cp2-ep8-to-tp4x4": {NEMO_NEWER: (1.02, 1.45)},
    "nemotron-3-nano-30b-a3b-ep8-tp2-to-tp4x4": {NEMO: (0.48, 0.55)},
    "nemotron-3-super-120b-a12b-ep8-tp8-pp2-dp2-to-tp8x2": {NEMO: (1.66, 1.94), NEMO_NEWER: (2.2, 2.2)},
    "qwen3-235b-a22b-tp4-pp8-ep16-to-tp8x16": {NEMO: (4.56, 4.85), NEMO_NEWER: (1.70, 1.88)},
    "deepseek-v3-pp16-ep16-to-tp32x8": {NEMO: (7.65, 9.94), NEMO_NEWER: (2.39, 2.83)},
    "qwen3-4b-fp8-dp8-to-dp8": {NEMO: (0.06, 0.07)},
    "qwen3-4b-fp8-dp8-to-tp4x2": {NEMO: (0.05, 0.10)},
    "qwen3-4b-fp8-pp2-dp4-to-tp4x2": {NEMO: (0.06, 0.10)},
    "qwen3-4b-fp8-pp4-dp2-to-tp4x2": {NEMO: (0.08, 0.10)},
    "qwen3-4b-fp8-tp2-dp4-to-tp4x2": {NEMO: (0.09, 0.15)},
    "qwen3-30b-a3b-fp8-ep4-tp2-pp2-to-tp2x8": {NEMO: (1.54, 1.69), NEMO_NEWER: (3.19, 4.04)},
    "qwen3-30b-a3b-fp8-ep8-pp2-to-tp2x8": {NEMO: (1.34, 1.60), NEMO_NEWER: (3.20, 4.30)},
    "qwen3-30b-a3b-fp8-ep8-dp2-to-tp2x8": {NEMO: (1.21, 1.62), NEMO_NEWER: (2.90, 4.00)},
}


def without_comments(text):
    return re.sub(r'("(?:[^"\\]|\\.)*")|//[^\n]*|/\*.*?\*/', lambda match: match.group(1) or "", text, flags=re.DOTALL)


def scaled_down(job, directory):
    """The job at `job` with a smaller model, written into `directory`; None if its model is not a config.json."""
    wanted = json.loads(without_comments(job.read_text()))
    if not isinstance(wanted["model"], str):
        return None
    config = json.loads((job.parent / wanted["model"]).read_text())
    text, tower = config.get("text_config", config), config.get("vision_config", {})
    if "kv_lora_rank" not in text:
        text.setdefault("head_dim", 0)  # a model may leave it to hidden_size / num_attention_heads
    quantized = any("fp8" in wanted[side].get("dtype", "") for side in ("source", "destination"))
    small = SMALL_IN_BLOCKS if quantized else SMALL
    text.update({key: value for key, value in small.items() if text.get(key) is not None})
    tower.update({key: value for key, value in SMALL_TOWER.items() if key in tower})
    if quantized:  # the small model too in several windows
        wanted["options"] = wanted.get("options", {}) | {"scratch_bytes": SMALL_SCRATCH}
    wanted["model"] = "config.json"
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "job.json").write_text(json.dumps(wanted))
    return directory / "job.json"


def timed(*command):
    start = time.monotonic()
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{pathlib.Path(command[0]).name}: exit status {done.returncode}: {done.stderr.strip()}")
    return time.monotonic() - start, done.stdout


def statistic(text, name):
    """The number of refitc's first line `name`; of "imbalance" that is the senders'."""
    return float(re.search(rf"^\s*{name}\s+([0-9.e+-]+)", text, re.MULTILINE).group(1))


def check(job, programs, scale_down):
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch)
        plan = directory / "plan.refit"
        compiled, text = timed(programs / "refitc", job, "-o", plan, "--stats")
        verified, _ = timed(programs / "refit-verify", plan, "--job", job)
        print(f"{job.stem:44s} {compiled:8.3f} {verified:8.3f} {plan.stat().st_size / 1e6:8.3f} "
              f"{statistic(text, 'moved') / 1e9:10.1f} {statistic(text, 'lower bound') * 1e3:10.1f} "
              f"{statistic(text, 'predicted') * 1e3:10.1f} {statistic(text, 'imbalance'):8.3f}  ", end="", flush=True)
        small = scaled_down(job, directory) if scale_down else None
        if small is None:
            print("-")
        else:
            timed(programs / "refitc", small, "-o", plan)
            seconds, _ = timed(programs / "refit-run", plan, "--transport", "local", "--check")
            print(f"every byte right, {seconds:.1f} s")
        return compiled + verified


def print_published(programs, glob):
    """A table in Markdown. The last column compares the best published time."""
    print("| job (`examples/jobs/…`) | moved | lower bound | simulated | simulated / bound | published | published / simulated |\n"
          "|---|---|---|---|---|---|---|")
    for stem, published in PUBLISHED.items():
        if not fnmatch.fnmatch(stem, glob):
            continue
        job = HERE / "jobs" / f"{stem}.json"
        with tempfile.TemporaryDirectory() as scratch:
            plan = pathlib.Path(scratch) / "plan.refit"
            stats = json.loads(timed(programs / "refitc", job, "-o", plan, "--stats=json")[1])
            simulated = json.loads(timed(programs / "refit-sim", plan, "--job", job, "--json")[1])
        seconds, bound = simulated["simulated_seconds"], stats["lower_bound_seconds"]
        texts = [(f"{least:g} s" if least == most else f"{least:g} to {most:g} s") + f" ({where})"
                 for where, (least, most) in published.items()]
        best = min(least for least, _ in published.values())
        print(f"| `{stem}` | {stats['moved_bytes'] / 1e9:,.1f} GB | {bound * 1e3:.1f} ms | {seconds * 1e3:.1f} ms | "
              f"{seconds / bound:.2f} | {', '.join(texts)} | {best / seconds:.1f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=HERE.parent / "build" / "release" / "bin")
    parser.add_argument("--job", default="*", metavar="GLOB", help="only jobs of these names")
    parser.add_argument("--full-size-only", action="store_true", help="compile and prove, run nothing")
    parser.add_argument("--published", action="store_true", help="print the table of published times beside simulated ones")
    options = parser.parse_args()
    if options.published:
        print_published(options.bin, options.job)
        return 0

    jobs = [job for job in sorted((HERE / "jobs").glob("*.json")) if fnmatch.fnmatch(job.stem, options.job)]
    print(f"{'job':44s} {'compile':>8s} {'verify':>8s} {'file MB':>8s} {'moved GB':>10s} {'bound ms':>10s} "
          f"{'predicted':>10s} {'balance':>8s}  run")
    total, failed = 0.0, 0
    for job in jobs:
        try:
            total += check(job, options.bin, not options.full_size_only)
        except RuntimeError as error:
            failed += 1
            print(f"\n{job.stem}: {error}")
    print(f"\n{len(jobs) - failed} passed, {failed} failed; compiling and proving took {total:.1f} s")
    return 1 if failed or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
