#!/usr/bin/env python3
"""Measures how refitc and refit-verify grow with ranks, layers and experts, and fits exponents.

usage: growth.py BIN [--repeat N] [--limit E] [SERIES ...]

BIN holds refitc and refit-verify. Each row is one job. Times are user CPU time, the least of --repeat runs: other work on the
machine disturbs it least. Peak memory is the larger of the two programs' resident sets. A series of three rows or more ends with
the exponents e of a fit: figure ~ size^e, least squares of the logarithms. Prints Markdown. Exit status: 0, or 1 when an
exponent exceeds --limit.
"""
import argparse
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
COLUMNS = ("compile s", "prove s", "messages", "file MB", "peak MB")


def read(path):
    """JSON with comments."""
    return json.loads(re.sub(r"//.*", "", path.read_text()))


def model(name, **changes):
    return {**read(EXAMPLES / "models" / f"{name}.json"), **changes}


def deepseek(ranks, name="deepseek-v3", expert_parallel=16, engines_down=0):
    """PP16 to engines of TP32, `ranks` on each side but for engines that are down."""
    of_example = read(EXAMPLES / "jobs/deepseek-v3-pp16-ep16-to-tp32x8.json")
    return model(name), {
        "source": {**of_example["source"], "data_parallel": ranks // 16, "expert_parallel": expert_parallel},
        "destination": {**of_example["destination"], "replicas": ranks // 32 - engines_down}, "topology": {"gpus_per_host": 8}}


def qwen(ranks, stages=8, **changes):
    """Qwen3-235B-A22B, TP4 to engines of TP8."""
    source = {"layout": "megatron", "tensor_parallel": 4, "pipeline_parallel": stages, "data_parallel": ranks // 4 // stages,
              "expert_parallel": 8}
    if not changes and stages == 8:
        source.update(num_layers_in_first_pipeline_stage=11, num_layers_in_last_pipeline_stage=11)
    return model("qwen3-235b-a22b", **changes), {
        "source": source, "destination": {"layout": "vllm", "tensor_parallel": 8, "replicas": ranks // 8},
        "topology": {"gpus_per_host": 8}}


RANKS = (256, 512, 1024, 2048, 4096)
SERIES = {
    "deepseek-ranks": ("DeepSeek-V3, PP16·EP16 to TP32, R + R ranks", RANKS, deepseek),
    "qwen-ranks": ("Qwen3-235B-A22B, TP4·PP8·EP8 to TP8, R + R ranks", (128, *RANKS), qwen),
    "qwen-layers": ("Qwen3-235B-A22B, 64 + 64 ranks, PP1, L layers", (12, 24, 48, 96, 192),
                    lambda layers: qwen(64, stages=1, num_hidden_layers=layers)),
    "qwen-experts": ("Qwen3-235B-A22B, 64 + 64 ranks, PP1, 48 layers, E experts", (32, 64, 128, 256, 512),
                     lambda experts: qwen(64, stages=1, num_hidden_layers=48, num_experts=experts)),
    "kimi": ("Kimi-K2, PP16·EP16 to TP32, R + R ranks", (2048,), lambda ranks: deepseek(ranks, name="kimi-k2")),
    "deepseek-ep64": ("DeepSeek-V3, PP16·EP64 to TP32, R + R ranks", (4096,),
                      lambda ranks: deepseek(ranks, expert_parallel=64)),
    "deepseek-engine-down": ("DeepSeek-V3, PP16·EP16 to TP32, R + R - 32 ranks", (4096,),
                             lambda ranks: deepseek(ranks, engines_down=1)),
}


def measure(command, repeat):
    """User seconds and peak bytes."""
    seconds, peak = [], 0
    for _ in range(repeat):
        process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise RuntimeError(f"{command[0].name}: status {process.returncode}")
        seconds.append(usage.ru_utime)
        peak = max(peak, usage.ru_maxrss * 1024)
    return min(seconds), peak


def row(bin_dir, work, config, job, repeat):
    (work / "config.json").write_text(json.dumps(config))
    (work / "job.json").write_text(json.dumps({"model": "config.json", **job}))
    plan = work / "plan.refit"
    compiled, compile_peak = measure((bin_dir / "refitc", work / "job.json", "-o", plan), repeat)
    proved, prove_peak = measure((bin_dir / "refit-verify", plan), repeat)
    stats = json.loads(subprocess.run([bin_dir / "refitc", work / "job.json", "--stats=json"], check=True,
                                      capture_output=True, text=True).stdout)
    return compiled, proved, stats["messages"], plan.stat().st_size / 1e6, max(compile_peak, prove_peak) / 1e6


def exponent(sizes, figures):
    """Without figures of 0: less than a tick of the clock says nothing of growth."""
    seen = [(size, figure) for size, figure in zip(sizes, figures) if figure > 0]
    if len(seen) < 2:
        return 0
    x, y = [math.log(size) for size, _ in seen], [math.log(figure) for _, figure in seen]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=pathlib.Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--limit", type=float, default=math.inf, help="the largest exponent")
    parser.add_argument("series", nargs="*", default=list(SERIES))
    arguments = parser.parse_intermixed_args()
    if unknown := [name for name in arguments.series if name not in SERIES]:
        parser.error(f"no series {unknown[0]}; wanted {', '.join(SERIES)}")
    largest = 0
    with tempfile.TemporaryDirectory() as work:
        for name in arguments.series:
            title, sizes, make = SERIES[name]
            print(f"\n{title}\n\n| size | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}", flush=True)
            rows = []
            for size in sizes:
                rows.append(row(arguments.bin.resolve(), pathlib.Path(work), *make(size), arguments.repeat))
                compiled, proved, messages, megabytes, peak = rows[-1]
                print(f"| {size:,} | {compiled:.2f} | {proved:.2f} | {messages:,} | {megabytes:.1f} | {peak:.0f} |", flush=True)
            if len(rows) > 2:
                fits = [exponent(sizes, figures) for figures in zip(*rows)]
                largest = max(largest, *fits)
                print(f"| exponent | {' | '.join(f'{fit:.2f}' for fit in fits)} |", flush=True)
    return 1 if largest > arguments.limit else 0


if __name__ == "__main__":
    sys.exit(main())
