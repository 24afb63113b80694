"""What the adapters' trainers share: their live shards, their part of an update, an engine that is driven beside it.

Where each fact of an adapter stands:

| fact | here | the adapter has |
|---|---|---|
| options, the plan or "auto", metrics, reports, dense updates | `Adapter` | the framework's own way to take options, and to log |
| joining, bind, moved tensors, closing after a failure | `Sender` | how the framework keeps tensors where they are |
| which updates are checked | `Checks` | how trainer 0 tells the others |
| numbers of ranks against the plan's | `refuse_ranks` | who is a source rank |
| one plan on all ranks | `first_of`, `Adapter._agree` | what each side says of itself, and the messages that carry it |
| a failure on one trainer ends on all | `agreed` | the group that they gather by |
| an engine told beside the own part | `together` | the client |

What workers share is in refit.workers: their rank, bind, replies, and the twin of each driver function.
"""
from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

from refit import auto, modules
from refit.errors import DeadlineExceeded, Error, FailedPrecondition, InvalidArgument
from refit.executor import TIMEOUT_SECONDS, DeltaReport, Executor, join
from refit.metrics import logger
from refit.names import are_at_other_addresses
from refit.plan import Plan
from refit.requirements import refusal_of as requirements_refusal
from refit.tensors import local_part, locator, view, words_view
from refit.workers import GRACE_SECONDS, end_meeting, make_whole

# How long a trainer's part may take once the engine's has failed. Most end by themselves: all ranks of a refit hear of an error.
GIVE_UP_SECONDS = 5.0

# Buffers of Megatron that training keeps for itself, though they are persistent.
UNFED = ("local_tokens_per_expert",)

# The attribute of a parameter that is its bitmap of changes, as `Executor.bind` takes it.
CHANGES = "refit_changes"
# That of a live shard whose parameter is not trained.
FROZEN = "refit_frozen"
# That of each live shard: the `facts` of `Taken`.
FACTS = "refit_facts"
# Classes of Transformer Engine for parameters in fp8: of its releases 2 and 1.
QUANTIZED = {"QuantizedTensor", "Float8Tensor"}


def live_shards(module: Any) -> Iterator[tuple[str, Any]]:
    """Of an FSDP2 module, or of Megatron's list of model chunks, this rank's tensors by the plan's names; DTensors as such.
    They have the `refit_changes` of their parameters. Those of parameters that are not trained have `refit_frozen`.
    Of Megatron all ranks call this at once: it gathers what the optimizer left to the next forward pass."""
    taken = LiveShards(module).take()
    for name, tensor in taken.items():
        shard = tensor.detach()
        setattr(shard, FACTS, taken.facts)
        if name in taken.frozen:
            setattr(shard, FROZEN, True)
        if name in taken.changes:
            setattr(shard, CHANGES, taken.changes[name])
        yield name, shard


class Taken(dict[str, Any]):
    """Live shards by the plan's names, which nobody changes: one that is the same object holds the same tensors where they were.
    `frozen`: names of those that are not trained. `changes`: the bitmaps of those that have one. `facts`: what the trainer's framework
    does that no name or shape shows, by the key that a plan requires it by; None of tensors that are no live shards."""

    def __init__(self, tensors: Mapping[str, Any], frozen: Collection[str] = (), changes: Optional[Mapping[str, Any]] = None,
                 facts: Optional[Mapping[str, str]] = None):
        super().__init__(tensors)
        self.frozen, self.changes, self.facts = frozenset(frozen), changes or {}, facts
        self.addresses: dict[str, int] = {}  # where a sender saw them

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> "Taken":
        """The same object, or one made of `tensors` whose attributes say the rest, as `live_shards` makes them."""
        return tensors if isinstance(tensors, Taken) else cls(
            tensors, [name for name, tensor in tensors.items() if getattr(tensor, FROZEN, False)],
            {name: getattr(tensor, CHANGES) for name, tensor in tensors.items() if hasattr(tensor, CHANGES)},
            next((getattr(tensor, FACTS, None) for tensor in tensors.values()), None))

    def moved_by(self, planned: Callable[[], Collection[str]]) -> "Taken":
        """Those that a plan moves: without the ones that are not trained and that it does not name. `planned`: what it names; asked if
        some are not trained."""
        left_out = self.frozen.difference(planned()) if self.frozen else self.frozen
        if not left_out:
            return self
        return Taken({name: tensor for name, tensor in self.items() if name not in left_out}, self.frozen - left_out,
                     {name: bits for name, bits in self.changes.items() if name not in left_out}, self.facts)


