"""Perturb, refit, compare: proof that a live worker holds what its plan says.

    report = refit.check(executor, "checkpoint/", live=model)     # while the other ranks run their refit
    print(report)
    assert report.ok
"""
from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional, Union

from refit import contract
from refit.contract import Absent, Reference, Tensor, box_of, is_on_gpu, on_host
from refit.errors import FailedPrecondition, InvalidArgument
from refit.executor import TIMEOUT_SECONDS, Executor
from refit.numerics import Values, decode
from refit.tensors import dtype_name, local_part

SHOWN_MAX = 20


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A part of a tensor that holds something else. `index` is the first element that differs, in the tensor, and
    `param_index` the same element in the param."""

    tensor: str
    param: str
    rank: int
    index: tuple[int, ...]
    param_index: tuple[int, ...]
    found: str
    wanted: str
    wrong: int
    elements: int

    def __str__(self) -> str:
        where = f"is {self.param}{list(self.param_index)}, " if self.param else "is padding, "
        return (f"{self.tensor} of rank {self.rank}: {self.wrong} of {self.elements} elements differ; the first, "
                f"{list(self.index)}, {where}found {self.found}, wanted {self.wanted}")


@dataclasses.dataclass(frozen=True)
class Beyond:
    """A tensor of the worker that the plan does not have. `why` is its rule if a post-hook derives it."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        return f"{self.tensor} {self.dtype} {list(self.shape)}: {self.why}"


@dataclasses.dataclass(frozen=True)
class Report:
    """What `check` found. `str()` tells it all; `to_dict` and `from_dict` are for RPC."""

    rank: int
    refits: int
    perturbed: bool
    tensors: int  # compared
    elements: int
    mismatches: list[Mismatch]
    unchecked: dict[str, str]  # tensors of the plan that could not be compared, and why
    skipped: list[str]  # tensors that the plan leaves alone
    beyond: list[Beyond]

    @property
    def ok(self) -> bool:
        """Every element that the plan writes was compared and is right."""
        return not self.mismatches and not self.unchecked and self.tensors > 0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> "Report":
        def tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
            return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
        return cls(**{**said, "mismatches": [Mismatch(**tuples(entry)) for entry in said["mismatches"]],
                      "beyond": [Beyond(**tuples(entry)) for entry in said["beyond"]]})

    def __str__(self) -> str:
        verdict = "holds what the plan says" if self.ok else "does NOT hold what the plan says" if self.mismatches else \
            "was not compared as a whole"
        how = f"after refit {self.refits}" + (", before which all was overwritten" if self.perturbed else "")
        lines = [f"rank {self.rank} {verdict}: {self.tensors} tensors, {self.elements} elements, {how}"]
        for title, entries in (("differ", [str(mismatch) for mismatch in self.mismatches]),
                               ("not compared", [f"{name}: {why}" for name, why in self.unchecked.items()]),
                               ("left alone by the plan", self.skipped),
                               ("beyond the plan", [str(tensor) for tensor in self.beyond])):
            if entries:
                lines.append(f"{title}: {len(entries)}")
                lines += [f"  {entry}" for entry in entries[:SHOWN_MAX]]
                if len(entries) > SHOWN_MAX:
                    lines.append(f"  and {len(entries) - SHOWN_MAX} more")
        return "\n".join(lines)


