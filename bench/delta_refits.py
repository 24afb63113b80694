"""Times refits of a plan with `options.delta` between GPUs of a host, by the share of elements that changed. The job says
`"peer": "staged"`, because direct rounds leave nothing out.

    refitc job.json -o plan.refit
    python bench/delta_refits.py plan.refit 0 & python bench/delta_refits.py plan.refit 1    # … a process for each rank

With --bitmap, for a plan with "changes": "bitmap", sources give the bits of what they changed. The times are those of `run` in
rank 0's process. The check of digests, if the job asks for it, is part of them.
"""
import argparse
import pathlib
import time

import refit
import torch

CHANGED = (0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=pathlib.Path)
    parser.add_argument("rank", type=int)
    parser.add_argument("--bitmap", action="store_true")
    arguments = parser.parse_args()
    path, rank = arguments.plan, arguments.rank
    torch.cuda.set_device(rank)
    torch.manual_seed(0)  # sources that hold the same tensor hold the same values, and change the same
    plan = refit.Plan.load(path)
    tensors = {name: torch.empty(tuple(info.shape), dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
               for name, info in plan.tensors(rank).items()}
    bitmaps = {}
    source = rank < plan.source_ranks
    if arguments.bitmap and source:
        bitmaps = {name: torch.zeros((tensor.numel() + 31) // 32, dtype=torch.int32, device="cuda")
                   for name, tensor in tensors.items()}
    executor = refit.join(plan, rank, tensors, unique_id=unique_id(path.with_suffix(".id"), rank), device=f"cuda:{rank}",
                          changes=bitmaps)
    if rank == 0:
        path.with_suffix(".id").unlink()  # all ranks have joined

    def timed(label):
        torch.cuda.synchronize()
        if rank == 0:
            time.sleep(0.3)  # the other ranks wait in `run` then
        start = time.perf_counter()
        executor.run()
        if rank == 0:
            print(f"{label:>16} {(time.perf_counter() - start) * 1e3:8.2f} ms  {executor.delta_report}", flush=True)

    timed("first, dense")
    for share in CHANGED:
        for _ in range(2):
            if source:
                change(tensors, bitmaps, share)
            timed(f"{share * 100:g} % changed")


def change(tensors, bitmaps, share):
    """Inverts the last bit of a random share of all elements, and marks them."""
    bit_values = 1 << torch.arange(32, device="cuda")
    for name, tensor in tensors.items():
        words = bitmaps[name].split(1 << 21) if name in bitmaps else None
        for i, part in enumerate(tensor.view(torch.int16).view(-1).split(1 << 26)):
            changed = torch.rand(part.shape, device="cuda") < share
            part ^= changed.to(torch.int16)
            if words is not None:
                padded = torch.nn.functional.pad(changed, (0, -len(changed) % 32)).view(-1, 32)
                words[i].bitwise_or_((padded * bit_values).sum(1).to(torch.int32))


def unique_id(path, rank):
    """Rank 0 makes it, and the others find it in a file beside the plan."""
    if rank == 0:
        temporary = path.with_suffix(".new")
        temporary.write_bytes(refit.rendezvous.unique_id())
        temporary.rename(path)
    while not path.exists():
        time.sleep(0.01)
    return path.read_bytes()


if __name__ == "__main__":
    main()