class LiveShards:
    """The `live_shards` of a module for update after update. The module's tensors are listed once: walking 18,864 parameters takes
    a quarter of a second, comparing them with what was listed some milliseconds."""

    def __init__(self, module: Any):
        self.module = module
        self._chunks = list(module) if isinstance(module, (list, tuple)) else [module]
        self._taken = Taken({})
        self._listed: Optional[list[_Listed]] = None

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.take().items())

    def take(self) -> Taken:
        """This rank's tensors now: the same object as last time, unless a parameter was replaced, added or moved, or what Refit
        reads of it changed. They are the module's own: a copy of them, also a detached one, would keep the memory of parameters that
        a framework moves to the CPU."""
        same = self._same()
        if not same:
            for chunk in self._chunks:
                _refuse_unless_in_place(chunk)
        for chunk in self._chunks:
            # With overlap_param_gather an optimizer's step writes a part of the parameters. A hook of the next forward pass gathers the
            # others. It may be off now, as in a framework's first step.
            if getattr(chunk, "use_forward_hook", False):
                chunk.start_param_sync(force_sync=True)
        if not same:
            # FSDP2 shows whole parameters between a forward and a backward pass, and puts its shards back for state_dict.
            persistent = [set(_inner(chunk).state_dict(keep_vars=True)) for chunk in self._chunks]
            if not self._same():
                self._list(persistent)
        return self._taken

    def _same(self) -> bool:
        return self._listed is not None and all(listed.same() for listed in self._listed)

    def _list(self, persistent: list[set[str]]) -> None:
        tensors, frozen, changes, listings = {}, [], {}, []
        for number, (chunk, saved) in enumerate(zip(self._chunks, persistent)):
            listed = _Listed(_inner(chunk), saved)
            listings.append(listed)
            prefix = f"vp_stage.{number}." if len(self._chunks) > 1 else ""
            for name, tensor in listed.tensors.items():
                tensors[prefix + name] = tensor
                if name in listed.parameters and not tensor.requires_grad:
                    frozen.append(prefix + name)
                if hasattr(tensor, CHANGES):
                    changes[prefix + name] = getattr(tensor, CHANGES)
        self._taken, self._listed = Taken(tensors, frozen, changes, _facts_of(_inner(self._chunks[0]))), listings


def live_shards_of(owner: Any, module: Any) -> LiveShards:
    """Those of the `module` that a framework's object has now. The object keeps them for its next update."""
    kept: Optional[LiveShards] = owner.__dict__.get(_KEPT)
    chunks = list(module) if isinstance(module, (list, tuple)) else [module]
    if kept is None or len(kept._chunks) != len(chunks) or any(one is not other for one, other in zip(kept._chunks, chunks)):
        kept = owner.__dict__[_KEPT] = LiveShards(module)
    return kept


_KEPT = "_refit_live_shards"


class _Listed:
    """The tensors of one module that `state_dict` names, and whether the module holds the same ones in the same memory."""

    def __init__(self, module: Any, persistent: set[str]):
        self.parameters = modules.parameters_of(module)
        self.tensors = {name: tensor for name, tensor in [*self.parameters.items(), *modules.buffers_of(module).items()]
                        if name in persistent and not name.endswith(UNFED)}
        self._held = modules.Held(module, self.tensors)
        self._values = list(self.tensors.values())
        self._locators = list(map(locator, self._values))
        self._facts = self._facts_now()

    def same(self) -> bool:
        return self._held.unchanged() and self._facts == self._facts_now()

    def _facts_now(self) -> list[Any]:
        """What Refit reads of the tensors: where they are, whether they are trained, and their bitmaps of changes."""
        changes = [None if bits is None else locator(bits)() for bits in [getattr(tensor, CHANGES, None) for tensor in self._values]]
        try:
            addresses = [locate() for locate in self._locators]
        except RuntimeError:  # of a tensor that has no memory of its own, which bind refuses
            addresses = [view(tensor).address for tensor in self._values]
        return [addresses, changes, [tensor.requires_grad for tensor in self._values]]


