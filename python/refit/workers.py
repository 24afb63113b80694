"""What the adapters' workers share: a worker's rank, how it binds, its reply, and the error that replies make."""
from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, ParamSpec, TypeVar

from refit import loading, lora, metrics, rendezvous
from refit.errors import BindError, Error, FailedPrecondition, InvalidArgument
from refit.executor import TIMEOUT_SECONDS, Executor
from refit.loading import Loaded
from refit.metrics import logger
from refit.names import shown
from refit.plan import Plan
from refit.requirements import Comparison
from refit.requirements import refusal_of as requirements_refusal

# What a worker says of a request: {"rank", "state", "refits", "version", "delta", "metrics", "error"}. "delta": its DeltaReport of the
# last refit as a dict, or None. "metrics": as `Executor.metrics` has them.
Reply = dict[str, Any]

# How long an answer of an engine is waited for, beyond what the work may take.
GRACE_SECONDS = 60.0


def deadline(timeout: float) -> float:
    """How long an engine's answer may take whose workers have `timeout` for each step: they connect, bind, and refit or gather."""
    return 3 * timeout + 2 * GRACE_SECONDS


class WorkerError(Error):
    """Workers of an engine failed: `replies` are those of all, in the engine's order."""

    code = "ABORTED"

    def __init__(self, message: str, replies: Sequence[Mapping[str, Any]] = ()):
        super().__init__(message)
        self.replies = list(replies)


_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")


def twin_of(driver: Callable[_Given, Coroutine[Any, Any, _Found]],
            run: Callable[[Coroutine[Any, Any, Any], Any], Any] = lambda work, _: at_once(work)) -> Callable[_Given, _Found]:
    """A driver of an engine, named `…_async`, for callers without an event loop. `run` is given its coroutine and the engine."""
    @functools.wraps(driver)
    def twin(*args: _Given.args, **named: _Given.kwargs) -> _Found:
        found: _Found = run(driver(*args, **named), args[0] if args else named["llm"])
        return found

    twin.__name__ = twin.__qualname__ = driver.__name__.removesuffix("_async")
    return twin


def at_once(work: Coroutine[Any, Any, _Found]) -> _Found:
    """What a coroutine returns that waits for nothing: the calls of its engine block. Unlike asyncio.run this works inside a loop, as
    that of a notebook."""
    try:
        work.send(None)
    except StopIteration as end:
        found: _Found = end.value
        return found
    except RuntimeError as error:
        if "no running event loop" not in str(error):
            raise
    work.close()
    raise InvalidArgument("this engine's calls are awaited: call the function's twin for a running event loop, named …_async")


def checked(replies: Sequence[Mapping[str, Any]], error: str = "") -> list[Reply]:
    """The workers' replies. Raises WorkerError if any of them tells of an error, or the engine of this `error`."""
    lines = [f"worker {i} ({reply['state']}): {reply['error']}" for i, reply in enumerate(replies) if reply["error"]]
    if lines:
        raise WorkerError(f"{len(lines)} of {len(replies)} workers failed\n  " + "\n  ".join(lines), replies)
    if error:
        raise WorkerError(error, replies)
    return [dict(reply) for reply in replies]


def reply_of(executor: Optional[Executor], version: Optional[str], error: str) -> Reply:
    if executor is None:
        return {"rank": None, "state": "none", "refits": 0, "version": version, "delta": None, "metrics": {}, "error": error}
    report = executor.delta_report
    return {"rank": executor.rank, "state": executor.state, "refits": executor.refits, "version": version,
            "delta": None if report is None else report._asdict(), "metrics": executor.metrics(), "error": error}


def log_update(engine: str, version: Optional[str], replies: Sequence[Mapping[str, Any]]) -> None:
    """One line about an update of an engine: that of its slowest worker."""
    slowest = max(replies, key=lambda reply: reply.get("metrics", {}).get("seconds", 0.0), default=None)
    if slowest is not None and "seconds" in slowest.get("metrics", {}):
        logger.info("%s, %d workers%s: slowest is rank %s: %s", engine, len(replies), "" if version is None else f', version "{version}"',
                    slowest["rank"], metrics.line(slowest["metrics"]))


def rank_in_plan(plan: Plan, within: int, engine: int, *, tensor_parallel: int, pipeline_parallel: int, data_parallel: int,
                 ranks: int) -> int:
    """The plan's rank of the worker that is number `within` among the `ranks` of an engine."""
    found = engine * ranks + within
    if engine < 0 or found >= plan.destination_ranks or plan.destination_ranks % ranks != 0:
        raise InvalidArgument(
            f"the plan has {plan.destination_ranks} destination ranks; engine {engine} of tensor_parallel {tensor_parallel}, "
            f"pipeline_parallel {pipeline_parallel}, data_parallel {data_parallel} is its ranks {engine * ranks} to "
            f"{(engine + 1) * ranks - 1}")
    return plan.source_ranks + found


