"""Times refits of a plan with `options.delta` between two GPUs, by the share of elements that changed.

    refitc job.json -o plan.refit               # one source and one destination rank
    python bench/delta_refits.py plan.refit 0 & python bench/delta_refits.py plan.refit 1

The times are those of `run` in the source rank's process. The check of digests, if the job asks for it, is part of them.
"""
import pathlib
import sys
import time

import refit
import torch

CHANGED = (0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 1)


def main():
    path, rank = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    torch.cuda.set_device(rank)
    plan = refit.Plan.load(path)
    tensors = {name: torch.empty(tuple(info.shape), dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
               for name, info in plan.tensors(rank).items()}
    executor = refit.join(plan, rank, tensors, unique_id=unique_id(path.with_suffix(".id"), rank), device=f"cuda:{rank}")

    def timed(label):
        torch.cuda.synchronize()
        if rank == 0:
            time.sleep(0.3)  # the other rank waits in `run` then
        start = time.perf_counter()
        executor.run()
        if rank == 0:
            print(f"{label:>16} {(time.perf_counter() - start) * 1e3:8.2f} ms", flush=True)

    timed("first, dense")
    for share in CHANGED:
        for _ in range(2):
            if rank == 0:
                change(tensors.values(), share)
            timed(f"{share * 100:g} % changed")


def change(tensors, share):
    """Inverts the last bit of a random share of all elements."""
    for tensor in tensors:
        for part in tensor.view(torch.int16).view(-1).split(1 << 26):
            part ^= (torch.rand(part.shape, device="cuda") < share).to(torch.int16)


def unique_id(path, rank):
    """Rank 0 makes it, and the other finds it in a file beside the plan."""
    if rank == 0:
        temporary = path.with_suffix(".new")
        temporary.write_bytes(refit.rendezvous.unique_id())
        temporary.rename(path)
    while not path.exists():
        time.sleep(0.01)
    found = path.read_bytes()
    if rank == 1:
        path.unlink()
    return found


if __name__ == "__main__":
    main()