def _inner(chunk: Any) -> Any:
    """Without DDP and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _facts_of(module: Any) -> dict[str, str]:
    """Of a module without Megatron's settings they are off: a release before a setting has no such order."""
    sizes = {key: getattr(getattr(module, "config", None), key, None) for key in _INTERLEAVES}
    return {key: "none" if size is None else str(size) for key, size in sizes.items()}


# Megatron's settings by which gate and up rows alternate: of experts, and of shared experts, for which no plan has that order.
_INTERLEAVES = {"moe_mlp_glu_interleave_size": "experts", "moe_shared_expert_glu_interleave_size": "shared experts"}


def refusal_of(tensors: Mapping[str, Any], requirements: Mapping[str, str]) -> str:
    """Why a plan of these `requirements` does not fit a trainer of these live shards although names and shapes may; "" if it does, and
    of tensors that are no live shards: whoever made them answers for their order."""
    facts = Taken.of(tensors).facts
    if facts is None:
        return ""

    def comparison(key: str) -> Callable[[str], str]:
        def interleave(wanted: str) -> str:
            found = facts[key]
            if found == wanted:
                return ""
            says = f"Megatron has the gate and up rows of {_INTERLEAVES[key]} in the order of {key} {found}; the plan has them in that of {wanted}"
            if key not in requirements:
                return f"{says}, as every plan: train without {key}"
            remedy = f'leave "{key}" out of the job\'s source' if found == "none" else f'put "{key}": {found} into the job\'s source'
            return f"{says}: {remedy}, or train with {wanted}"

        return interleave

    # A plan that states nothing has no gated experts of Megatron.
    stated = {**dict.fromkeys(_INTERLEAVES, "none"), **requirements} if requirements else {}
    return requirements_refusal(stated, {key: comparison(key) for key in _INTERLEAVES})


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


class Checks:
    """Which of an adapter's updates are checked: all by `check`, or the first and then each `every`-th of those that succeeded. So one that
    failed leaves the check to the next. Ranks that count the same updates agree."""

    def __init__(self, check: bool, every: int):
        if not isinstance(every, int) or isinstance(every, bool) or every < 0:
            raise InvalidArgument(f"check_every is {every!r}; wanted a whole number: 0 checks no update, K the first and then each K-th")
        self._check, self._every, self._passed = check, every, 0

    @property
    def due(self) -> bool:
        """Whether the update that begins is checked."""
        return self._check or self._every > 0 and self._passed % self._every == 0

    def passed(self) -> None:
        """Notes that an update succeeded."""
        self._passed += 1


def agreed(action: Callable[[], Any], gather: Callable[[Any], Sequence[Any]]) -> list[Any]:
    """What `action` returns on each of the trainers that call this at once, by rank. If it raises on one, no trainer is left waiting
    in the next collective: that one raises its own error, the others FailedPrecondition. `gather`: what each trainer gives it, by rank."""
    failed: Optional[Exception] = None
    result: Any = None
    try:
        result = action()
    except Exception as error:
        failed = error
    told = gather((None if failed is None else f"{type(failed).__name__}: {failed}", result))
    if failed is not None:
        raise failed
    for rank, (text, _) in enumerate(told):
        if text is not None:
            raise FailedPrecondition(f"trainer {rank} failed: {text}")
    return [found for _, found in told]


def gathered(said: Any) -> list[Any]:
    """What each process of torch.distributed says, by rank. Collective, unless there is one process."""
    dist = importlib.import_module("torch").distributed
    told: list[Any] = [said]
    if dist.is_available() and dist.is_initialized():
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, said)
    return told


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


