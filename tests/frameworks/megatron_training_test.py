#!/usr/bin/env python3
"""Megatron Core trains with overlap_param_gather, and Refit moves what its optimizer says that the parameters are.

usage: megatron_training_test.py [--case GLOB] [--options JSON]                 (megatron.sh installs what it needs)
       torchrun --nproc-per-node N megatron_training_test.py --gpus [--case GLOB] [--options JSON]

Real: GPTModel of the local spec, DistributedDataParallel, the distributed optimizer, pipeline schedules, their process groups.
With overlap_param_gather a step leaves each rank with its own part of the new parameters, until the next forward pass. The test
first sees that. Then trainers send `live_shards` as refit.verl does, and every element of vLLM's layout has to be what the
optimizer's fp32 parameters are in bf16. The trainers' next steps have to be those of trainers that never sent.

On CPUs ranks are processes that meet over gloo and UCX, and Megatron's CUDA devices are the CPU. With --gpus, where torchrun starts
the ranks, nothing stands in; rank i has GPU i modulo their number. N is the largest number of ranks of a case.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import pathlib
import sys
import tempfile
import time
import warnings

os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
               "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # fmt: skip
warnings.filterwarnings("ignore")
ON_GPUS = "--gpus" in sys.argv

import torch
import torch.distributed

import refit
import table
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron_parts import DENSE, MOE, configuration, gpt_model, renamed
from refit import contract, trainers

# The installed release: names of Mamba mixers changed.
MEGATRON = {"layout": "megatron", "version": importlib.metadata.version("megatron-core")}
TIMEOUT_SECONDS = 120
# Small, but of several buckets in a chunk that has buckets.
BUCKET_ELEMENTS = 20000
DENSE, MOE = DENSE | {"num_hidden_layers": 4}, MOE | {"num_hidden_layers": 4}
# Names of parameters that are not trained begin so.
FROZEN, NONE = ("embedding.", "decoder.layers.0.mlp.linear_fc2."), "none"
# family, mesh: model, source, destination, what is frozen. All have two copies of each parameter: one that is stale.
CASES = {
    ("qwen3", "DP2"): (DENSE, {"data_parallel": 2}, {"tensor_parallel": 2}, ()),
    ("qwen3, a part frozen", "DP2"): (DENSE, {"data_parallel": 2}, {"tensor_parallel": 2}, FROZEN),
    ("qwen3", "TP2 DP2"): (DENSE, {"tensor_parallel": 2, "data_parallel": 2}, {}, ()),
    ("qwen3", "PP2 VPP2 DP2"): (DENSE, {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "data_parallel": 2}, {}, ()),
    ("qwen3_moe", "DP4 EP2"): (MOE, {"data_parallel": 4, "expert_parallel": 2}, {}, ()),
}
# The step after which trainers send, and whether Megatron's hooks were off in it, as in a framework's first step.
UPDATES = {1: False, 3: False, 4: True}
STEPS, BATCH, LENGTH = 5, 2, 16

moe_utils.te_general_gemm = None  # 0.16.1 does not define it where Transformer Engine is not installed


class CpuForCuda(torch.overrides.TorchFunctionMode):
    """Megatron makes tensors on "cuda", and asks whether parameters are there by the names of their types."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = function(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if function is torch.Tensor.type and isinstance(found, str) else found


if not ON_GPUS:
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.nn.Module.cuda = lambda module, *_, **__: module
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.pin_memory = lambda tensor: tensor
    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()  # nothing is random without dropout
else:
    torch.use_deterministic_algorithms(True, warn_only=True)  # two trainings are compared


