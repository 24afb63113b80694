"""One rank's replay of a plan."""
from __future__ import annotations

import contextlib
import math
import re
import sys
import threading
import time
import weakref
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Optional, Sequence, Union

from refit import _core, dtensors, logs, metrics, modules
from refit.errors import Aborted, BindError, Error, FailedPrecondition, InvalidArgument, Unavailable
from refit.plan import Plan, PostHook
from refit.rendezvous import Rendezvous, from_unique_id
from refit.tensors import View, bitmap_view, locator, view, words_view

TIMEOUT_SECONDS = 600.0

# The post-hooks that a worker performs: names, or functions of a tensor's name and the tensor.
Hooks = Union[Iterable[str], Mapping[str, Optional[Callable[[str, Any], None]]]]


class Digest(NamedTuple):
    """A digest of the values that tensors hold, whatever their layout: equal for two sides, replicas or plans that hold
    the same bits, and count each element once. `+` adds what another rank, or another param, counted."""

    sum: int  # below 2**61 - 1
    elements: int

    def __add__(self, other: Any) -> "Digest":  # instead of a tuple's
        if not isinstance(other, Digest):
            return NotImplemented
        return Digest((self.sum + other.sum) % (2**61 - 1), self.elements + other.elements)

    def __radd__(self, other: Any) -> "Digest":  # for sum()
        return self if other == 0 else NotImplemented


class DeltaReport(NamedTuple):
    """How a refit of a plan with options.delta went. The versions are those of all ranks, the rest is what this rank sent in
    staged rounds, because direct rounds always move everything. docs/delta.md says when a delta pays."""

    is_delta: bool
    why_dense: str  # a clause; "" if is_delta
    base_version: int  # of a delta: what it changed
    version: int  # what all ranks hold now
    elements: int  # that this rank sends in staged rounds and a delta may leave out, once for each receiver: 0 on a destination
    changed_elements: int  # of these; 0 of a dense refit, which does not count them
    stored_bytes: int  # sent in staged rounds
    dense_bytes: int  # what a dense refit sends in them
    move_seconds: float  # of the rounds, with waits for others, and of choosing a rung
    keep_seconds: float  # behind the rounds, for the next refit
    # Of a delta: staged messages had room for one changed element of this many; 1: they were sent whole. 0: all was sent.
    rung: int = 0
    # What the refit's parts took, each on its stream and added up by kind. Parts overlap, so that the sums may exceed
    # move_seconds.
    find_seconds: float = 0.0  # of a delta: what changed, for staged rounds
    encode_seconds: float = 0.0  # staged messages; those that are whole: to pack
    wire_seconds: float = 0.0  # with waits for others; and what this rank moves in direct rounds
    apply_seconds: float = 0.0  # to store what staged rounds received
    check_seconds: float = 0.0  # digests, and their comparison with waits for others; 0: not checked
    # Agreeing with the other ranks, with waits for them: before the rounds on the version, the rung and that all can check,
    # behind them on the end.
    agree_seconds: float = 0.0
    total_seconds: float = 0.0  # from the call of run to the end of wait, with what the caller did between

    @property
    def change_rate(self) -> Optional[float]:
        """Of the elements that a delta may leave out. None where it was not counted: of a dense refit, and on destinations."""
        return self.changed_elements / self.elements if self.is_delta and self.elements else None


