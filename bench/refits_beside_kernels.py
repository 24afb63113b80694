"""Times refits between two GPUs beside kernels of the trainer or the engine, and those kernels beside the refits.

    refitc job.json -o plan.refit               # one source and one destination rank, direct rounds
    python bench/refits_beside_kernels.py plan.refit 0 & python bench/refits_beside_kernels.py plan.refit 1

A GEMM stands for training: it keeps all multiprocessors busy. A decode reads weights for 16 tokens: it keeps the memory
busy. Each row runs several refits without a pause while one GPU repeats the kernel. The speeds count what both did until
the first of the two ended, against what each does alone. "GEMM, told" says to cuBLAS how many multiprocessors the refit
leaves.
"""
import math
import pathlib
import sys

import refit
import torch
from delta_refits import unique_id

SIZE = 8192  # rows and columns of the weights
TOKENS = 16
MULTIPROCESSORS = (0, 132, 32, 16, 8)  # 0: all, by plain loads and stores
BYTES = 240 << 30  # of all refits of a row, about


class Load:
    """A CUDA graph of some milliseconds, launched again and again."""

    def __init__(self, name, unit, tokens, weights, repeats, left_out=0):
        self.name, self.unit = name, unit
        left = torch.randn(tokens, SIZE, dtype=torch.bfloat16, device="cuda")
        outputs = torch.empty(tokens, SIZE, dtype=torch.bfloat16, device="cuda")
        # In units of 1e9 a second: flops of a GEMM, bytes of a decode.
        self.work = repeats * (2 * tokens * SIZE * SIZE if unit == "TFLOP/s" else SIZE * SIZE * 2) / 1e9
        torch._C._set_sm_carveout_experimental(left_out or None)
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for weight in weights:
                torch.mm(left, weight, out=outputs)  # cuBLAS takes its workspace
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=stream):
            for i in range(repeats):
                torch.mm(left, weights[i % len(weights)], out=outputs)
        torch._C._set_sm_carveout_experimental(None)
        self.kept = (left, outputs)
        self.alone = 0.0  # seconds of a launch
        for _ in range(2):
            self.alone = self._time(40)

    def _time(self, count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(count):
            self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / count

    def speed(self, seconds):
        return self.work / seconds / (1e3 if self.unit == "TFLOP/s" else 1)


def main():
    path, rank = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    torch.cuda.set_device(rank)
    torch.backends.cuda.preferred_blas_library("cublaslt")  # the one that can be told how many multiprocessors
    plan = refit.Plan.load(path)
    tensors = {name: torch.zeros(tuple(info.shape), dtype=torch.bfloat16, device="cuda")
               for name, info in plan.tensors(rank).items()}
    refits = max(4, BYTES // sum(math.prod(info.shape) * 2 for info in plan.tensors(1).values()))
    executor = refit.join(plan, rank, tensors, unique_id=unique_id(path.with_suffix(".id"), rank), device=f"cuda:{rank}")
    weights = [torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(8)]
    loads = {("GEMM", 0): Load("GEMM", "TFLOP/s", SIZE, weights[:1], 4),
             ("decode", 0): Load("decode", "GB/s", TOKENS, weights, 96)}
    for count in MULTIPROCESSORS:
        if 0 < count < 132:
            loads["GEMM, told", count] = Load("GEMM, told", "TFLOP/s", SIZE, weights[:1], 4, left_out=count)
    if rank == 0:
        print(f"{'beside':<12} {'on':<12} {'multiprocessors':>15} {'refit ms':>9} {'beside':>9} {'load alone':>20} {'beside':>8} "
              f"{'speeds beside: refit':>21} {'load':>6}", flush=True)
    for loaded in (0, 1):
        # Stores that arrive need no multiprocessor there.
        for count in MULTIPROCESSORS if loaded == 0 else (0, 16):
            alone = refits_alone(executor, count, refits)
            for (name, told), load in loads.items():
                if told in (0, count if loaded == 0 else 0):
                    beside(executor, count, refits, load if rank == loaded else None, alone,
                           "source" if loaded == 0 else "destination")


def refits_alone(executor, count, refits):
    """Seconds of a refit."""
    executor.run(direct_multiprocessors=count)
    marks = enqueue_refits(executor, count, refits, torch.cuda.Stream())
    executor.wait()
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[-1]) / 1e3 / (len(marks) - 1)


def enqueue_refits(executor, count, refits, stream):
    """Events of the stream: before the refits, and after each."""
    marks = [mark(stream)]
    for _ in range(refits):
        executor.run(stream, wait=False, direct_multiprocessors=count)
        marks.append(mark(stream))
    return marks


def mark(stream):
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def beside(executor, count, refits, load, alone, where):
    executor.run(direct_multiprocessors=count)  # the ranks begin together
    moves, kernels = torch.cuda.Stream(), torch.cuda.Stream()
    begin = mark(torch.cuda.current_stream())
    launches = []
    if load is not None:
        kernels.wait_event(begin)
        launch(load, kernels, launches, 4)
    moves.wait_event(begin)
    ends = enqueue_refits(executor, count, refits, moves)[1:]
    if load is not None:
        launch(load, kernels, launches, int(1.5 * refits * alone / load.alone))
    executor.wait()
    torch.cuda.synchronize()
    if load is None:
        return
    refit_ends = [begin.elapsed_time(event) / 1e3 for event in ends]
    launch_ends = [begin.elapsed_time(event) / 1e3 for event in launches]
    until = min(refit_ends[-1], launch_ends[-1])
    refit_speed = done(refit_ends, until) * alone / until
    load_speed = done(launch_ends, until) * load.alone / until
    print(f"{load.name:<12} {where:<12} {count or 'all':>15} {alone * 1e3:9.2f} {refit_ends[-1] / refits * 1e3:9.2f} "
          f"{load.speed(load.alone):12.1f} {load.unit:>7} {load.speed(load.alone) * load_speed:8.1f} {refit_speed:21.3f} "
          f"{load_speed:6.3f}", flush=True)


def launch(load, stream, launches, count):
    with torch.cuda.stream(stream):
        for _ in range(count):
            load.graph.replay()
            launches.append(mark(stream))


def done(ends, until):
    """How many of what ended at `ends`, one after the other, were done by `until`, the last one in part."""
    begin = 0.0
    for i, end in enumerate(ends):
        if end > until:
            return i + (until - begin) / (end - begin)
        begin = end
    return len(ends)


if __name__ == "__main__":
    main()
