"""What the adapters' trainers share: their live shards, their part of an update, an engine that is driven beside it."""
from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

from refit.errors import DeadlineExceeded, Error, FailedPrecondition, InvalidArgument
from refit.executor import DeltaReport, Executor, join
from refit.plan import Plan
from refit.tensors import WRAPPER, local_part, view, words_view
from refit.workers import GRACE_SECONDS, end_meeting

# How long a trainer's part may take once the engine's has failed. Most end by themselves: all ranks of a refit hear of an error.
GIVE_UP_SECONDS = 5.0

# Buffers of Megatron that training keeps for itself, though they are persistent.
UNFED = ("local_tokens_per_expert",)

# The attribute of a parameter that is its bitmap of changes, as `Executor.bind` takes it.
CHANGES = "refit_changes"
# That of a live shard whose parameter is not trained.
FROZEN = "refit_frozen"
# Classes of Transformer Engine for parameters in fp8: of its releases 2 and 1.
QUANTIZED = {"QuantizedTensor", "Float8Tensor"}


def live_shards(module: Any) -> Iterator[tuple[str, Any]]:
    """Of an FSDP2 module, or of Megatron's list of model chunks, this rank's tensors by the plan's names; DTensors as such.
    They have the `refit_changes` of their parameters. Those of parameters that are not trained have `refit_frozen`.
    Of Megatron all ranks call this at once: it gathers what the optimizer left to the next forward pass."""
    if not isinstance(module, (list, tuple)):
        module = [module]
    for chunk in module:
        _refuse_unless_in_place(chunk)
    for chunk in module:
        # With overlap_param_gather an optimizer's step writes a part of the parameters. A hook of the next forward pass gathers the
        # others. It may be off now, as in a framework's first step.
        if getattr(chunk, "use_forward_hook", False):
            chunk.start_param_sync(force_sync=True)
    for number, chunk in enumerate(module):
        while hasattr(chunk, "module"):  # DDP, Float16Module
            chunk = chunk.module
        persistent = set(chunk.state_dict())
        prefix = f"vp_stage.{number}." if len(module) > 1 else ""
        frozen = {id(parameter) for parameter in chunk.parameters() if not parameter.requires_grad}
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
            name = name.replace(WRAPPER, "")
            if name in persistent and not name.endswith(UNFED):
                shard = tensor.detach()
                if id(tensor) in frozen:
                    setattr(shard, FROZEN, True)
                if hasattr(tensor, CHANGES):
                    setattr(shard, CHANGES, getattr(tensor, CHANGES))
                yield prefix + name, shard


def _refuse_unless_in_place(chunk: Any) -> None:
    """Refuses a Megatron chunk whose parameters do not hold the values that it trains. Gathering would damage these, so this comes
    first."""
    config = getattr(chunk, "ddp_config", None)
    if config is None:
        return
    if getattr(config, "use_megatron_fsdp", False):
        raise FailedPrecondition("Megatron FSDP trains flat buffers, and its module has copies of a part of them; Refit moves a module's "
                                 "own parameters: set use_megatron_fsdp=false")
    for name, parameter in chunk.named_parameters():
        if QUANTIZED & {base.__name__ for base in type(parameter).__mro__}:
            raise FailedPrecondition(f'"{name}" is a {type(parameter).__name__}: Megatron keeps it in fp8; Refit moves it in bf16: set '
                                     "fp8_param=false, and fp8_param_gather=false of its DistributedDataParallelConfig")
        local = local_part(parameter)
        if local.numel() > 0 and local.untyped_storage().size() == 0:
            raise FailedPrecondition(f'"{name}" has no memory: the parameters were moved to the CPU. Keep parameters on the GPU')


def here(device: Any) -> tuple[Any, Any]:
    """The device that this thread means by `device`, and its stream there; None on a CPU. torch's are each thread's own."""
    kind, _, number = str(device).partition(":")
    if kind == "cpu":
        return device, None
    cuda = importlib.import_module("torch").cuda
    ordinal = int(kind if kind.isdigit() else number or cuda.current_device())
    return f"cuda:{ordinal}", cuda.current_stream(ordinal)