def refuse_ranks(plan: Plan, framework: str, trainers: Optional[tuple[int, str]] = None, workers: Optional[tuple[int, str]] = None) -> None:
    """Refuses a plan for other numbers of ranks than a framework has. `trainers` and `workers`: how many, and what they are called there;
    None: not known here."""
    known = (trainers, plan.source_ranks, "source"), (workers, plan.destination_ranks, "destination")
    sides = [(found, planned, side) for found, planned, side in known if found is not None]
    if any(found[0] != planned for found, planned, _ in sides):
        raise InvalidArgument(f"{framework} has {' and '.join(f'{number} {name}' for (number, name), *_ in sides)}; the plan has "
                              f"{' and '.join(f'{planned} {side}' for _, planned, side in sides)} ranks")


def addresses_of(tensors: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, int]:
    """Where the tensors lie, and their bitmaps of changes, which go by the tensor's name and CHANGES."""
    addresses = {name: view(tensor).address for name, tensor in tensors.items()}
    return addresses | {f"{name}.{CHANGES}": words_view(bits).address for name, bits in changes.items()}


class Sender:
    """A trainer's part of updates. It joins at the first, and at the one after a failed update, by another meeting. `keep_them_there`: how
    the framework keeps tensors where they are, for the error."""

    def __init__(self, plan: Plan, *, timeout: float, keep_them_there: str = "keep parameters on the GPU"):
        self.plan = plan
        self._timeout, self._keep_them_there = timeout, keep_them_there
        self.executor: Optional[Executor] = None
        self._meeting: Any = None
        self._joining: Any = None
        self._bound: dict[str, int] = {}
        self._taken: Optional[Taken] = None  # what `_bound` was read from
        self._dense = False
        self._counts: dict[str, float] = {}
        self._planned: Optional[frozenset[str]] = None

    @property
    def joined(self) -> bool:
        return self.executor is not None

    @property
    def delta_report(self) -> Optional[DeltaReport]:
        return None if self.executor is None else self.executor.delta_report

    @property
    def metrics(self) -> dict[str, float]:
        found = self._counts if self.executor is None else self.executor.metrics()
        return {f"refit/{name}": value for name, value in found.items()}

    @property
    def stats(self) -> Optional[dict[str, Any]]:
        return None if self.executor is None else self.executor.stats()

    def ask_dense(self) -> None:
        self._dense = True

    def take(self, weights: Any, rank: int, meeting: Any) -> Mapping[str, Any]:
        """The tensors that an iterator of a framework yields, or that a function returns. If it fails no rank is left waiting: those that
        have met end with this one, and a meeting of others ends."""
        try:
            found: Mapping[str, Any] = weights.take() if isinstance(weights, LiveShards) else weights() if callable(weights) else dict(weights)
            return found
        except BaseException as error:
            self.close()
            if meeting != self._meeting:
                end_meeting(meeting, f"rank {rank}: {error}", rank=rank, world_size=self.plan.world_size)
            raise

    def give_up(self, error: BaseException) -> None:
        """On another thread than `send`: ends what that waits in, because the engine failed."""
        executor = self.executor
        if executor is not None:
            executor.interrupt()
        elif self._joining is not None:
            end_meeting(self._joining, f"the engine failed: {error}")

    def send(self, rank: int, meeting: Any, tensors: Mapping[str, Any], device: Any, stream: Any, bind: bool = False,
             version: Optional[str] = None, check: bool = False) -> None:
        """One refit from `tensors`, this rank's live shards. `meeting`: a unique id that all ranks have. `bind`, the same on all ranks:
        if they have met already, bind anew before, because engines slept. Tensors that are not trained, as of a vision tower, are left
        out if the plan does not name them. `version` names the weights in the log; `check` is the same on all ranks. On any thread, one
        at a time. If it fails no rank is left waiting: they end with this one, and the next update is by another meeting, so dense."""
        if meeting != self._meeting:  # the last update failed elsewhere, perhaps not here
            self.close()
        try:
            with current(device):
                self.bind(rank, meeting, tensors, device, bind)
                self.run(stream, version, check)
        except BaseException:
            self.close()
            raise

    def run(self, stream: Any, version: Optional[str], check: bool, dense: bool = False) -> None:
        """One refit of what is bound. After one that failed `bind` connects first."""
        assert self.executor is not None
        dense, self._dense = dense or self._dense, False  # what is asked for while it runs is for the next
        self.executor.run(stream, timeout=self._timeout, check=check, dense=dense, version=version)

    def bind(self, rank: int, meeting: Any, tensors: Mapping[str, Any], device: Any, anew: bool = False) -> None:
        """Joins by the `meeting` at first, or binds `anew`, or sees that the tensors are those that are bound."""
        if not anew and self.executor is not None and tensors is self._taken:  # each tensor is where it was
            return
        given, moved = self._looked_at(rank, tensors)
        if self.executor is None:
            self._refuse_others(given, rank, meeting)
            self._joining = meeting
            self.executor = join(self.plan, rank, given, unique_id=meeting, device=device, changes=given.changes,
                                 counts=self._counts, timeout=self._timeout)
            self._meeting = meeting
        elif anew:
            make_whole(self.executor, self._timeout)
            self.executor.bind(given, changes=given.changes, timeout=self._timeout)
        elif moved:
            raise FailedPrecondition(f"{are_at_other_addresses(moved)} than when they were bound: something replaced or moved them. Refit "
                                     f"reads the trainer's own memory: {self._keep_them_there}")
        self._bound, self._taken = given.addresses, tensors if isinstance(tensors, Taken) else None

    def replace(self, plan: Plan, rank: int, meeting: Any, tensors: Mapping[str, Any], device: Any) -> None:
        """Goes on with another plan by another meeting: with what is bound, or by joining anew, if nothing is, or a tensor moved."""
        self.plan, self._planned, self._taken = plan, None, None
        given = Taken.of(tensors).moved_by(lambda: self._names(rank))
        if self.executor is None or addresses_of(given, given.changes) != self._bound:
            self.close()
            return self.bind(rank, meeting, tensors, device)
        self._refuse_others(given, rank, meeting)
        self._meeting = meeting
        try:
            self.executor.replace(plan, rank, meeting, timeout=self._timeout)
        except BaseException as error:
            if self.executor.plan is not plan:  # it has not met the others
                end_meeting(meeting, f"rank {rank}: {error}", rank=rank, world_size=plan.world_size)
            raise
        self._taken = tensors if isinstance(tensors, Taken) else None

    def _refuse_others(self, given: "Taken", rank: int, meeting: Any) -> None:
        """Ends the meeting if the plan is not for these live shards."""
        if refusal := refusal_of(given, self.plan.requirements(rank)):
            end_meeting(meeting, f"rank {rank}: {refusal}", rank=rank, world_size=self.plan.world_size)
            raise FailedPrecondition(refusal)

    def moved(self, rank: int, tensors: Mapping[str, Any]) -> list[str]:
        """What lies elsewhere than when it was bound. Raises FailedPrecondition if there are other tensors than then."""
        return [] if tensors is self._taken else self._looked_at(rank, tensors)[1]

    def _looked_at(self, rank: int, tensors: Mapping[str, Any]) -> tuple["Taken", list[str]]:
        given = Taken.of(tensors).moved_by(lambda: self._names(rank))
        given.addresses = addresses_of(given, given.changes)
        if self.executor is None:
            return given, []
        missing, unexpected = sorted(self._bound.keys() - given.addresses.keys()), sorted(given.addresses.keys() - self._bound.keys())
        if missing or unexpected:
            raise FailedPrecondition(f"rank {rank} yields {len(given.addresses)} tensors, at the first update {len(self._bound)}: "
                                     f"missing {missing[:3]}, unexpected {unexpected[:3]}")
        return given, [name for name, address in given.addresses.items() if address != self._bound[name]]

    def _names(self, rank: int) -> frozenset[str]:
        """The plan's tensors of this rank. Kept: listing those of a large model takes a tenth of a second."""
        if self._planned is None:
            self._planned = frozenset(self.plan.tensors(rank))
        return self._planned

    def close(self) -> None:
        if self.executor is not None:
            self.executor.close()
            self.executor = None
        self._joining = self._taken = None