class Executor:
    """connect -> bind -> run, as often as wanted -> close. For one thread at a time.

    `device` is where this rank's tensors are: "cpu", "cuda", "cuda:1", an ordinal, or a torch.device. Ranks that are
    threads of one process on the CPU share a `fabric` (LocalFabric); ranks that are processes meet at a `rendezvous`.
    UCX carries what is on the CPU, NCCL what is on GPUs. NCCL is taken from the process: PyTorch's copy, never a second
    one.

    `counts`: an earlier executor's, whose counts `metrics` continues.
    """

    def __init__(self, plan: Plan, rank: int, *, device: Any = "cpu", fabric: Optional[_core.LocalFabric] = None,
                 rendezvous: Optional[Rendezvous] = None, counts: Optional[dict[str, float]] = None):
        _check_plan(plan)
        ordinal = _cuda_ordinal(device)
        if fabric is not None and ordinal is not None:  # before a GPU is asked for
            raise InvalidArgument("a local fabric carries host memory only, the device is a GPU")
        logs.start()
        self.plan = plan
        self.rank = rank
        self.device = "cpu" if ordinal is None else f"cuda:{ordinal}"
        self._core = _core.Executor(plan._file, rank, ordinal, fabric, rendezvous)
        self._locators: list[Callable[[], int]] = []  # of what is bound, which they keep alive
        self._bound: dict[str, Any] = {}  # the same, by name
        self._held: Optional[modules.Held] = None  # where a module has it
        self._changes: Mapping[str, Any] = {}  # the bitmaps, which are kept alive
        self._functions: dict[str, Optional[Callable[[str, Any], None]]] = {}  # of the post-hooks, since bind
        self._hook_error: Optional[BaseException] = None
        self._meter = metrics.Meter(rank, {} if counts is None else counts)

    def connect(self, timeout: float = TIMEOUT_SECONDS) -> "Executor":
        """Meets the other ranks and agrees on the plan; collective. After a failed run it makes the transport whole
        again."""
        began = time.monotonic()
        try:
            self._core.connect(timeout)
        finally:
            self._meter.bound(time.monotonic() - began)
        return self

    def replace(self, plan: Plan, rank: int, meeting: Any, *, timeout: float = TIMEOUT_SECONDS) -> "Executor":
        """Goes on with another plan, as when an engine was lost or one has come; collective over the ranks of that plan. Those of the
        old plan that stay call this; newcomers `join`. `rank` is this one's in the new plan, `meeting` a unique id of those ranks, or a
        LocalFabric.

        What was bound stays bound, if the new plan wants these tensors; what is torn is torn until a refit succeeds. What peers and
        this rank map for both plans stays mapped. No tensor is looked at again: bind if one moved, and give a trainer the rank whose
        shards it holds. The next refit of a plan with options.delta is dense, and `refits` begins anew.

        After an error `plan` and `state` tell how far it came. If the executor has the new plan it is not bound: replace again, with a
        plan of those that are left and a new meeting, or bind. FailedPrecondition that names ranks which may still use this rank's
        tensors: end their processes first. Destroy CUDA graphs that captured refits before the call.
        """
        _check_plan(plan)
        fabric, rendezvous = _meeting_of(plan, rank, meeting)
        misplaced = dtensors.problems(plan, rank, self._bound)
        if misplaced:
            raise BindError(_refusal(rank, [f'"{name}" {problem}' for name, problem in misplaced.items()]))
        began = time.monotonic()
        try:
            self._core.replace(plan._file, rank, fabric, rendezvous, timeout)
        finally:
            self._meter.bound(time.monotonic() - began)
            if self._core.has_plan(plan._file, rank):
                self.plan, self.rank, self._meter.rank = plan, rank, rank
        self._meter.tell(self._core.notices)
        return self

    def bind(self, tensors: Any, buffers: Optional[Mapping[str, Any]] = None, *, hooks: Hooks = (),
             changes: Optional[Mapping[str, Any]] = None, module: Any = None, timeout: float = TIMEOUT_SECONDS) -> "Executor":
        """Takes this rank's tensors, by name, and of `buffers` those that the plan names; connects first if need be. Of a DTensor
        the local part is bound. `tensors` may be a torch module: its parameters, and its buffers unless they are given.

        `module` is the one that holds the tensors, where `tensors` is a part of its parameters. Of a module each `run` sees
        whether it still holds what is bound.

        The first bind is collective, and so is every one of a plan with direct rounds. Bind again when tensors move.
        Raises BindError with every problem: missing, unexpected or duplicate names, wrong dtype, shape, device or size,
        not contiguous, overlapping. Tensors that the plan skips as a whole are left alone, whatever they are: a worker
        may have made them anew, or not at all.

        `hooks` says which of the plan's post-hooks (`Plan.post_hooks`) this worker performs. Functions,
        `{name: function(tensor_name, tensor)}`, are called by `wait` for each tensor once the refit has written all; an
        exception fails the refit on all ranks. A name without a function, `[name]` or `{name: None}`, is the caller's promise
        to do it after `wait`, before it serves. The executor performs arithmetic hooks that are not named. Any other
        that is not named is a BindError, and so is a name that is no post-hook. Names of post-hooks that the plan does
        not have are passed over.

        `changes`, on a source rank of a plan with options.delta "bitmap", gives bitmaps by the names of tensors: 32-bit
        words where the tensor is, (elements + 31) // 32 of them. Set bit i % 32 of word i // 32 when element i changes,
        in work that comes before `run` on its stream; a refit clears them. Bitmaps stay in place until the next bind.
        Tensors without one are sent whole each time. `cast_and_mark` sets bits.
        """
        functions = functions_of(hooks)
        if modules.is_module(tensors):
            module = tensors
            tensors, buffers = modules.parameters_of(module), modules.buffers_of(module) if buffers is None else buffers
        if self.state == "loaded":
            self.connect(timeout)
        changes = {} if changes is None else changes
        unusable = (_unusable("tensors", tensors) + _unusable("buffers", {} if buffers is None else buffers)
                    + _unusable("changes", changes))
        unusable = unusable or [f'changes: "{name}" is none of the tensors' for name in changes
                                if name not in tensors and name not in (buffers or {})]
        if unusable:
            tensors, buffers, changes = {}, None, {}  # also refused, so that the others hear of it
        names, views, locators = [], [], []
        bound: dict[str, Any] = {}
        wanted = self.plan.tensors(self.rank) if buffers else {}
        named = [(name, buffer) for name, buffer in (buffers or {}).items() if name in wanted]
        skipped = self.plan.skipped(self.rank)
        misplaced = dtensors.problems(self.plan, self.rank, {**tensors, **dict(named)})
        bitmaps = []
        for name, tensor in [*tensors.items(), *named]:
            if name in skipped:
                continue
            seen = view(tensor)
            # An array interface does not say which GPU: the device finds out.
            if not seen.problem and seen.device not in (self.device, self.device.split(":")[0]):
                seen = seen._replace(address=0, problem=f"is on {seen.device}; wanted {self.device}")
            if not seen.problem and name in misplaced:
                seen = seen._replace(address=0, problem=misplaced[name])
            bound[name] = tensor
            names.append(name)
            bitmaps.append(0)
            if name in changes and not seen.problem:
                bits = bitmap_view(changes[name], math.prod(seen.shape))
                bitmaps[-1] = bits.address
                problem = bits.problem
                if not problem and bits.device not in (self.device, self.device.split(":")[0]):
                    problem = f"is on {bits.device}; wanted {self.device}"
                if problem:
                    seen = seen._replace(address=0, problem=f"has a wrong bitmap of changes: {problem}")
            views.append(seen)
            locators.append(locator(tensor))
        problems = [f'"{name}" {seen.problem}' for name, seen in zip(names, views) if seen.problem]
        began = time.monotonic()
        try:
            # Also with a problem: the others would wait for this rank. A tensor without an address is refused there.
            self._core.bind([_argument(*given) for given in zip(names, views, bitmaps)], timeout,
                            self._performers(functions))
        except BindError as error:
            if unusable:
                raise BindError(_refusal(self.rank, unusable)) from None
            message = _with_dtype(_with(problems, error, self.rank), self.plan, self.rank, views)
            raise BindError(_with_remedy(message, self.plan, self.rank, names)) from None
        finally:
            self._meter.bound(time.monotonic() - began)
        self._locators = locators
        self._bound = bound
        self._held = None if module is None else modules.Held(module, bound)
        self._changes = dict(changes)
        self._functions = functions
        if unusable or problems:  # of a rank without tensors; of a tensor without elements, whose address nobody asks for
            raise BindError(_refusal(self.rank, unusable or problems))
        self._meter.tell(self._core.notices)
        return self

    def run(self, stream: Any = None, *, tensors: Optional[Mapping[str, Any]] = None, wait: bool = True, check: bool = False,
            dense: bool = False, direct_multiprocessors: int = 0, version: Optional[str] = None,
            timeout: float = TIMEOUT_SECONDS) -> "Executor":
        """One refit; collective. Returns when the new weights are in place on all ranks, or, with `wait=False`, when
        all is enqueued: call `wait()` then.

        `stream` is a torch.cuda.Stream or a cudaStream_t as an int; default: torch's current stream. The interpreter's
        lock is free meanwhile. A tensor that moved since `bind` is an error before any byte moves. After an error the
        destination is torn: do not serve until a later run succeeds. `connect()`, then `run()`; after DataLoss `run()`
        alone.

        A tensor that took a bound one's place, as `load_state_dict(assign=True)` makes them, is the same error as one that moved:
        if `bind` was given the module, or if `tensors`, as `bind` has them, are this rank's tensors now. Otherwise it is not seen:
        what is bound is kept alive, and is sent as it was.

        `check` compares digests of what all ranks hold after the refit, before post-hooks. It is the same on all ranks,
        else all fail with FailedPrecondition, which names two that differ. A destination that does not hold what the source
        holds is DataLoss on all ranks, which names params and ranks.
        What a destination quantizes is compared as it arrives (`notices` says so).

        `dense`, on one rank or more, asks for a refit that sends all, of a plan with options.delta: ask whenever
        something else than a refit wrote a destination's tensors. Other plans always send all. `run` of a plan with
        options.delta, and with `check`, returns after all ranks have called it, because they agree first. Before a
        delta refit it also waits for what `stream` was given before, also with `wait=False`.

        `direct_multiprocessors` is how many multiprocessors of this rank's GPU direct rounds between GPUs use at most,
        so that others can work beside the refit. 0: the plan's options.direct_multiprocessors, all unless the job bounds it.
        Ranks may differ in it.

        `version` names the weights in the log, and nowhere else.
        """
        _check_flag("check", check)
        _check_flag("dense", dense)
        if not 0 <= direct_multiprocessors < 2**32:
            raise InvalidArgument(f"direct_multiprocessors is {direct_multiprocessors}; wanted 0 or more, below 2**32")
        addresses = [locate() for locate in self._locators]
        replaced = {} if self._held is None else self._held.replaced()
        now = replaced if tensors is None else {**replaced, **(modules.parameters_of(tensors) if modules.is_module(tensors) else tensors)}
        if now:
            addresses = [_address_of(now[name]) if name in now else address for name, address in zip(self._bound, addresses)]
        self._meter.began(check, version)
        try:
            with self._counting_failures():
                self._core.run(self._stream(stream), addresses, timeout, check, dense, direct_multiprocessors)
                self._meter.enqueued(self._core.counters())
        except FailedPrecondition as error:
            if replaced:
                error.message += (f'\nin the module others took the place of {len(replaced)} bound tensors, the first is '
                                  f'"{next(iter(replaced))}": bind again, on all ranks of a plan with direct rounds')
            raise
        except KeyboardInterrupt:
            # It may come when the native call has returned. No other rank hears of it then, and each waits for this one at
            # the end of the refit.
            if wait and self.state == "running":
                self.wait()
            raise
        if wait:
            self.wait()
        return self

    def wait(self) -> None:
        """Returns when the refits enqueued so far are over on all ranks, and all ranks' post-hooks are done."""
        self._hook_error = None
        try:
            with self._counting_failures():
                self._core.wait()
        except Error as error:
            if self._hook_error is None:
                raise
            if not isinstance(self._hook_error, Exception):  # KeyboardInterrupt and the like
                raise self._hook_error
            raise error from self._hook_error
        self._meter.ended(self._core.refits, self._core.counters(), self.delta_report)
        self._meter.tell(self._core.notices)

    @contextlib.contextmanager
    def _counting_failures(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._meter.failed()
            raise

    def metrics(self) -> dict[str, float]:
        """Counts of updates and bytes, named "…_total", and, of the last update unless it failed, seconds by phase, bytes and GB/s.
        `refit.metrics.HELP` describes each, `refit.metrics.openmetrics(executor.metrics(), rank=0)` is their text for a scrape."""
        return self._meter.all()

    def digest(self, among: Sequence[int] = (), *, stream: Any = None) -> dict[tuple[str, str], Digest]:
        """What this rank's tensors hold now, by param (as the checkpoint names it) and dtype, in the plan's order.

        What several ranks of `among` hold is counted by the lowest of them. So the digests of all ranks of a side, or of
        one engine, add up to that of one copy; without `among` this rank counts all it holds. Params that the plan does
        not move, and tensors that have post-hooks, are left out. Not collective; not while a refit runs.
        """
        digests = self._core.digest(self._stream(stream), list(among))
        return {(param, dtype): Digest(total, elements) for param, dtype, total, elements in digests}

    @property
    def tensors(self) -> dict[str, Any]:
        """What is bound, by the plan's names; tensors that the plan skips are not among them."""
        return dict(self._bound)

    @property
    def hooks(self) -> dict[str, Optional[Callable[[str, Any], None]]]:
        """The post-hooks that this worker performs, as `bind` was given them."""
        return dict(self._functions)

    @property
    def refits(self) -> int:
        """How many refits succeeded, post-hooks included."""
        return self._core.refits

    @property
    def post_hooks(self) -> list[PostHook]:
        """What is done to this rank's tensors after each refit, in order, by whom, and when it last was."""
        return [PostHook(*hook) for hook in self._core.post_hooks()]

    def interrupt(self) -> None:
        """Ends what this rank waits in; call it from another thread. `connect`, `bind`, `run` and `wait` then fail, on
        the other ranks too. Without a call that waits it does nothing."""
        self._core.interrupt()

    @property
    def delta_report(self) -> Optional[DeltaReport]:
        """How the last refit went, of a plan with options.delta; None before the first since `bind`, after one that
        failed, and where all refits are dense."""
        report = self._core.delta_report()
        return None if report is None else DeltaReport(*report)

    def stats(self) -> dict[str, Any]:
        """What the last run did: rounds, messages, bytes by route and mechanism, seconds of this thread."""
        return self._core.counters()

    @property
    def notices(self) -> list[str]:
        """What this rank does otherwise than you may expect, though nothing failed, a sentence each: ranks on other
        hosts than the plan says; tensors that are read instead of stored to, and why; memory whose free would not be
        noticed; rounds that could not be recorded as a graph, and why."""
        return self._core.notices()

    @property
    def state(self) -> str:
        """"loaded", "connected", "bound", "running", "torn" or "closed"."""
        return self._core.state

    def close(self) -> None:
        """Frees memory, communicators and connections. Close on all ranks alike."""
        self._core.close()
        self._locators, self._functions, self._bound, self._held, self._changes = [], {}, {}, None, {}

    def __enter__(self) -> "Executor":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<refit.Executor rank {self.rank} of {self.plan.world_size} on {self.device}, {self.state}>"

    def _performers(self, functions: Mapping[str, Optional[Callable[[str, Any], None]]],
                    ) -> list[tuple[str, Optional[Callable[[str, str], str]]]]:
        """What the library keeps. The collector does not see through it, so it does not keep this executor."""
        executor = weakref.ref(self)

        def perform(hook: str, tensor: str) -> str:
            alive = executor()
            return "the executor is gone" if alive is None else alive._perform(hook, tensor)

        return [(name, None if function is None else perform) for name, function in functions.items()]

    def _perform(self, hook: str, tensor: str) -> str:
        """Calls the function of a hook; what went wrong, "" if nothing."""
        function = self._functions[hook]
        assert function is not None
        try:
            function(tensor, self._bound[tensor])
        except BaseException as error:  # wait raises it
            self._hook_error = error
            return f"{type(error).__name__}: {error}"
        return ""

    def _stream(self, stream: Any) -> int:
        return _stream_of(self.device, stream)


def join(plan: Plan, rank: int, tensors: Any, *, unique_id: bytes, device: Any,
         buffers: Optional[Mapping[str, Any]] = None, hooks: Hooks = (), changes: Optional[Mapping[str, Any]] = None,
         counts: Optional[dict[str, float]] = None, timeout: float = TIMEOUT_SECONDS) -> Executor:
    """An executor that is ready to run, of a rank that meets the others by a unique id (`rendezvous.unique_id`). The others
    are `Executor.bind`'s."""
    executor = meet(plan, rank, unique_id, device=device, counts=counts)
    with closing_if_it_fails(executor):
        return executor.bind(tensors, buffers, hooks=hooks, changes=changes, timeout=timeout)


def meet(plan: Plan, rank: int, meeting: Any, **options: Any) -> Executor:
    """An executor whose ranks meet by a unique id, as bytes or as hexadecimal digits, or by a LocalFabric."""
    _check_plan(plan)
    fabric, rendezvous = _meeting_of(plan, rank, meeting)
    return Executor(plan, rank, fabric=fabric, rendezvous=rendezvous, **options)


def _meeting_of(plan: Plan, rank: int, meeting: Any) -> tuple[Optional[_core.LocalFabric], Optional[Rendezvous]]:
    if isinstance(meeting, _core.LocalFabric):
        return meeting, None
    try:
        unique_id = bytes.fromhex(meeting) if isinstance(meeting, str) else meeting
    except ValueError:
        raise InvalidArgument(f"the meeting is {meeting[:40]!r}; wanted a unique id, as bytes or in hexadecimal digits") from None
    return None, from_unique_id(unique_id, rank, plan.world_size)


@contextlib.contextmanager
def closing_if_it_fails(executor: Any) -> Iterator[None]:
    """What is raised keeps an executor alive, and its ranks would wait for this one."""
    try:
        yield
    except BaseException:
        executor.close()
        raise


def run_local(plan: Plan, tensors: Sequence[Mapping[str, Any]], *, hooks: Hooks = (),
              timeout: float = TIMEOUT_SECONDS) -> list[dict[str, Any]]:
    """Runs a plan once with all ranks as threads of this process, on the CPU; `tensors` by rank, `hooks` the post-hooks that
    the caller performs, for all of them. Returns each rank's stats."""
    _check_plan(plan)
    if len(tensors) != plan.world_size:
        raise InvalidArgument(f"tensors of {len(tensors)} ranks are given; the plan has {plan.world_size}")
    fabric = _core.LocalFabric(plan.world_size)
    executors = [Executor(plan, rank, fabric=fabric) for rank in range(plan.world_size)]
    errors: list[Optional[BaseException]] = [None] * plan.world_size

    def refit(rank: int) -> None:
        try:
            executors[rank].bind(tensors[rank], hooks=hooks, timeout=timeout).run(timeout=timeout)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=refit, args=(rank,)) for rank in range(plan.world_size)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # a signal, which only this thread sees
        while any(thread.is_alive() for thread in threads):
            for executor in executors:
                executor.interrupt()
            threads[0].join(0.05)
        raise
    # The rank that failed, rather than those who were told.
    found = [error for error in errors if error is not None]
    found.sort(key=lambda error: isinstance(error, (Aborted, Unavailable)))
    if found:
        raise found[0]
    stats = [executor.stats() for executor in executors]
    for executor in executors:
        executor.close()
    return stats


