#!/usr/bin/env python3
"""Train under FSDP2, refit into tensor-parallel workers, and check every bit.

    python end_to_end.py --model qwen3 --destination-ranks 2                # on this CPU, with transformers
    torchrun --nproc-per-node 4 end_to_end.py --transport nccl              # a GPU for each rank, without transformers

On the CPU the trainers and the inference workers are processes of their own (gloo); their live tensors lie in shared
memory, where the executor's ranks, threads of the parent, refit them in place. A transformers model (random weights)
is trained a few steps, refitted, and must then say exactly what a worker says that loads the trainer's checkpoint.

On GPUs each process is a rank: the first half trains, the rest serves. The model is one of plain torch modules with
the names and shapes of a Qwen3 `config.json` (--config; default: Qwen3-0.6B's). The refit is timed beside a broadcast
of each tensor and a packed broadcast.
"""
import argparse
import json
import os
import pathlib
import sys
import tempfile

import torch
import torch.distributed as dist

import refit

TINY = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, tie_word_embeddings=False)


def tiny_model(family, seed):
    import transformers

    torch.manual_seed(seed)
    if family == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**TINY, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)
        return transformers.Qwen3MoeForCausalLM(config)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TINY))


def logits(model):
    tokens = torch.arange(24).view(2, 12) * 7 % TINY["vocab_size"]
    with torch.no_grad():
        return model.eval()(tokens).logits.clone()


def join_world(side, rank, world_size, directory):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{directory}/{side}", rank=rank, world_size=world_size)


def shared(model):
    """This rank's part of each parameter, moved to memory that other processes may map."""
    parts = {}
    for name, parameter in model.named_parameters():
        part = parameter.detach()
        part = part.to_local() if hasattr(part, "to_local") else part
        if part.numel() > 0:
            part.share_memory_()  # moves the storage: the model's own tensor is there now
        parts[name] = part
    return parts


def trainer(rank, world_size, family, directory, to_parent, finished):
    """A source rank: FSDP2, a few steps, then hands its shards over."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join_world("source", rank, world_size, directory)
    model = tiny_model(family, seed=1)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    for _ in range(3):
        tokens = torch.randint(0, TINY["vocab_size"], (2, 16))
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after_training = logits(model)
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    whole = {name: tensor.full_tensor().detach().clone() for name, tensor in model.named_parameters()}
    if rank == 0:
        reference = tiny_model(family, seed=1)
        reference.load_state_dict(whole, strict=True)
        reference.save_pretrained(f"{directory}/trained")
    dist.barrier()
    to_parent.put((rank, refit.describe(model, "source"), shared(model), {"source": after_training}))
    finished.wait()
    dist.destroy_process_group()


def server(rank, world_size, family, directory, to_parent, refitted, finished):
    """A destination rank: a tensor-parallel transformers model with other weights, until the parent has refitted it."""
    import transformers
    from transformers.distributed import DistributedConfig

    def load(checkpoint):
        plan = DistributedConfig(tp_plan="auto") if world_size > 1 else None
        return transformers.AutoModelForCausalLM.from_pretrained(
            f"{directory}/{checkpoint}", dtype=torch.float32, **({"distributed_config": plan} if plan else {}))

    join_world("destination", rank, world_size, directory)
    model = load("initial")
    before = logits(model)
    to_parent.put((rank, refit.describe(model, "destination"), shared(model), {}))
    refitted.wait()
    after = logits(model)
    reference = load("trained")
    wrong = [name for (name, a), b in zip(model.named_parameters(), reference.parameters())
             if not torch.equal(refit.tensors.local_part(a.detach()), refit.tensors.local_part(b.detach()))]
    to_parent.put((rank, None, {}, {"before": before, "after": after, "reference": logits(reference),
                                    "wrong": wrong}))
    finished.wait()
    dist.destroy_process_group()


def collect(queue, processes, ranks):
    """One message of each rank, by rank; an error if a process ends first."""
    import queue as queues

    found = {}
    while len(found) < ranks:
        try:
            rank, *message = queue.get(timeout=1)
            found[rank] = message
        except queues.Empty:
            failed = [process.exitcode for process in processes if process.exitcode]
            if failed:
                raise SystemExit(f"a worker ended with status {failed[0]}") from None
    return [found[rank] for rank in range(ranks)]


def on_cpu(family, source_ranks, destination_ranks):
    """Returns (refitted, reference, before, source): logits."""
    processes = []
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="refit-") as directory:
        refitted, finished = context.Event(), context.Event()
        queues = {"source": context.Queue(), "destination": context.Queue()}
        tiny_model(family, seed=2).save_pretrained(f"{directory}/initial")
        for rank in range(source_ranks):
            processes.append(context.Process(
                target=trainer, args=(rank, source_ranks, family, directory, queues["source"], finished)))
        for rank in range(destination_ranks):
            processes.append(context.Process(target=server, args=(
                rank, destination_ranks, family, directory, queues["destination"], refitted, finished)))
        try:
            for process in processes:
                process.start()
            sources = collect(queues["source"], processes, source_ranks)
            destinations = collect(queues["destination"], processes, destination_ranks)
            job = refit.merge([description for description, _, _ in sources + destinations])
            plan = refit.compile(job)
            plan.verify()
            print(f"{plan!r} by {len(job['source']['tensors'])} + {len(job['destination']['tensors'])} rules")
            refit.run_local(plan, [tensors for _, tensors, _ in sources + destinations])
            refitted.set()
            ends = [result for _, _, result in collect(queues["destination"], processes, destination_ranks)]
            finished.set()
            for process in processes:
                process.join(60)
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()
    for rank, end in enumerate(ends):
        assert not end["wrong"], f"destination rank {rank} has wrong weights: {end['wrong']}"
        assert torch.equal(end["after"], end["reference"]), f"destination rank {rank} says another thing"
        assert not torch.equal(end["after"], end["before"]), "the refit changed nothing"
    trained = sources[0][2]["source"]
    torch.testing.assert_close(ends[0]["after"], trained)  # tensor-parallel sums round in another order
    if destination_ranks == 1:
        assert torch.equal(ends[0]["after"], trained), "one whole worker computes what the trainer does, to the bit"
    print(f"{family}: {source_ranks} FSDP2 ranks -> {destination_ranks} tensor-parallel ranks: equal to the bit")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("local", "nccl"), default="local")
    parser.add_argument("--model", choices=("qwen3", "qwen3_moe"), default="qwen3", help="of the CPU's run")
    parser.add_argument("--source-ranks", type=int, help="default: 2 on the CPU, half of the GPUs")
    parser.add_argument("--destination-ranks", type=int, default=2, help="of the CPU's run")
    parser.add_argument("--config", help="nccl: a Qwen3 config.json; default: Qwen3-0.6B's numbers")
    parser.add_argument("--peer", choices=("direct", "staged"), default="direct", help="nccl: the job's options.peer")
    parser.add_argument("--iterations", type=int, default=5, help="nccl: the best of so many is shown")
    parser.add_argument("--json", help="nccl: where rank 0 writes what it measured")
    arguments = parser.parse_args()
    if arguments.transport == "local":
        on_cpu(arguments.model, arguments.source_ranks or 2, arguments.destination_ranks)
    else:
        sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
        import end_to_end_gpu

        end_to_end_gpu.on_gpus(
            json.loads(pathlib.Path(arguments.config).read_text()) if arguments.config else None,
            arguments.source_ranks, arguments.peer, arguments.iterations, arguments.json)


if __name__ == "__main__":
    main()