class Adapter:
    """A framework's trainer: its options, its part of updates, and how the last went. `plan` is a path that all ranks can read, a `Plan`, a
    job as a dict, or "auto": then the job is that of the trainer and the engine, and is saved in the folder `save_to`. `check`: after each
    update all ranks compare what they hold, as `Executor.run(check=True)` does; `check_every=K`: after the first since ranks met, and each
    K-th. `timeout`: seconds."""

    keep_them_there = "keep parameters on the GPU"
    _plan: Optional[Plan] = None  # "auto" and jobs make one once both sides are known
    _sender: Any = None

    def __init__(self, plan: auto.Given, *, check: bool = False, check_every: int = 0,
                 timeout: float = TIMEOUT_SECONDS, save_to: Any = "refit-auto"):
        self._given, self._save_to, self._timeout = plan, save_to, timeout
        self._new_checks = functools.partial(Checks, check, check_every)
        self._checks = self._new_checks()
        if not auto.is_made(plan):
            self._take_plan(auto.load(plan))

    def _take_plan(self, plan: Plan) -> None:
        self._plan = plan
        self._sender = Sender(plan, timeout=self._timeout, keep_them_there=self.keep_them_there)

    @property
    def _told(self) -> Any:
        """What workers are told of the plan: its path, or the plan itself."""
        return auto.told(self._plan if auto.is_made(self._given) else
                         os.path.abspath(self._given) if isinstance(self._given, (str, os.PathLike)) else self._given)

    def _said(self, side: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """What a rank says before the first update: which plan it has, or what its `side` of the job of "auto" is."""
        asks = self._plan is None and self._given == auto.AUTO
        return {"plan": None if self._plan is None else self._plan.digest, "side": dict(side()) if asks else None}

    def _agree(self, job: Mapping[str, Any], saves: bool) -> Plan:
        """The plan, which is made of the job that `job_of` found if this rank has none. One rank `saves` it."""
        if self._plan is None:
            self._take_plan(auto.made(self._given, lambda: job, self._save_to if saves else None))
        assert self._plan is not None
        return self._plan

    @property
    def metrics(self) -> Any:
        """What this process's last update took, as `Executor.metrics` tells it, with "refit/" before each name; counts alone
        after one that failed."""
        return {} if self._sender is None else self._sender.metrics

    @property
    def stats(self) -> Optional[dict[str, Any]]:
        """What this process's last update did, as `Executor.stats` tells it; None before the first and after one that failed."""
        stats: Optional[dict[str, Any]] = None if self._sender is None else self._sender.stats
        return stats

    @property
    def delta_report(self) -> Optional[DeltaReport]:
        """How this process's last update went, as `Executor.delta_report` tells it; None before the first and after one that failed."""
        report: Optional[DeltaReport] = None if self._sender is None else self._sender.delta_report
        return report

    def ask_dense(self) -> None:
        """Makes the next update of a plan with options.delta send all, on all ranks. One trainer's request is enough."""
        if self._sender is not None:
            self._sender.ask_dense()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


def job_of(metadata: Sequence[Mapping[str, Any]], workers: int) -> dict[str, Any]:
    """The job of both sides, of what each rank said (`Adapter._said`) and the number of `workers`; {}: the ranks have a plan."""
    sides = [said["side"] for said in metadata if said.get("side")]
    return {} if not sides else auto.job_of({key: value for side in reversed(sides) for key, value in side.items()}, workers)


def source_of(module: Any) -> dict[str, Any]:
    """A trainer's side of a job: that of a module which all ranks of torch.distributed train."""
    ranks = importlib.import_module("torch").distributed.get_world_size()
    return {"model": auto.config_of(module).to_dict(), "source": auto.source_of(module, ranks)}


def falls_back(on_refusal: str) -> bool:
    if on_refusal not in ("raise", "framework"):
        raise InvalidArgument(f'on_refusal is {on_refusal!r}; wanted "raise" or "framework"')
    return on_refusal == "framework"


def log_fallback(framework: str, reasons: Iterable[str]) -> None:
    logger.warning("Refit does not move these weights, and %s does, so that no update is checked and none has a version: %s",
                   framework, "; ".join(dict.fromkeys(reasons)))


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
    theirs = told[0] if told else None
    if failed is not None:
        if isinstance(failed, Error) and theirs is not None:
            failed.message += f"\nthe engine: {type(theirs).__name__}: {theirs}"
        raise failed from theirs
    if not told:
        raise DeadlineExceeded(f"this trainer's part is done, but the engine has not answered {timeout + GRACE_SECONDS:g} s later")
    if theirs is not None:
        raise theirs