def cast_and_mark(master: Any, weight: Any, changes: Any, *, first_element: int = 0, stream: Any = None) -> None:
    """Casts `master`, fp32, into `weight`, bf16 or fp16, and sets in `changes` the bits of the elements that differ from
    what `weight` held: an optimizer's last step and the bitmap that `Executor.bind` takes, in one pass.

    `changes` is the bitmap of the tensor that `weight` is a part of, from element `first_element` on, as a sharded
    optimizer's parts are. Bits of what did not change stay as they are. All are contiguous and on one device; a GPU does
    the work on `stream`, by default torch's current one. Rounds to nearest even; NaN stays a quiet NaN with its sign. Bits
    are compared, so -0 is a change from 0.
    """
    of, to, bits = view(master), view(weight), words_view(changes)
    for name, seen in (("master", of), ("weight", to), ("changes", bits)):
        if seen.problem:
            raise InvalidArgument(f"{name} {seen.problem}")
        if seen.device != of.device:
            raise InvalidArgument(f"{name} is on {seen.device}; wanted master's {of.device}")
    elements = math.prod(of.shape)
    if of.dtype != "fp32":
        raise InvalidArgument(f"master has dtype {of.dtype}; wanted fp32")
    if math.prod(to.shape) != elements:
        raise InvalidArgument(f"weight has {math.prod(to.shape)} elements; wanted {elements}, as many as master")
    words = (first_element + elements + 31) // 32
    if first_element < 0 or bits.size_bytes < 4 * words:
        raise InvalidArgument(f"changes has {bits.size_bytes // 4} words; wanted {words} or more, for elements {first_element} "
                              f"to {first_element + elements}")
    ordinal = _cuda_ordinal(of.device)
    _core.cast_and_mark(ordinal, _stream_of(of.device, stream), of.address, to.address, to.dtype, bits.address, first_element,
                        elements)


