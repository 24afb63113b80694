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
# Updates with them: the step, whether one trainer asks for a dense update, and what the trainers must report: what changed, in
# percent, and the rung. After a step half a step changes 1 % of the elements.
DELTA_UPDATES = [(1, False, None, 0), (1.5, False, 1, 64), (2, False, 100, 1), (2.5, False, 1, 64), (2.5, False, 0, 128),
                 (2.5, True, None, 0), (3, True, None, 0), (3.5, False, 1, 64)]  # fmt: skip
# Of jobs whose trainers mark what changed.
BITMAPS = {**DELTAS, "delta": {"changes": "bitmap", "dense_every": 0}}
BITMAP_UPDATES = [(1, False, None, 0), (1.5, False, 1, 64), (2, True, None, 0)]


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


def check_reports(reports, update):
    """What trainers say of an update of DELTA_UPDATES or BITMAP_UPDATES."""
    _, dense, percent, rung = update
    for report in reports:
        assert (report.is_delta, report.rung) == (percent is not None, rung), (update, report)
        assert not dense or report.why_dense.endswith("asked for it"), (update, report)
        assert percent is None or abs(100 * report.change_rate - percent) < 1, (update, report)
        assert (report.stored_bytes < report.dense_bytes / 2) == (rung > 1), (update, report)


def with_bitmaps(module):
    """Gives the module's parameters bitmaps of changes, which `fill` marks."""
    for tensor in module.parameters():
        tensor.refit_changes = torch.zeros((tensor.numel() + 31) // 32, dtype=torch.int32)
    return module


def mark(bits, before, after):
    """Sets the bits of the elements that changed."""
    changed = torch.zeros(32 * len(bits), dtype=torch.int64)
    changed[:before.numel()] = (before.reshape(-1).view(torch.int16) != after.reshape(-1).view(torch.int16))
    bits |= (changed.reshape(-1, 32) << torch.arange(32)).sum(1).to(torch.int32)


def fill(module, rank, step):
    """What a trainer's rank holds after a step; half a step changes few elements."""
    generator = torch.Generator().manual_seed(1000 * int(step) + rank)
    for name, tensor in module.named_parameters():
        # FSDP's shards are all of one tensor's rows: no two ranks hold the same element.
        values = torch.randn(tensor.shape, generator=generator)
        if step != int(step):
            values.reshape(-1)[::100] += 1
        values = values.to(tensor.dtype)
        if hasattr(tensor, "refit_changes"):
            mark(tensor.refit_changes, tensor.data, values)
        tensor.data.copy_(values)


def sharded(module, ranks):
    """As FSDP2 has them: the module's parameters as DTensors whose local parts are those of `module`. `ranks`: of the mesh."""
    mesh = DeviceMesh("cpu", ranks)
    root = torch.nn.Module()
    for name, local in module.named_parameters():
        *path, leaf = name.split(".")
        inner = root
        for part in path:
            inner = getattr(inner, part, None) or inner.register_module(part, torch.nn.Module()) or getattr(inner, part)
        parameter = torch.nn.Parameter(DTensor.from_local(local.detach(), mesh, [Shard(0)], run_check=False), requires_grad=False)
        if hasattr(local, "refit_changes"):
            parameter.refit_changes = local.refit_changes
        inner.register_parameter(leaf, parameter)
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
                                     data_parallel_index=0, world_size=tensor_parallel, rank=rank,
                                     worker_cls="vllm.v1.worker.gpu_worker.Worker")  # fmt: skip
    return types.SimpleNamespace(parallel_config=parallel, load_config=types.SimpleNamespace(load_format="auto"),
                                 model_config=types.SimpleNamespace(dtype=torch.bfloat16, quantization=None, enable_sleep_mode=False,
                                                                    enable_nccl_comm_suspend=False, sleep_mode_backend="forgetful",
                                                                    sleep_preserve_parameter_names=[]))  # fmt: skip


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