def current(device: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes this thread's current GPU the one of `device`, as `here` returns it, for a while. A new thread, as an event loop's,
    has the first GPU, and torch and NCCL go by it."""
    if not str(device).startswith("cuda:"):
        return contextlib.nullcontext()
    guard: contextlib.AbstractContextManager[Any] = importlib.import_module("torch").cuda.device(device)
    return guard


def first_of(metadata: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What rank 0 said, of what each rank said of itself; refused if one has another plan."""
    first = metadata[0]
    for rank, said in enumerate(metadata):
        if said["plan"] != first["plan"]:
            raise InvalidArgument(f"rank {rank} has plan {said['plan']}, rank 0 has {first['plan']}")
    return first


def addresses_of(tensors: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, int]:
    """Where the tensors lie, and their bitmaps of changes, which go by the tensor's name and CHANGES."""
    addresses = {name: view(tensor).address for name, tensor in tensors.items()}
    return addresses | {f"{name}.{CHANGES}": words_view(bits).address for name, bits in changes.items()}


class Sender:
    """A trainer's part of updates. It joins at the first, and at the one after a failed update, by another meeting."""

    # How the framework keeps tensors where they are, for the error.
    keep_them_there = "keep parameters on the GPU"

    def __init__(self, plan: Plan, *, timeout: float, check: bool, snapshot_on_host: bool = False):
        self.plan = plan
        self._timeout, self._check, self._snapshot_on_host = timeout, check, snapshot_on_host
        self._executor: Optional[Executor] = None
        self._meeting: Optional[bytes] = None
        self._joining: Optional[bytes] = None
        self._bound: dict[str, int] = {}
        self._dense = False
        self._planned: Optional[frozenset[str]] = None

    @property
    def joined(self) -> bool:
        return self._executor is not None

    @property
    def delta_report(self) -> Optional[DeltaReport]:
        """How this trainer's last refit went, as `Executor.delta_report` tells it; None after an update that failed."""
        return None if self._executor is None else self._executor.delta_report

    def ask_dense(self) -> None:
        """Makes the next update of a plan with options.delta send all, on all ranks. One trainer's request is enough."""
        self._dense = True

    def take(self, weights: Iterable[tuple[str, Any]], rank: int, meeting: bytes) -> dict[str, Any]:
        """The tensors that an iterator of a framework yields. If it fails no rank is left waiting: those that have met end with this
        one, and a meeting of others ends."""
        try:
            return dict(weights)
        except BaseException as error:
            self.close()
            if meeting != self._meeting:
                end_meeting(meeting, f"rank {rank}: {error}", rank=rank, world_size=self.plan.world_size)
            raise

    def give_up(self, error: BaseException) -> None:
        """On another thread than `send`: ends what that waits in, because the engine failed."""
        executor = self._executor
        if executor is not None:
            executor.interrupt()
        elif self._joining is not None:
            end_meeting(self._joining, f"the engine failed: {error}")

    def send(self, rank: int, meeting: bytes, tensors: Mapping[str, Any], device: Any, stream: Any, bind: bool = False) -> None:
        """One refit from `tensors`, this rank's live shards. `meeting`: a unique id that all ranks have. `bind`, the same on all ranks:
        if they have met already, bind anew before, because engines slept. A tensor's
        attribute `refit_changes` is its bitmap of changes. One that is `refit_frozen`, as of a vision tower, is left out if the
        plan does not name it. On any thread, one at a time."""
        with current(device):
            self._send(rank, meeting, tensors, device, stream, bind)

    def _send(self, rank: int, meeting: bytes, tensors: Mapping[str, Any], device: Any, stream: Any, bind: bool) -> None:
        frozen = {name for name, tensor in tensors.items() if getattr(tensor, FROZEN, False)}
        if frozen:
            left_out = frozen - self._names(rank)
            tensors = {name: tensor for name, tensor in tensors.items() if name not in left_out}
        if meeting != self._meeting:  # the last update failed elsewhere, perhaps not here
            self.close()
        changes = {name: getattr(tensor, CHANGES) for name, tensor in tensors.items() if hasattr(tensor, CHANGES)}
        addresses = addresses_of(tensors, changes)
        try:
            if self._executor is not None:
                self._check_unmoved(rank, addresses)
                if bind:
                    self._executor.bind(tensors, changes=changes, timeout=self._timeout)
            else:
                self._joining = meeting
                self._executor = join(self.plan, rank, tensors, unique_id=meeting, device=device, changes=changes,
                                      snapshot_on_host=self._snapshot_on_host, timeout=self._timeout)
                self._meeting, self._bound = meeting, addresses
            dense, self._dense = self._dense, False  # what is asked for while it runs is for the next
            self._executor.run(stream, timeout=self._timeout, check=self._check, dense=dense)
        except BaseException:
            # No rank is left waiting: they end with this one. The next update is by another meeting, so dense.
            self.close()
            raise

    def _names(self, rank: int) -> frozenset[str]:
        """The plan's tensors of this rank. Kept: listing those of a large model takes a tenth of a second."""
        if self._planned is None:
            self._planned = frozenset(self.plan.tensors(rank))
        return self._planned

    def _check_unmoved(self, rank: int, addresses: Mapping[str, int]) -> None:
        missing, unexpected = sorted(self._bound.keys() - addresses.keys()), sorted(addresses.keys() - self._bound.keys())
        if missing or unexpected:
            raise FailedPrecondition(f"rank {rank} yields {len(addresses)} tensors, at the first update {len(self._bound)}: "
                                     f"missing {missing[:3]}, unexpected {unexpected[:3]}")
        moved = [name for name in addresses if addresses[name] != self._bound[name]]
        if moved:
            raise FailedPrecondition(f'"{moved[0]}" and {len(moved) - 1} more tensors are at other addresses than at the first '
                                     f"update; Refit reads the trainer's own memory: {self.keep_them_there}")

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()
            self._executor = None
        self._joining = None


def together(tell: Callable[[], Any], own_part: Callable[[], Any], timeout: float, give_up: Callable[[BaseException], None]) -> None:
    """A trainer's own part of a collective, while a thread tells an engine's workers theirs, which have the same `timeout`.
    `give_up` ends the own part, on that thread: it is called if the engine has failed and the own part does not end.

    Raises the error of the own part, which then also says that of the workers and has it as its cause; else theirs.
    """
    told: list[Optional[BaseException]] = []
    done = threading.Event()

    def guarded() -> None:
        try:
            tell()
        except BaseException as error:
            told.append(error)
            while not done.wait(GIVE_UP_SECONDS):
                give_up(error)
        else:
            told.append(None)

    thread = threading.Thread(target=guarded, name="refit workers", daemon=True)
    thread.start()
    failed: Optional[Exception] = None
    try:
        own_part()
    except Exception as error:
        failed = error
    finally:
        done.set()
    thread.join(min(timeout + GRACE_SECONDS, threading.TIMEOUT_MAX))
    _raise_either(failed, told, timeout)


async def together_async(tell: Coroutine[Any, Any, Any], own_part: Callable[[], Any], timeout: float,
                         give_up: Callable[[BaseException], None]) -> None:
    """The same where a coroutine tells the workers; the own part is done on a thread."""
    telling = asyncio.ensure_future(tell)
    own = asyncio.ensure_future(asyncio.to_thread(own_part))
    failed: Optional[Exception] = None
    await asyncio.wait([telling, own], return_when=asyncio.FIRST_COMPLETED)
    while not own.done() and telling.done() and (error := _error_of(telling)) is not None:
        await asyncio.wait([own], timeout=GIVE_UP_SECONDS)
        if not own.done():
            await asyncio.to_thread(give_up, error)
    try:
        await own
    except Exception as error:
        failed = error
    done, _ = await asyncio.wait([telling], timeout=timeout + GRACE_SECONDS)
    if not done:
        telling.cancel()
    _raise_either(failed, [_error_of(telling)] if done else [], timeout)


def _error_of(task: asyncio.Future[Any]) -> Optional[BaseException]:
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def _raise_either(failed: Optional[Exception], told: list[Optional[BaseException]], timeout: float) -> None:
    """`failed`: the own part's error. `told`: what became of the workers' part, nothing if it has not ended."""
    theirs = told[0] if told else None
    if failed is not None:
        if isinstance(failed, Error) and theirs is not None:
            failed.message += f"\nthe engine: {type(theirs).__name__}: {theirs}"
        raise failed from theirs
    if not told:
        raise DeadlineExceeded(f"this trainer's part is done, but the engine has not answered {timeout + GRACE_SECONDS:g} s later")
    if theirs is not None:
        raise theirs
