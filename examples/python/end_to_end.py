#!/usr/bin/env python3
"""Train under FSDP2, refit into tensor-parallel workers, and check every bit.

    python end_to_end.py --model qwen3 --destination-ranks 2                     # on this CPU: starts its processes itself
    torchrun --nproc-per-node 8 end_to_end.py --transport nccl                   # a GPU for each rank, half of them train
    torchrun --nproc-per-node 4 end_to_end.py --transport nccl --colocated       # both sides on each of two GPUs

A transformers model (random weights) is trained a few steps. The workers serve another one of its kind; refitted, they
must say exactly what workers say that load the trainer's checkpoint. Then the refit is timed beside a broadcast of each
tensor and a packed broadcast of the same model (colocated, where NCCL cannot have two ranks on a GPU: whole tensors
handed over as handles of the memory), with every element checked after each.

`--model shapes` takes the names and shapes of a Qwen3's parameters without a forward: for that transformers is not
needed, and values are made instead of trained.

On the CPU the executor's ranks are threads of one process, which maps the others' live tensors (shared memory).
"""
import argparse
import json
import os
import pathlib
import sys
import tempfile
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # logits are compared to the bit

import torch
import torch.distributed as dist

import refit

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from end_to_end_models import Shapes, Transformers, configuration
from end_to_end_sides import Broadcast, HandOver, SharedMemoryExecutor, Span, move_packed, synchronize


def main():
    arguments = parse()
    if "RANK" not in os.environ:
        source_ranks = arguments.source_ranks or 2
        os.execv(sys.executable, [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(source_ranks + arguments.destination_ranks), *sys.argv, "--source-ranks", str(source_ranks)])
    span = Span()
    source_ranks = arguments.source_ranks or span.size // 2
    is_source = span.rank < source_ranks
    device = join_side(span, source_ranks, arguments)
    with tempfile.TemporaryDirectory(prefix="refit-") as directory:
        directory = span.gather(directory)[0]
        config = configuration(arguments.model if arguments.model != "shapes" else "qwen3", arguments.config, device)
        side = Shapes(config, device) if arguments.model == "shapes" else Transformers(config, device, directory)
        parameters = side.trainer() if is_source else side.server()

        description = refit.describe(parameters, "source" if is_source else "destination")
        job = refit.merge(span.gather(description), options={"peer": arguments.peer}, colocated=arguments.colocated)
        plan = refit.compile(job)  # the same bytes on every rank
        plan.verify()
        if device.type == "cpu":
            executor = SharedMemoryExecutor(plan, span, parameters)
        else:
            met = refit.rendezvous.from_store(span.store, span.rank, span.size)
            executor = refit.Executor(plan, span.rank, device=device, rendezvous=met).bind(parameters)

        before = side.logits(side.model) if has_logits(side) and not is_source else None
        executor.run()
        reference = None if is_source else side.reference()
        if not is_source:
            check_weights("refit", span, parameters, reference)
        if has_logits(side):
            check_logits(span, side, source_ranks, before)
        measured = measure(span, source_ranks, device, job, parameters, reference, executor, arguments)
        if span.rank == 0:
            report(span, source_ranks, plan, job, measured, arguments)
        executor.close()
        span.barrier()
    dist.destroy_process_group()


def join_side(span, source_ranks, arguments):
    """Makes this process a rank of its side's world, and returns its device."""
    is_source = span.rank < source_ranks
    rank = span.rank if is_source else span.rank - source_ranks
    world_size = source_ranks if is_source else span.size - source_ranks
    gpu = rank if arguments.colocated else int(os.environ["LOCAL_RANK"])
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(gpu))
    store = dist.PrefixStore("source" if is_source else "destination", span.store)
    if arguments.transport == "local":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        return torch.device("cpu")
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=world_size)
    return device


def has_logits(side):
    return isinstance(side, Transformers)


def check_weights(method, span, parameters, reference):
    local = refit.tensors.local_part
    wrong = [name for name, parameter in parameters.items()
             if not torch.equal(local(parameter.detach()), local(reference[name].detach()))]
    assert not wrong, f"{method}: rank {span.rank} has wrong weights: {wrong[:3]}"