def check(executor: Executor, reference: Union[str, "os.PathLike[str]", Mapping[str, Any], Sequence[Mapping[str, Any]]], *,
          live: Any = None, perturb: bool = True, refit: bool = True, derived: Optional[Mapping[str, str]] = None,
          timeout: float = TIMEOUT_SECONDS) -> Report:
    """Overwrites every element that the plan writes on this destination rank, refits, and compares each with the plan.

    `reference` says what the source holds: a checkpoint's directory, a mapping of the checkpoint's names to whole tensors, or
    a list of the tensors of each source rank by the plan's names. Bits are compared. What an element should be is computed
    from the plan's fragments, not by the executor. Needs numpy.

    Collective, as `run` is: the other ranks call `run` meanwhile. `refit=False` compares what the last refit left, alone.
    Of a plan with deltas the refit is dense, unless `perturb` is False.
    Nothing may serve from the weights until it is over: they are garbage before the refit, and torn if it fails, which
    raises as `run` does. A difference raises nothing: it is in the report.

    `live` is all that the worker holds, a module or a mapping. Its tensors are compared; without it those that were bound are.
    What the plan does not have is listed as `beyond`. `derived` maps the last part of such a name to the post-hook that
    makes it.
    """
    plan, rank = executor.plan, executor.rank
    if plan.side(rank) != "destination":
        raise InvalidArgument(f"rank {rank} is a source; check runs on a destination rank, sources run `executor.run()`")
    if not executor.tensors:
        raise FailedPrecondition("the executor is not bound")
    bound = executor.tensors
    failed: Optional[Exception] = None
    try:
        source = _reference(plan, reference)
        known = list(contract.tensors_of(plan, rank))
        if refit and perturb:
            for tensor in known:
                _perturb(tensor, bound[tensor.name])
    except Exception as error:
        failed = error
    if refit:  # also then: the others would wait
        # A delta would leave the perturbed elements as they are.
        executor.run(timeout=timeout, dense=perturb)
    if failed is not None:
        raise failed
    held = bound if live is None else dict(_held(live))
    performed = {hook.name for hook in executor.post_hooks if not hook.by_executor}
    mismatches, unchecked, elements = [], {}, 0
    for tensor in known:
        try:
            if tensor.name not in held:
                raise Absent("the worker does not hold it any more")
            if _memory(held[tensor.name]) != _memory(bound[tensor.name]):
                raise Absent("the worker holds another tensor than the one that was bound: bind again")
            found, compared = _compare(tensor, held[tensor.name], rank, source, performed)
            mismatches += found
            elements += compared
        except Absent as absent:
            unchecked[tensor.name] = str(absent)
    return Report(rank=rank, refits=executor.refits, perturbed=refit and perturb, tensors=len(known) - len(unchecked),
                  elements=elements, mismatches=mismatches, unchecked=unchecked, skipped=sorted(plan.skipped(rank)),
                  beyond=_beyond(executor, held, derived or {}))


def _reference(plan: Any, given: Any) -> Reference:
    if isinstance(given, Reference):
        return given
    if isinstance(given, (str, os.PathLike)):
        return contract.Checkpoint(pathlib.Path(given))
    if isinstance(given, Mapping):
        return contract.Named(given)
    if isinstance(given, Sequence) and all(isinstance(tensors, Mapping) for tensors in given):
        return contract.Sources(plan, given)
    raise InvalidArgument(f"the reference is a {type(given).__name__}; wanted a checkpoint's directory, names and tensors, or "
                          "a list of each source rank's names and tensors")


def _boxes(tensor: Tensor) -> Iterator[tuple[int, Sequence[int], Sequence[int]]]:
    for part in tensor.parts:
        yield part.offset, part.extent, part.stride
    yield from tensor.blank


def _perturb(tensor: Tensor, live: Any) -> None:
    """Inverts each bit that a refit has to write, and no other."""
    import numpy as np

    values = on_host(live)
    flat = values.bits.reshape(-1)
    for box in _boxes(tensor):
        found = box_of(flat, *box)
        np.invert(found, out=found)
    contract.to_device(values, live)