class Training:
    """Megatron's model and optimizer on this rank, anew: two of them do the same steps."""

    def __init__(self, model, side, frozen):
        torch.manual_seed(1)
        if ON_GPUS:
            model_parallel_cuda_manual_seed(1)
        self.config = configuration(model, side, bf16=True, hidden_dropout=0.0, attention_dropout=0.0)
        stages = side.get("virtual_pipeline_parallel", 1)
        self.vocabulary, self.microbatches = model["vocab_size"], 2 * side.get("pipeline_parallel", 1)
        overlapping = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_param_gather=True, align_param_gather=stages > 1, overlap_grad_reduce=True,
            grad_reduce_in_fp32=True, bucket_size=BUCKET_ELEMENTS)
        self.chunks = []
        for stage in [None] if stages == 1 else range(stages):
            spec = get_gpt_decoder_block_spec(self.config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
            module = gpt_model(model, self.config, spec, stage).cuda()
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(not name.startswith(frozen or NONE))
            self.chunks.append(DistributedDataParallel(self.config, overlapping, Float16Module(self.config, module),
                                                       disable_bucketing=bool(stage)))
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(lr=1e-2, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, overlap_param_gather=True),
            self.chunks)
        self.config.finalize_model_grads_func = finalize_model_grads
        # Where stages are interleaved the schedule begins what hooks wait for.
        self.param_sync = [chunk.start_param_sync for chunk in self.chunks] if stages > 1 else None
        no_sync = [chunk.no_sync for chunk in self.chunks]
        self.config.no_sync_func = no_sync if stages > 1 else no_sync[0]
        self.generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())

    def step(self, hooks_off):
        self.config.param_sync_func = None if hooks_off else self.param_sync
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
            if hooks_off:
                chunk.disable_forward_pre_hook()
        self.optimizer.zero_grad()
        batches = [torch.randint(self.vocabulary, (BATCH, LENGTH), generator=self.generator).cuda() for _ in range(self.microbatches)]
        # A list, and an iterator for each chunk, is what the interleaved schedule wants.
        several = len(self.chunks) > 1
        iterators = [iter(batches) for _ in self.chunks]
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iterators if several else iterators[0],
            model=self.chunks if several else self.chunks[0], num_microbatches=len(batches), seq_length=LENGTH,
            micro_batch_size=BATCH, forward_only=False)
        stepped, _, _ = self.optimizer.step()
        assert stepped

    def enable_hooks(self):
        for chunk in self.chunks:
            if not chunk.remove_forward_pre_hook_handles:
                chunk.enable_forward_pre_hook()

    def parameters(self):
        """By the plan's names."""
        prefixes = [f"vp_stage.{number}." if len(self.chunks) > 1 else "" for number in range(len(self.chunks))]
        found = {prefix + name: parameter for prefix, chunk in zip(prefixes, self.chunks)
                 for name, parameter in chunk.module.module.named_parameters()}
        return {renamed(name, found): parameter for name, parameter in found.items()}

    def optimized(self):
        """What the optimizer says that the parameters are: its parts in fp32, each of one rank, in bf16, from all ranks."""
        parts = {}
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for parameters, shards in zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups):
                for parameter, shard in zip(parameters, shards):
                    parts[parameter] = optimizer._get_model_param_range_map(parameter)["param"], shard
        found = {}
        for name, parameter in self.parameters().items():
            found[name] = parameter.detach().clone()
            if parameter.requires_grad:
                found[name].zero_()
                if parameter in parts:
                    span, shard = parts[parameter]
                    found[name].view(-1)[span.start:span.end] = shard
                is_dense = getattr(parameter, "allreduce", True)
                torch.distributed.all_reduce(found[name], group=parallel_state.get_data_parallel_group() if is_dense else
                                             parallel_state.get_expert_data_parallel_group())
        return found


def forward_step(batches, model):
    tokens = next(batches)
    positions = torch.arange(LENGTH, device=tokens.device).expand_as(tokens)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).triu(1)
    losses = model(tokens, positions, mask, labels=tokens)
    return losses, lambda losses: (losses.float().mean(), {})


def differing(found, wanted):
    return [name for name in wanted if name not in found or not torch.equal(found[name], wanted[name])]


def trainer(case, plan, rank, device, directory):
    """How many tensors were sent, and what is wrong."""
    model, side, _, frozen = CASES[case]
    training, undisturbed = Training(model, side, frozen), Training(model, side, frozen)
    sender, compared, lines = trainers.Sender(plan, timeout=TIMEOUT_SECONDS), 0, []
    for step in range(1, STEPS + 1):
        hooks_off = UPDATES.get(step, False)
        training.step(hooks_off)
        undisturbed.step(hooks_off)
        if step in UPDATES:
            wanted = training.optimized()
            if not differing(training.parameters(), wanted):
                lines.append(f"step {step}: nothing is left to the next forward pass, so this shows nothing")
            named = dict(trainers.live_shards(training.chunks))
            shards = {renamed(name, named): shard for name, shard in named.items()}
            lines += [f"step {step}: {name} is not what the optimizer says" for name in differing(shards, wanted)]
            marked = {name for name, shard in shards.items() if getattr(shard, trainers.FROZEN, False)}
            if marked != {name for name in shards if name.startswith(frozen or NONE)} or bool(marked) != bool(frozen):
                lines.append(f"step {step}: {len(marked)} shards are said to be frozen")
            torch.save({name: tensor.cpu() for name, tensor in wanted.items()}, directory / f"wanted-{step}-{rank}.pt")
            sender.send(rank, meeting_of(rank, directory), shards, *trainers.here(device))
            compared += len(shards)
        training.enable_hooks()
        undisturbed.enable_hooks()
    lines += [f"{name} is not what it is without updates" for name in differing(training.optimized(), undisturbed.optimized())]
    sender.close()
    return compared, lines + offloaded(training.chunks)


def offloaded(chunks):
    """What is wrong once the parameters were moved to the CPU as verl and NeMo-RL do it."""
    for chunk in chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            buffer.offload_to_cpu(move_grads=False)
    try:
        return [f"{len(dict(trainers.live_shards(chunks)))} shards of parameters that were moved to the CPU"]
    except refit.FailedPrecondition as error:
        return [] if "has no memory: the parameters were moved to the CPU" in str(error) else [str(error)]