def _stream_of(device: str, stream: Any) -> int:
    if device == "cpu":
        return 0
    if stream is None:
        torch = sys.modules.get("torch")
        return torch.cuda.current_stream(device).cuda_stream if torch is not None else 0
    return int(getattr(stream, "cuda_stream", stream))


def nccl_library() -> tuple[str, str]:
    """File and version of the libnccl that executors of this process use: a copy that is loaded already (PyTorch's),
    else the file that REFIT_NCCL_LIBRARY names, else what the loader finds."""
    return _core.nccl()


def ucx_library() -> tuple[str, str]:
    """File and version of the libucp that executors of this process use: a copy that is loaded already, else the file
    that REFIT_UCX_LIBRARY names, else what the loader finds."""
    return _core.ucx()


def _check_plan(plan: Any) -> None:
    if not isinstance(plan, Plan):
        raise InvalidArgument(f"the plan is a {type(plan).__name__}; wanted a refit.Plan: refit.Plan.load(path)")


def _check_flag(name: str, flag: Any) -> None:
    if not isinstance(flag, bool):
        raise InvalidArgument(f"{name} is {flag!r}; wanted True or False")


def _cuda_ordinal(device: Any) -> Optional[int]:
    if isinstance(device, int) and not isinstance(device, bool):
        return device
    kind, _, number = str(device).partition(":")
    if kind == "cpu":
        return None
    if kind != "cuda" or (number and not number.isdigit()):
        raise InvalidArgument(f'device is "{device}"; wanted "cpu", "cuda" or "cuda:N"')
    if number:
        return int(number)
    torch = sys.modules.get("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0


def _address_of(tensor: Any) -> int:
    """0 of none: bound tensors have elements, or their addresses do not count."""
    return 0 if tensor is None else view(tensor).address


def _argument(name: str, seen: View, bitmap: int) -> tuple[str, int, int, str, list[int], int]:
    return name, seen.address, seen.size_bytes, seen.dtype, list(seen.shape), bitmap


def _unusable(what: str, mapping: Any) -> list[str]:
    """Why names and tensors cannot even be read from what was given."""
    if not isinstance(mapping, Mapping):
        return [f"{what}: a {type(mapping).__name__}; wanted names and tensors, such as dict(model.named_parameters())"]
    return [f"{what}: the name {name!r} is no string" for name in mapping if not isinstance(name, str)]


def functions_of(hooks: Hooks) -> dict[str, Optional[Callable[[str, Any], None]]]:
    if isinstance(hooks, str):
        raise InvalidArgument(f"hooks is the text {hooks!r}; wanted names, [{hooks!r}], or {{name: function}}")
    functions = dict(hooks) if isinstance(hooks, Mapping) else dict.fromkeys(hooks)
    for name, function in functions.items():
        if not isinstance(name, str):
            raise InvalidArgument(f"hooks: the name {name!r} is no string")
        if function is not None and not callable(function):
            raise InvalidArgument(f"hooks: that of {name!r} is a {type(function).__name__}; wanted a function of a "
                                  "tensor's name and the tensor, or None")
    return functions


def _refusal(rank: int, lines: list[str]) -> str:
    return f"rank {rank} cannot bind, {len(lines)} problem{'' if len(lines) == 1 else 's'}\n  " + "\n  ".join(lines)


def _with_dtype(message: str, plan: Plan, rank: int, views: list[View]) -> str:
    """Says first what mends wrong dtypes: keys of the job, if all tensors have one dtype that is not the plan's. The job then has to name
    the other side's dtype, too, because a cast is declared."""
    dtypes = {seen.dtype for seen in views}
    wrong = re.findall(r'^  wrong dtype: "(.*)" is ', message, re.MULTILINE)
    if not wrong:
        return message
    first, _, problems = message.partition("\n")
    if all(name.endswith((".expert_bias", ".e_score_correction_bias")) for name in wrong):
        # No key of the job is about it, since all frameworks keep it so.
        return (f"{first}; a router's bias is fp32 whatever the side's dtype: convert it back after the model's cast "
                f"to half precision. Megatron's routers do so in their first forward pass\n{problems}")
    # If some are right, the job's dtype is theirs already.
    if len(dtypes) > 1 or len(wrong) < len(views) and not re.search(r"\n  and \d+ more$", message):
        return message
    here = plan.side(rank)
    there, first_there = ("destination", plan.source_ranks) if here == "source" else ("source", 0)
    others = {info.dtype for info in plan.tensors(first_there).values()}
    wanted = [f'"{here}": {{"dtype": "{dtypes.pop()}"}}']
    if len(others) == 1:
        wanted.append(f'"{there}": {{"dtype": "{others.pop()}"}}')
    return f'{first}; a plan for these tensors has {" and ".join(wanted)} in its job\n{problems}'


def _with_remedy(message: str, plan: Plan, rank: int, names: Sequence[str]) -> str:
    """Says last what to do about names that differ because of one setting."""
    planned = plan.tensors(rank)
    unexpected = [name for name in names if name not in planned]
    remedies = []
    if plan.side(rank) == "source" and any(name.endswith(".experts.gate_up_proj") for name in unexpected) and \
            any(_ONE_EXPERT.search(name) for name in planned):
        remedies.append('the experts of a layer are one tensor, as transformers 5 has them: put "fused_experts": true into the job\'s '
                        "source")
    if plan.side(rank) == "destination" and len(unexpected) == 1 and unexpected[0].endswith("lm_head.weight"):
        remedies.append("the plan has the head tied to the embedding, and the engine holds a head of its own, as vLLM does if the "
                        'checkpoint has one: put "tie_word_embeddings": false into the job\'s destination, or start vLLM with '
                        'load_format="dummy"')
    return "\n".join([message, *remedies])


_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


def _with(problems: list[str], error: BindError, rank: int) -> str:
    """The library's message, with what only Python could see instead of what the library made of it."""
    named = [problem.split('"')[1] for problem in problems]
    others = [line for line in error.problems
              if not any(f'"{name}"' in line and not line.startswith("missing") for name in named)]
    return _refusal(rank, problems + others) if problems else error.message