def _compare(tensor: Tensor, live: Any, rank: int, source: Reference, performed: set[str]) -> tuple[list[Mismatch], int]:
    """The differences, and how many elements were compared. Raises Absent."""
    import numpy as np

    values = on_host(live)
    on_gpu = is_on_gpu(live)
    flat = values.bits.reshape(-1)
    mismatches, elements = [], 0
    # A framework's own exp may differ in the last bit; the executor's and additions do not.
    slack = 1 if performed & {"negative-exp", "log-of-negative"} & set(tensor.hooks) else 0
    for part in tensor.parts:
        wanted = source.wanted(part, tensor.dtype, tensor.hooks, on_gpu).bits
        found = box_of(flat, part.offset, part.extent, part.stride)
        elements += found.size
        wrong = found != wanted
        if slack:
            wrong &= np.abs(found.astype("i8") - wanted.astype("i8")) > slack
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            mismatches.append(Mismatch(
                tensor.name, part.param, rank, _index(part.offset, part.stride, first, tensor.shape),
                tuple(a + b for a, b in zip(part.lo, first)), _shown(tensor.dtype, found[first]),
                _shown(tensor.dtype, wanted[first]), int(wrong.sum()), int(found.size)))
    for offset, extent, stride in tensor.blank:
        found = box_of(flat, offset, extent, stride)
        elements += found.size
        if found.any():
            first = tuple(int(i) for i in np.argwhere(found)[0])
            mismatches.append(Mismatch(tensor.name, "", rank, _index(offset, stride, first, tensor.shape), (),
                                       _shown(tensor.dtype, found[first]), "0", int(np.count_nonzero(found)),
                                       int(found.size)))
    return mismatches, elements


def _index(offset: int, stride: Sequence[int], place: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Of an element of a box, in the tensor."""
    import numpy as np

    at = offset + sum(step * i for step, i in zip(stride, place))
    return tuple(int(i) for i in np.unravel_index(at, shape)) if shape else ()


def _shown(dtype: str, bits: Any) -> str:
    """A value and its bits: two values may print alike."""
    import numpy as np

    one = np.atleast_1d(bits)
    return f"{decode(Values(dtype, one))[0]:.9g} (0x{int(one[0]):0{2 * one.itemsize}x})"


def _beyond(executor: Executor, held: Mapping[str, Any], derived: Mapping[str, str]) -> list[Beyond]:
    """What the worker holds under names that the plan does not have."""
    plan, rank = executor.plan, executor.rank
    known = plan.tensors(rank)
    hooks = plan.post_hooks(rank)
    memory = {_memory(tensor): name for name, tensor in executor.tensors.items()}
    found = []
    for name, tensor in held.items():
        if name in known:
            continue
        rule = derived.get(name.rpartition(".")[2])
        # The nearest tensor that has this hook: the one with the longest beginning in common.
        sources = sorted((hook for hook in hooks if hook.name == rule),
                         key=lambda hook: -len(os.path.commonprefix([hook.tensor, name])))
        if sources:
            why = f"derived from {sources[0].tensor} by {rule}: {sources[0].detail}"
        elif _memory(tensor) in memory:
            why = f"the memory of {memory[_memory(tensor)]}"
        else:
            why = "no tensor of the plan"
        local = local_part(tensor)
        found.append(Beyond(name, dtype_name(local.dtype) or str(local.dtype), tuple(int(n) for n in local.shape), why))
    return found


def _memory(tensor: Any) -> Any:
    """Where a tensor begins; equal for two names of one tensor."""
    local = local_part(tensor)
    if hasattr(local, "data_ptr"):
        return local.data_ptr() or id(tensor)
    interface = getattr(local, "__array_interface__", None)
    return id(tensor) if interface is None else interface["data"][0]


def _held(live: Any) -> Iterator[tuple[str, Any]]:
    """All tensors of a module: parameters, buffers, and those that are mere attributes."""
    if isinstance(live, Mapping):
        yield from live.items()
        return
    seen = set()
    for name, tensor in [*live.named_parameters(), *live.named_buffers()]:
        seen.add(id(tensor))
        yield name, tensor
    for path, module in live.named_modules():
        for name, value in vars(module).items():
            if hasattr(value, "data_ptr") and hasattr(value, "shape") and id(value) not in seen:
                seen.add(id(value))
                yield f"{path}.{name}" if path else name, value