def place_in_plan(plan: Plan, find: Callable[[], int], *, ranks: int, parameters: Mapping[str, Any], buffers: Mapping[str, Any],
                  towers: Sequence[str], meeting: Any, job_side: Callable[[], str], without_lora: str,
                  engines: Optional[int] = None, is_inferred: bool = False) -> int:
    """The rank that `find` gives a worker of an engine of `ranks` ranks, one of `engines` if that is known. If the plan is not for
    engines of its mesh it raises InvalidArgument, and ends the meeting of a unique id for all ranks: they would wait for ranks that
    nobody starts. An engine that has LoRA switched on ends it with FailedPrecondition; `without_lora` says how to start it.
    `is_inferred`: `ranks` follows from the plan, so only the tensors tell whether the mesh is the plan's."""
    if refusal := lora.refusal_of([*parameters, *buffers], "this engine", without_lora):
        end_meeting(meeting, refusal)
        raise FailedPrecondition(refusal)
    fits = plan.destination_ranks % ranks == 0  # else an engine is one too many, perhaps
    try:
        rank = find()
        fits = False
        if engines is not None and plan.destination_ranks > engines * ranks:
            raise InvalidArgument(f"the plan has {plan.destination_ranks} destination ranks; engines that join: {engines}, of {ranks} each")
        if plan.destination_ranks != ranks or is_inferred:  # several engines, or ones of a larger mesh
            _refuse_other_tensors(plan, rank, parameters, buffers, towers)
    except InvalidArgument as error:
        if not fits:
            end_meeting(meeting, str(error))
        raise InvalidArgument(f"{error}\n{job_side()}{_planned_side(plan)}") from None
    return rank


def _planned_side(plan: Plan) -> str:
    """The destination that the plan's job has, as `job_side` has the worker's; "" of plans that do not hold it."""
    side = {key.removeprefix("destination."): {"true": True, "false": False}.get(value, int(value) if value.isdigit() else value)
            for key, value in plan.job.items() if key.startswith("destination.")}
    return f'; the plan is for "destination": {json.dumps(side)}' if side else ""


def end_meeting(meeting: Any, reason: str, **place: int) -> None:
    """Ends the meeting of a unique id for all ranks, if it can: what failed has an error of its own. `place`: as
    `rendezvous.end_meeting` has it."""
    if isinstance(meeting, (str, bytes)):
        with contextlib.suppress(Error, ValueError):
            rendezvous.end_meeting(bytes.fromhex(meeting) if isinstance(meeting, str) else meeting, reason, **place)


def _end_after(error: Exception, meeting: Any) -> None:
    """Unless workers replied, who have ended it where they had to."""
    if not getattr(error, "replies", None):
        end_meeting(meeting, f"a worker could not join: {error}")


@contextlib.contextmanager
def ending_the_meeting(meeting: Any) -> Iterator[None]:
    """While a driver or a worker has yet to join: if that fails, the others would wait for ranks that never come."""
    try:
        yield
    except Exception as error:
        _end_after(error, meeting)
        raise


@contextlib.asynccontextmanager
async def ending_the_meeting_async(meeting: Any) -> AsyncIterator[None]:
    """The same, beside what else the event loop does."""
    try:
        yield
    except Exception as error:
        await asyncio.to_thread(_end_after, error, meeting)
        raise


def _refuse_other_tensors(plan: Plan, rank: int, parameters: Mapping[str, Any], buffers: Mapping[str, Any],
                          towers: Sequence[str]) -> None:
    """By what bind refuses, too: a stage of another pipeline has other names and the same shapes."""
    planned, skipped = plan.tensors(rank), plan.skipped(rank)
    for name, tensor in parameters.items():
        shape = tuple(tensor.shape)
        # Without elements: packed, which bind refuses.
        if name in planned and shape != tuple(planned[name].shape) and 0 not in shape:
            raise InvalidArgument(f'the plan is for another mesh: of its rank {rank} "{name}" is {list(planned[name].shape)}, here '
                                  f"{list(shape)}")
    unmoved = tuple(f"{tower}." for tower in towers if tower not in _moved(towers, planned))
    more = [name for name in parameters if name not in planned and not name.startswith(unmoved)]
    missing = [name for name in planned if name not in parameters and name not in buffers and name not in skipped]
    if more or missing:
        says = [f"{text} {shown(names)}" for text, names in (("does not name", more), ("names, and this worker lacks,", missing)) if names]
        raise InvalidArgument(f"the plan is for another mesh, or another model: its rank {rank} {' and '.join(says)}")