def check_logits(span, side, source_ranks, before):
    if span.rank < source_ranks:
        span.gather(side.trained_logits.float().cpu() if span.rank == 0 else None)
        return
    after, reference = side.logits(side.model), side.logits(side.reference_model)
    trained = span.gather(None)[0]
    assert torch.isfinite(after).all(), "the trained model says nonsense"
    assert torch.equal(after, reference), f"rank {span.rank} says another thing"
    assert not torch.equal(after, before), "the refit changed nothing"
    if side.dtype == torch.float32:
        torch.testing.assert_close(after, trained)  # tensor-parallel sums round in another order
        assert span.size - source_ranks > 1 or torch.equal(after, trained), (
            "one whole worker computes what the trainer does, to the bit")


def measure(span, source_ranks, device, job, parameters, reference, executor, arguments):
    """Seconds of each method: the best of some runs, of the slowest rank."""
    is_source = span.rank < source_ranks
    shapes = {parameter["name"]: parameter["shape"] for parameter in job["model"]["parameters"]}
    carrier = (HandOver if arguments.colocated else Broadcast)(span, source_ranks, device)
    methods = {
        "refit": executor.run,
        f"{carrier.NAME}, each tensor": lambda: move_packed(parameters, shapes, is_source, carrier, bytes_max=0),
        f"{carrier.NAME}, packed": lambda: move_packed(parameters, shapes, is_source, carrier),
    }
    measured = {}
    for name, method in methods.items():
        best = float("inf")
        for iteration in range(arguments.iterations + 1):  # the first one warms up
            if not is_source:
                for parameter in parameters.values():
                    refit.tensors.local_part(parameter.detach()).zero_()
            synchronize(device)
            span.barrier()
            start = time.perf_counter()
            method()
            synchronize(device)
            seconds = span.largest(time.perf_counter() - start)
            best = min(best, seconds) if iteration > 0 else best
            if not is_source:
                check_weights(name, span, parameters, reference)
        measured[name] = best
    carrier.close()
    return measured


def report(span, source_ranks, plan, job, measured, arguments):
    destination_ranks = span.size - source_ranks
    size = sum(torch.Size(parameter["shape"]).numel() * (4 if parameter["dtype"] == "fp32" else 2)
               for parameter in job["model"]["parameters"])
    print(f"{plan!r} by {len(job['source']['tensors'])} + {len(job['destination']['tensors'])} rules")
    print(f"{arguments.model}: {source_ranks} FSDP2 ranks -> {destination_ranks} tensor-parallel ranks"
          f"{', colocated' if arguments.colocated else ''}: equal to the bit")
    if arguments.transport == "nccl":
        print(f"{size / 1e9:.2f} GB of weights, {arguments.peer} on {torch.cuda.get_device_name()}, torch "
              f"{torch.__version__}, NCCL {refit.nccl_library()[1]}; best of {arguments.iterations}, all checked:")
    for name, seconds in measured.items():
        print(f"  {name:26s} {seconds * 1e3:9.2f} ms")
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps({
            "model": arguments.model, "weight_bytes": size, "peer": arguments.peer, "colocated": arguments.colocated,
            "source_ranks": source_ranks, "destination_ranks": destination_ranks, "seconds": measured,
            "plan": plan.digest}, indent=1) + "\n")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("local", "nccl"), default="local")
    parser.add_argument("--model", choices=("qwen3", "qwen3_moe", "shapes"), default="qwen3")
    parser.add_argument("--config", help="a config.json to take the model's numbers from; default: tiny on the CPU, "
                        "0.4 GB and more on GPUs")
    parser.add_argument("--source-ranks", type=int, help="default: half of all; 2 without torchrun")
    parser.add_argument("--destination-ranks", type=int, default=2, help="without torchrun: how many to start")
    parser.add_argument("--colocated", action="store_true", help="source rank i and destination rank i share GPU i")
    parser.add_argument("--peer", choices=("direct", "staged"), default="direct", help="the job's options.peer")
    parser.add_argument("--iterations", type=int, default=5, help="the best of so many is shown")
    parser.add_argument("--json", help="where rank 0 writes what it measured")
    return parser.parse_args()


if __name__ == "__main__":
    main()