def worker(plan, rank, device, directory):
    tensors = {name: torch.full(info.shape, float("nan"), dtype=torch.bfloat16, device=device) for name, info in plan.tensors(rank).items()}
    executor = refit.join(plan, rank, tensors, unique_id=meeting_of(rank, directory), device=device, timeout=TIMEOUT_SECONDS)
    compared, lines = 0, []
    for step in UPDATES:
        executor.run(timeout=TIMEOUT_SECONDS)
        reference = contract.Sources(plan, [torch.load(directory / f"wanted-{step}-{source}.pt") for source in range(plan.source_ranks)])
        for tensor in contract.tensors_of(plan, rank):
            flat, compared = contract.on_host(tensors[tensor.name]).bits.reshape(-1), compared + 1
            lines += [f"step {step}: {tensor.name}: {part.param} is not what the optimizer says" for part in tensor.parts
                      if (contract.box_of(flat, part.offset, part.extent, part.stride)
                          != reference.wanted(part, tensor.dtype, tensor.hooks, on_gpu=ON_GPUS).bits).any()]
    executor.close()
    return compared, lines


def meeting_of(rank, directory):
    """The unique id of a case's ranks: trainer 0 makes it."""
    file, until = directory / "meeting", time.monotonic() + TIMEOUT_SECONDS
    if rank == 0 and not file.exists():
        (directory / "new").write_bytes(refit.rendezvous.unique_id())
        (directory / "new").rename(file)
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.02)
    return file.read_bytes()


def on_rank(case, plan, rank, device, directory):
    if rank >= plan.source_ranks:
        return worker(plan, rank, device, directory)
    _, side, _, _ = CASES[case]
    torch.distributed.init_process_group("nccl" if ON_GPUS else "gloo", init_method=f"file://{directory}/rendezvous", rank=rank,
                                         world_size=plan.source_ranks)
    parallel_state.initialize_model_parallel(
        side.get("tensor_parallel", 1), side.get("pipeline_parallel", 1), side.get("virtual_pipeline_parallel"),
        expert_model_parallel_size=side.get("expert_parallel", 1), expert_tensor_parallel_size=1)
    with contextlib.nullcontext() if ON_GPUS else CpuForCuda():
        found = trainer(case, plan, rank, device, directory)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return found


def plan_of(case, options, gpus=None):
    """Where there are fewer GPUs than ranks a worker shares the GPU of a trainer."""
    model, side, destination, _ = CASES[case]
    job = {"model": model, "source": MEGATRON | side, "destination": {"layout": "vllm", **destination}, "options": options}
    plan = refit.compile(job)
    if gpus is not None and plan.world_size > gpus:
        replicas = plan.source_ranks // plan.destination_ranks
        plan = refit.compile({**job, "destination": {**job["destination"], "replicas": replicas}, "colocated": True})
    return plan


def run_case(options, family, mesh, directory):
    plan = plan_of((family, mesh), options)
    return table.on_ranks(plan.world_size, directory, lambda rank: on_rank((family, mesh), plan, rank, "cpu", directory))


def run_case_by_torchrun(options, family, mesh, _):
    """On each of torchrun's ranks. Those that the case does not need wait for the others."""
    rank, gpus = int(os.environ["RANK"]), torch.cuda.device_count()
    plan = plan_of((family, mesh), options, gpus)
    run = f"refit-{os.environ['MASTER_PORT']}-{os.environ['TORCHELASTIC_RUN_ID']}-{os.getppid()}"  # all are torchrun's children
    directory = pathlib.Path(tempfile.gettempdir()) / run / f"{family}, {mesh}"
    directory.mkdir(parents=True, exist_ok=True)
    if rank < plan.world_size:
        torch.cuda.set_device(rank % gpus)
        table.write_result(rank, directory, lambda: on_rank((family, mesh), plan, rank, f"cuda:{rank % gpus}", directory))
    until = time.monotonic() + 2 * TIMEOUT_SECONDS
    while time.monotonic() < until and not all((directory / f"rank-{other}.txt").exists() for other in range(plan.world_size)):
        time.sleep(0.05)
    return table.results(plan.world_size, directory)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="*", help="a glob over 'FAMILY: MESH'")
    parser.add_argument("--options", type=json.loads, default={}, help="of the jobs, in JSON")
    parser.add_argument("--gpus", action="store_true", help="this is one of the ranks that torchrun starts")
    arguments = parser.parse_args()
    if ON_GPUS and os.environ["RANK"] != "0":
        sys.stdout = sys.stderr = open(os.devnull, "w")  # rank 0 tells of all
    return table.run(f"Megatron Core {importlib.metadata.version('megatron-core')}, training", CASES,
                     functools.partial(run_case_by_torchrun if ON_GPUS else run_case, arguments.options), arguments.case)


if __name__ == "__main__":
    sys.exit(main())