@contextlib.contextmanager
def before_bind(executor: Executor, timeout: float) -> Iterator[None]:
    """While a worker finds out what to bind. If that fails it binds nothing, because the other ranks would wait for its part."""
    try:
        yield
    except Exception:
        with contextlib.suppress(Error):
            executor.bind({}, timeout=timeout)
        raise


def bind(executor: Executor, parameters: Mapping[str, Any], buffers: Mapping[str, Any],
         hooks: Mapping[str, Optional[Callable[[str, Any], None]]], *, refusal: str, job_side: str,
         towers: Sequence[str] = (), load_format: Any = "auto", persistent: Callable[[], Iterable[str]] = tuple,
         module: Any = None, timeout: float = TIMEOUT_SECONDS) -> None:
    """Binds a worker's live tensors, also anew. With a `refusal` it binds none and raises it; else an error ends with `job_side`.

    `towers`: modules beside the language model. Those of which the plan names no parameter are left alone.
    `load_format`: the engine's own, text or enum. With "dummy" it filled what `persistent` names, parameters and buffers of a
    checkpoint, with random values; refused is what no refit writes of that. `module`: what holds the tensors, as `Executor.bind` has
    it.
    """
    with before_bind(executor, timeout):
        refusal = refusal or _refusal_of_dummy(executor, parameters, buffers, towers, load_format, persistent)
        held = without_towers(parameters, towers, executor)
    failure: Optional[Error] = None
    try:
        # Also a worker that is refused binds, nothing: the others would wait for it.
        executor.bind({} if refusal else held, buffers, hooks=hooks, module=module, timeout=timeout)
    except Error as error:
        failure = error
    if refusal:  # whatever else failed, as another rank's bind
        raise BindError(f"rank {executor.rank}: {refusal}") from failure
    if isinstance(failure, BindError):
        raise BindError(f"{failure}\n{job_side}") from None
    if failure is not None:
        raise failure


class Place(NamedTuple):
    """Where a worker without an executor stands."""

    plan: Plan
    rank: int


def load(place: Place, checkpoint: str, parameters: Mapping[str, Any], buffers: Mapping[str, Any],
         hooks: Mapping[str, Optional[Callable[[str, Any], None]]], *, refusal: str, job_side: str, towers: Sequence[str] = (),
         load_format: Any = "auto", persistent: Callable[[], Iterable[str]] = tuple) -> Loaded:
    """Writes a worker's live tensors from a checkpoint; the options are those of `bind`."""
    if refusal := refusal or _refusal_of_dummy(place, parameters, buffers, towers, load_format, persistent):
        raise BindError(f"rank {place.rank}: {refusal}")
    planned = place.plan.tensors(place.rank)
    tensors = {**without_towers(parameters, towers, place), **{name: buffer for name, buffer in buffers.items() if name in planned}}
    try:
        return loading.load(place.plan, checkpoint, tensors, rank=place.rank, hooks=hooks)
    except BindError as error:
        raise BindError(f"{error}\n{job_side}") from None


def _refusal_of_dummy(place: Any, parameters: Mapping[str, Any], buffers: Mapping[str, Any], towers: Sequence[str], load_format: Any,
                      persistent: Callable[[], Iterable[str]]) -> str:
    if getattr(load_format, "value", load_format) != "dummy":
        return ""
    known, saved = place.plan.tensors(place.rank), set(persistent())
    filled = [name for name in buffers if name in saved]
    random = left_alone([*parameters, *[name for name in filled if name in known]], towers, place)
    random += [name for name in filled if name not in known]
    return "" if not random else (f'load_format "dummy" filled {shown(random)} with random values, and no refit writes all of that: start '
                                  'the engine with load_format "auto"')


def make_whole(executor: Executor, timeout: float) -> None:
    """Connects before a bind if the last refit failed, as all ranks then must do."""
    if executor.state == "torn":
        executor.connect(timeout)


def run(executor: Executor, refusal: str, *, timeout: float, check: bool, dense: bool, version: Optional[str] = None) -> None:
    """One refit of a worker. With a `refusal` it raises that, after its part: the other ranks would wait. The part fails on a GPU
    whose memory is not that of the bind."""
    try:
        executor.run(timeout=timeout, check=check, dense=dense, version=version)
    except Error as error:
        if not refusal:
            raise
        raise FailedPrecondition(f"{refusal}\n{error}") from error
    if refusal:
        raise FailedPrecondition(refusal)


