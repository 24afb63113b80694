"""What the tests of trainers' frameworks share: a tiny job, modules that hold its tensors, ranks that are processes."""

import multiprocessing
import traceback
import types

import torch
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

import refit

CONFIG = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 256, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TIMEOUT_SECONDS = 120


# Of jobs whose refits send only what changed, between processes on CPUs too.
DELTAS = {"delta": {"dense_every": 0}, "peer": "staged", "bucket_bytes": 1 << 16}


def plan_of(trainers, options=None, **engines):
    return refit.compile({"model": CONFIG, "source": {"layout": "fsdp", "data_parallel": trainers},
                          "destination": {"layout": "vllm", **engines}, "options": options or {}})  # fmt: skip


def module_of(plan, rank):
    """A module with the rank's tensors as its parameters, all zero."""
    root = torch.nn.Module()
    for name, info in plan.tensors(rank).items():
        *path, leaf = name.split(".")
        inner = root
        for part in path:
            if part not in inner._modules:
                inner.add_module(part, torch.nn.Module())
            inner = inner._modules[part]
        inner.register_parameter(leaf, torch.nn.Parameter(torch.zeros(info.shape, dtype=DTYPES[info.dtype]), requires_grad=False))
    return root


def fill(module, rank, step):
    """What a trainer's rank holds after a step; half a step changes few elements."""
    generator = torch.Generator().manual_seed(1000 * int(step) + rank)
    for name, tensor in module.named_parameters():
        # FSDP's shards are all of one tensor's rows: no two ranks hold the same element.
        values = torch.randn(tensor.shape, generator=generator)
        if step != int(step):
            values.reshape(-1)[::100] += 1
        tensor.data.copy_(values.to(tensor.dtype))


def sharded(module, ranks):
    """As FSDP2 has them: the module's parameters as DTensors whose local parts are those of `module`. `ranks`: of the mesh."""
    mesh = DeviceMesh("cpu", ranks)
    root = torch.nn.Module()
    for name, local in module.named_parameters():
        *path, leaf = name.split(".")
        inner = root
        for part in path:
            inner = getattr(inner, part, None) or inner.register_module(part, torch.nn.Module()) or getattr(inner, part)
        inner.register_parameter(leaf, torch.nn.Parameter(DTensor.from_local(local.detach(), mesh, [Shard(0)], run_check=False),
                                                          requires_grad=False))
    return root


def told(action):
    """What `action` returns, or the error that it raises, as text."""
    try:
        return action()
    except (refit.Error, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def differences(plan, module, rank, step):
    """Between what a worker holds and what the plan makes of the trainers' tensors of a step."""
    sources = []
    for source in range(plan.source_ranks):
        held = module_of(plan, source)
        fill(held, source, step)
        sources.append(dict(held.named_parameters()))
    from refit import contract
    reference, live, wrong, compared = contract.Sources(plan, sources), dict(module.named_parameters()), [], 0
    for tensor in contract.tensors_of(plan, rank):
        flat = contract.on_host(live[tensor.name]).bits.reshape(-1)
        for part in tensor.parts:
            box = contract.box_of(flat, part.offset, part.extent, part.stride)
            compared += box.size
            if (box != reference.wanted(part, tensor.dtype, tensor.hooks, on_gpu=False).bits).any():
                wrong.append(f"step {step}: {tensor.name}: {part.param}")
    return wrong if compared else ["nothing was compared"]


def vllm_facts(rank=0, tensor_parallel=1):
    """The configuration of a vLLM engine's worker, as refit.vllm reads it."""
    parallel = types.SimpleNamespace(tensor_parallel_size=tensor_parallel, pipeline_parallel_size=1, data_parallel_size=1,
                                     data_parallel_index=0, world_size=tensor_parallel, rank=rank)  # fmt: skip
    return types.SimpleNamespace(parallel_config=parallel, model_config=types.SimpleNamespace(dtype=torch.bfloat16, quantization=None))


class Rank:
    """A process that runs `serve(pipe)`; what it raises, `ask` raises here."""

    def __init__(self, serve, *arguments):
        fork = multiprocessing.get_context("fork")  # the framework is imported once
        self._pipe, theirs = fork.Pipe()

        def guarded():
            torch.set_num_threads(1)
            try:
                serve(theirs, *arguments)
            except BaseException:
                theirs.send(RuntimeError(traceback.format_exc()))

        self._process = fork.Process(target=guarded, daemon=True)
        self._process.start()

    def tell(self, *message):
        self._pipe.send(message)

    def answer(self):
        if not self._pipe.poll(TIMEOUT_SECONDS):
            raise TimeoutError("a rank does not answer")
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self):
        self._pipe.send(None)
        self._process.join(TIMEOUT_SECONDS)
        assert self._process.exitcode == 0, self._process.exitcode
