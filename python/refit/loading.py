"""A checkpoint straight into a serving rank's tensors, by a plan: an engine boots without trainers."""
from __future__ import annotations

import math
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional, Union

from refit import contract, dtensors, modules
from refit.errors import BindError, DataLoss, FailedPrecondition, InvalidArgument
from refit.executor import Executor, Hooks, functions_of
from refit.numerics import ARITHMETIC, BITS, Values
from refit.plan import Plan
from refit.tensors import view

SHOWN_MAX = 20


class Loaded(NamedTuple):
    """What `load` wrote, and how much of the files it read for that."""

    tensors: int
    elements: int
    bytes_read: int
    seconds: float


def load(plan: Plan, checkpoint: Union[str, "os.PathLike[str]"], into: Any, *, rank: Optional[int] = None, hooks: Hooks = ()) -> Loaded:
    """Writes what a destination rank of the plan has to hold from a directory of safetensors files, one or several, into its tensors.

    `into`: an executor that is bound; or a torch module or a mapping of the plan's names to tensors, then `rank` and `hooks` are given, as
    `Executor` and `Executor.bind` have them. Not collective: no rank meets another. Each reads its own ranges of the files. Casts,
    quantization and post-hooks are those of a refit. Needs numpy.

    A checkpoint or tensors that are not the plan's raise BindError, with every problem, before anything is written. If reading fails
    after that, DataLoss says so: the tensors are torn then, so load again before the rank serves. Refits of a plan with options.delta are
    by what trainers sent before, so ask for a dense one after a load.
    """
    began = time.monotonic()
    if isinstance(into, Executor):
        if not into.tensors:
            raise FailedPrecondition("the executor is not bound")
        if into.plan != plan:
            raise InvalidArgument(f"the executor has plan {into.plan.digest}; wanted {plan.digest}")
        rank, tensors, functions = into.rank, into.tensors, into.hooks
    else:
        tensors, functions = dict(modules.parameters_of(into) if modules.is_module(into) else into), functions_of(hooks)
        if modules.is_module(into):
            planned = () if rank is None else plan.tensors(rank)
            tensors |= {name: buffer for name, buffer in modules.buffers_of(into).items() if name in planned}
    if rank is None or plan.side(rank) != "destination":
        raise InvalidArgument(f"rank is {rank}; wanted a destination rank of the plan, {plan.source_ranks} to {plan.world_size - 1}")
    source, known = contract.Checkpoint(pathlib.Path(checkpoint)), list(contract.tensors_of(plan, rank))
    problems = _problems(plan, rank, known, tensors, functions, source)
    if problems:
        shown = problems[:SHOWN_MAX] + ([f"and {len(problems) - SHOWN_MAX} more"] if len(problems) > SHOWN_MAX else [])
        raise BindError(f"rank {rank} cannot load {os.fspath(checkpoint)}, {len(problems)} problem{'' if len(problems) == 1 else 's'}\n  "
                        + "\n  ".join(shown))
    elements, at = 0, ""
    try:
        for tensor in known:
            at = tensor.name
            elements += _write(tensor, tensors[at], source, [name for name, function in functions.items() if function is not None])
        for hook in plan.post_hooks(rank):
            function = functions.get(hook.name)
            if function is not None:  # also of arithmetic: a framework's own exp may differ in the last bit
                at = hook.tensor
                function(hook.tensor, tensors[hook.tensor])
    except Exception as error:
        raise DataLoss(f"rank {rank}: {os.fspath(checkpoint)} is loaded in part, it stopped at \"{at}\": {type(error).__name__}: {error}. "
                       "The rank's tensors are torn: load again before it serves") from error
    return Loaded(len(known), elements, source.bytes_read, time.monotonic() - began)


def _problems(plan: Plan, rank: int, known: list[contract.Tensor], tensors: Mapping[str, Any], functions: Mapping[str, Any],
              source: contract.Checkpoint) -> list[str]:
    planned, misplaced = plan.tensors(rank), dtensors.problems(plan, rank, tensors)
    problems = [f'unexpected: "{name}"' for name in tensors if name not in planned]
    problems += [f'the post-hook {name} is not performed: give hooks={{"{name}": function}}' for name in dict.fromkeys(
        hook.name for hook in plan.post_hooks(rank)) if name not in ARITHMETIC and name not in functions]
    said = set()
    for tensor in known:
        if tensor.name not in tensors:
            problems.append(f'missing: "{tensor.name}"')
            continue
        seen = view(tensors[tensor.name])
        problem = seen.problem or misplaced.get(tensor.name, "")
        if not problem and (seen.dtype, seen.shape) != (tensor.dtype, tensor.shape):
            problem = f"is {seen.dtype} {list(seen.shape)}; wanted {tensor.dtype} {list(tensor.shape)}"
        if problem:
            problems.append(f'"{tensor.name}" {problem}')
        for part in tensor.parts:
            name = part.param if part.quantization is None else part.quantization.of
            if name not in said:
                said.add(name)
                found = source.problem(name, part)
                problems += [found] if found else []
    return problems


def _write(tensor: contract.Tensor, live: Any, source: contract.Checkpoint, later: list[str]) -> int:
    """Returns how many elements. `later`: post-hooks that a worker's functions perform."""
    import numpy as np

    size = math.prod(tensor.shape)
    written = sum(math.prod(part.extent) for part in tensor.parts) + sum(math.prod(extent) for _, extent, _ in tensor.blank)
    on_gpu = contract.is_on_gpu(live)
    # Of a GPU's tensor only what stays is copied to the host.
    values = Values(tensor.dtype, np.empty(tensor.shape, BITS[tensor.dtype])) if on_gpu and written == size else contract.on_host(live)
    flat = values.bits.reshape(-1)
    for part in tensor.parts:
        contract.box_of(flat, part.offset, part.extent, part.stride)[...] = source.wanted(part, tensor.dtype, tensor.hooks, on_gpu, later).bits
    for box in tensor.blank:
        contract.box_of(flat, *box)[...] = 0
    contract.to_device(values, live)
    return written