def left_alone(names: Iterable[str], towers: Sequence[str], executor: Any) -> list[str]:
    """Those of a worker's tensors `names` with elements that no refit writes: of towers that the plan does not move, and what
    options.exclude names."""
    unmoved, excluded = unmoved_towers(towers, executor), executor.plan.left_alone(executor.rank)
    return [name for name in names if name.startswith(unmoved) or name in excluded]


def without_towers(parameters: Mapping[str, Any], towers: Sequence[str], executor: Any) -> Mapping[str, Any]:
    """The parameters but those under modules of `towers` of which the plan names none. Of a tower that it moves it has to name
    all: what it skips, it declares."""
    unmoved = unmoved_towers(towers, executor)
    return {name: tensor for name, tensor in parameters.items() if not name.startswith(unmoved)}


def unmoved_towers(towers: Sequence[str], executor: Any) -> tuple[str, ...]:
    """How names of the others begin."""
    moved = moved_towers(towers, executor)
    return tuple(f"{tower}." for tower in towers if tower not in moved)


def moved_towers(towers: Sequence[str], executor: Any) -> list[str]:
    """The modules of `towers` of which the plan names parameters."""
    return _moved(towers, executor.plan.tensors(executor.rank) if towers else ())


def _moved(towers: Sequence[str], planned: Iterable[str]) -> list[str]:
    return [tower for tower in towers if any(name.startswith(f"{tower}.") for name in planned)]


def holds_moved_tower(parameters: Mapping[str, Any], towers: Sequence[str], executor: Any) -> bool:
    """Whether the worker has parameters of a tower that the plan moves: one that serves language alone has not."""
    moved = tuple(f"{tower}." for tower in moved_towers(towers, executor))
    return any(name.startswith(moved) for name in parameters)


def negative_exp(_: str, tensor: Any) -> None:
    """As vLLM's and SGLang's loaders of Mamba's A compute it: the same bits as a fresh load."""
    torch = importlib.import_module("torch")
    with torch.no_grad():
        tensor.copy_(-torch.exp(tensor.float()))


def side_of(layout: str, version: str, facts: Mapping[str, Any], keys: Iterable[str], orders: Mapping[str, str],
            vision: bool) -> dict[str, Any]:
    """The destination of a job for a worker of these `facts`: those of its `keys` that are no default, the vision tower if a
    plan for the worker moves it (`vision`), and the experts' order."""
    side: dict[str, Any] = {"layout": layout, "version": version}
    side |= {key: facts[key] for key in keys if facts[key] > 1 or facts[key] is True}
    if vision:
        side |= {"vision": True} | ({"mm_encoder_tp_mode": "data"} if facts["mm_encoder_tp_mode"] == "data" else {})
    backends = sorted({orders.get(name, "triton") for name in facts["moe_backends"]} - {"triton"})
    return side | {"moe_backend": backend for backend in backends}


def job_side(side: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """A worker's destination in words."""
    quantized = f', quantization {facts["quantization"]}' if facts["quantization"] else ""
    return f'this worker is "destination": {json.dumps(side)}, dtype {facts["dtype"]}{quantized}'


def refusal_of(requirements: Mapping[str, str], moe_backend: Comparison, expert_placement: Comparison, check_backends: bool) -> str:
    """Why an engine does not satisfy what the plan requires of it; "" if it does. A plan of an earlier build states no backend."""
    stated = {"moe_backend": "triton", **requirements}
    if not check_backends:
        del stated["moe_backend"]
    return requirements_refusal(stated, {"moe_backend": moe_backend, "expert_placement": expert_placement})


def holds_experts(names: Iterable[str]) -> bool:
    """Whether a worker whose tensors have these names has experts in stacks."""
    return any(".experts." in name for name in names)


def moe_backend_refusal(found: Iterable[str], orders: Mapping[str, str], wanted: str, restart: str, experts: bool) -> str:
    """Why a plan for the job's "moe_backend" `wanted` does not fit backends `found` in an engine; "" if it does.

    `orders` has the job's name for the order that each backend keeps; one that is not in it reorders tensors as no plan does.
    `restart` says how to start the engine with the backend that is wanted. `experts`: the worker holds some, so it has a backend.
    """
    found = list(found)
    if not found and experts:
        return ("no layer of this engine tells the backend of its experts, and the plan is for moe_backend "
                f'"{wanted}": {restart}, see that it keeps the order of w13_weight, and pass check_backends=False')
    for name in found:
        order = orders.get(name)
        if order is None:
            return (f"the experts' backend is {name}, which reorders w13_weight and w2_weight after loading as no plan does: "
                    + restart)
        if order != wanted:
            return (f"the experts' backend is {name}; the plan is for moe_backend \"{wanted}\", which has w13_weight in "
                    f"another order: put \"moe_backend\": \"{order}\" into the job's destination, or {restart}")
    return ""
