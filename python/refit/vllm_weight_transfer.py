"""The weight-transfer backend "refit" of vLLM, worker and trainer (vllm.distributed.weight_transfer, from 0.27 on).

    llm = LLM(model, weight_transfer_config={"backend": "refit"}, …)

    client = HTTPClient("http://…")                             # refit.vllm_client; it resets the server's caches, too
    refit.vllm.register()                                       # each trainer
    info = RefitTrainerInitInfo(plan="plan.refit", meeting=unique_id.hex(), device="cuda:0", rank=rank)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
    trainer.send_weights(version="42")                          # after every training step

Every trainer rank is a source rank of the plan. Nothing is gathered: the source's `iter_local` yields this rank's own shards,
which stay bound. For several engines the client is `Clients([client of engine 0, …])`.
"""
from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Callable, ClassVar, Mapping, Optional

import torch
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.base import (TrainerInitInfo, TrainerWeightTransferEngine, WeightTransferEngine,
                                                   WeightTransferInitInfo, WeightTransferUpdateInfo)

from refit import auto, vllm_driver, vllm_worker
from refit.errors import Error, FailedPrecondition, InvalidArgument
from refit.executor import TIMEOUT_SECONDS, DeltaReport, Executor, closing_if_it_fails
from refit.plan import Plan
from refit.trainers import Checks, Sender, Taken, agreed, gathered, together
from refit.vllm import BACKEND, bind_worker, join_worker, rank_in_plan, run_worker
from refit.vllm_client import Clients as Clients
from refit.vllm_client import update_by
from refit.vllm_draft import WithDraft
from refit.workers import end_meeting, ending_the_meeting, make_whole


@dataclasses.dataclass
class RefitInitInfo(WeightTransferInitInfo):
    """What a worker needs to join. `plan`: a path that it can read. `meeting`: a unique id as hex. `engine`: the number of its engine,
    of `engines`; None: nobody knows how many."""

    plan: Any
    meeting: Any
    engine: int = 0
    engines: Optional[int] = None
    check_backends: bool = True
    timeout: float = TIMEOUT_SECONDS


@dataclasses.dataclass
class RefitUpdateInfo(WeightTransferUpdateInfo):
    """The plan knows names and shapes. `check`, `dense` and `version`: as `Executor.run` has them. `bind`: bind anew before, as after
    sleep. The trainers must give the same `check` and `bind`."""

    timeout: float = TIMEOUT_SECONDS
    check: bool = False
    dense: bool = False
    bind: bool = False
    version: Optional[str] = None


class RefitWeightTransferEngine(vllm_driver.LeavesWithDriver, WeightTransferEngine[RefitInitInfo, RefitUpdateInfo]):
    """A worker's part. Weights are written in place, in the layout of the live model."""

    init_info_cls = RefitInitInfo
    update_info_cls = RefitUpdateInfo
    supports_draft_weight_update = True
    executor: Optional[Executor] = None
    _check_backends = True
    _draft: Any = None
    _both: Any = None  # what the executor is bound to

    def __init__(self, config: Any, vllm_config: Any, *others: Any, **more: Any):
        super().__init__(config, vllm_config, *others, **more)
        vllm_worker.watch_class(vllm_config)  # a worker makes its engine when it loads its model
        vllm_worker.own_updates(vllm_worker.class_of(vllm_config), RefitWeightTransferEngine)

    def init_transfer_engine(self, init_info: RefitInitInfo) -> None:
        def init() -> None:
            self.shutdown()  # of an earlier meeting
            self.leave_with_driver(init_info.meeting, lambda: self.executor)
            self._check_backends = init_info.check_backends
            self._both = self.model if self._draft is None else WithDraft(self.model, self._draft, self._planned(init_info))
            self.executor = join_worker(init_info.plan, init_info.meeting, self.vllm_config, self._both,
                                        rank=self.parallel_config.rank, device=self.device, engine=init_info.engine,
                                        engines=init_info.engines, check_backends=init_info.check_backends,
                                        counts=self.__dict__.setdefault("_counts", {}), timeout=init_info.timeout)
        self._told_by_the_last(init)

    def _planned(self, init_info: RefitInitInfo) -> frozenset[str]:
        """The plan's tensors of this worker; none if join_worker refuses the plan."""
        with contextlib.suppress(Error, OSError):
            plan = auto.load(init_info.plan)
            return frozenset(plan.tensors(rank_in_plan(plan, self.parallel_config, self.parallel_config.rank, init_info.engine)))
        return frozenset()

    def set_weight_update_target(self, model: Any, model_config: Any) -> None:
        """vLLM's draft session names the draft model. A refit of a plan with "mtp" writes both models at once, from the next
        init_transfer_engine on: a session before that is all it takes, without an update."""
        super().set_weight_update_target(model, model_config)
        self._draft = model

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Not the base class's: a refit is over when it returns."""
        self._told_by_the_last(lambda: self.receive_weights(self.parse_update_info(update_info)))

    def receive_weights(self, update_info: RefitUpdateInfo) -> None:
        if self.executor is None:
            raise FailedPrecondition("init_transfer_engine was not called, or failed")
        if update_info.bind:
            try:
                make_whole(self.executor, update_info.timeout)
                bind_worker(self.executor, self.vllm_config, self._both, check_backends=self._check_backends,
                            timeout=update_info.timeout)
            except BaseException:
                self.shutdown()  # the others, who bound, would wait for this worker's refit
                raise
        run_worker(self.executor, self._both, timeout=update_info.timeout, check=update_info.check, dense=update_info.dense,
                   version=update_info.version)

    def finish_weight_update(self) -> None:
        """Nothing to finish."""

    def shutdown(self) -> None:
        if self.executor is not None:
            self.executor.close()
            self.executor = None

    def _told_by_the_last(self, action: Callable[[], None]) -> None:
        """vLLM's executor raises at the first reply that failed and leaves the later ones in their queues, for its next
        call to be given. So workers agree, and the last of them raises for all."""
        failed: Optional[Exception] = None
        with self._driver_lock:
            try:
                action()
            except Exception as error:
                failed = error
        world = self.parallel_config.world_size
        if world == 1:
            if failed is not None:
                raise failed
            return
        from vllm.distributed.parallel_state import get_world_group

        group = get_world_group()
        told: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(told, None if failed is None else f"{type(failed).__name__}: {failed}",
                                            group=group.cpu_group)
        lines = [f"worker {i}: {text}" for i, text in enumerate(told) if text is not None]
        if lines and self.parallel_config.rank == world - 1:
            raise RuntimeError(f"{len(lines)} of {len(told)} workers failed\n  " + "\n  ".join(lines)) from failed


@dataclasses.dataclass
class RefitTrainerInitInfo(TrainerInitInfo):
    """`plan`: a path, a `Plan`, a job as a dict, or "auto", whose job is saved in the folder `save_to`. `rank` is the plan's source rank.
    `meeting`: a unique id as hex, which rank 0 made (refit.rendezvous.unique_id)
    and handed to the other trainers. `names`: from the source's names to the plan's; default: they are the same. `changes`:
    bitmaps by the plan's names, as `Executor.bind` has them; they stay bound. `check_every`, the
    same on all trainers: K has the first update since ranks met and each K-th checked."""

    backend: ClassVar[str] = BACKEND
    plan: Any
    meeting: Any
    device: Any = "cuda"
    names: Optional[Callable[[str], str]] = None
    changes: Optional[Mapping[str, Any]] = None
    check_backends: bool = True
    check_every: int = 0
    save_to: Any = "refit-auto"
    timeout: float = TIMEOUT_SECONDS


_KEEP = ("yield the live shards, not copies, and write the bits of changes into the bitmaps that are bound, or bind anew on all trainers "
         "(send_weights(bind=True))")


def _shards_of(source: Any) -> Optional[Callable[[], Any]]:
    """What yields this rank's own tensors by name, or None. Of vLLM's own source that is its module: before 0.33 it has no
    iter_local, and from then on one that works out each parameter's layout anew, 40 µs each."""
    if type(source) is getattr(base, "ModuleSource", None):
        module: torch.nn.Module = source._module
        return lambda: ((name, parameter) for name, parameter in module.named_parameters() if _has_part(parameter))
    implements = getattr(source, "implements_iter_local", lambda: hasattr(source, "iter_local"))
    return source.iter_local if implements() else None


def _made(info: RefitTrainerInitInfo, client: Any, source: Any) -> Plan:
    """The plan of a job or of "auto", which trainer 0 compiles for all."""
    group = torch.distributed if torch.distributed.is_available() and torch.distributed.is_initialized() else None
    ranks = 1 if group is None else group.get_world_size()
    if group is None and info.rank > 0:
        refusal = (f'trainer {info.rank} is to get the plan that trainer 0 compiles of a job or of "auto", and torch.distributed is not '
                   "initialized: call torch.distributed.init_process_group on all trainers, or pass the path of a plan")
        end_meeting(info.meeting, refusal)  # trainer 0 thinks that it is the only one
        raise InvalidArgument(refusal)

    def job() -> dict[str, Any]:
        module = getattr(source, "_module", None)
        if module is None or not hasattr(client, "destination"):
            raise InvalidArgument(f'plan="auto" needs a ModuleSource and a refit.vllm_client.HTTPClient; found a {type(source).__name__} and a '
                                  f"{type(client).__name__}")
        return {"model": auto.config_of(module), "source": auto.source_of(module, ranks), "destination": client.destination()}

    return Plan.from_bytes(agreed(lambda: auto.made(info.plan, job, info.save_to).to_bytes() if info.rank == 0 else None, gathered)[0])


def _has_part(parameter: Any) -> bool:
    """Whether this rank is one of the mesh of a DTensor."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is None or mesh.get_coordinate() is not None


class RefitTrainerWeightTransferEngine(TrainerWeightTransferEngine[RefitTrainerInitInfo]):
    """A trainer's part. Rank 0 also tells the workers what to do, in a thread, since they need all trainers meanwhile."""

    init_info_cls = RefitTrainerInitInfo

    @classmethod
    def trainer_init(cls, init_info: RefitTrainerInitInfo, *, client: Any,
                     source: Any = None) -> "RefitTrainerWeightTransferEngine":
        if _shards_of(source) is None:
            raise InvalidArgument(f"the source is a {type(source).__name__}; wanted one that has iter_local: Refit reads "
                                  "each rank's own shards and gathers nothing")
        if auto.is_made(init_info.plan):
            init_info.plan = _made(init_info, client, source)
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine.rank = init_info.rank  # from 0.33 on an argument
        engine._info = init_info
        try:
            engine._meet()
        except BaseException:
            engine.shutdown()
            raise
        return engine

    def replace(self, plan: Any, meeting: Any, *, client: Any = None) -> None:
        """Goes on with other engines, as after one was lost or when one has come; collective over all trainer ranks, between two updates.
        `plan` and `meeting` are those of all that are there now, as `trainer_init` takes them; rank 0, or a process that is no rank
        (refit.rendezvous.host_meeting), made the meeting. `client`, where the last one was: of these engines alone. Trainers keep what is
        bound (Executor.replace); the engines' workers join anew. After an error replace again, by another meeting."""
        self._info = dataclasses.replace(self._info, plan=plan, meeting=meeting)
        if client is not None:
            self.client = client
        if auto.is_made(plan):
            self._info.plan = _made(self._info, self.client, self.source)
        self._meet(self._replace)

    def _meet(self, own_part: Optional[Callable[[], None]] = None) -> None:
        """Has all ranks join by the meeting of the init info, where `own_part` is not another part than to join."""
        info = self._info
        # Trainers that met count the same updates, also if the last one failed before some of them had counted it.
        self._checks = Checks(False, info.check_every)
        # A LocalFabric's workers are threads of this process, which take the plan as it is.
        told = auto.told(info.plan) if isinstance(info.meeting, (str, bytes)) else info.plan
        worker = {"plan": told, "meeting": info.meeting, "engines": 1, "check_backends": info.check_backends, "timeout": info.timeout}
        self._together(lambda: self.client.init_weight_transfer_engine(worker), own_part or self._join)

    _info: RefitTrainerInitInfo
    _checks: Checks
    _sender: Optional[Sender] = None

    @property
    def executor(self) -> Optional[Executor]:
        return None if self._sender is None else self._sender.executor

    def _tensors(self) -> Taken:
        """This rank's shards, by the plan's names, with their bitmaps."""
        if hasattr(self.source, "take_local"):  # one of Refit's own
            taken: Taken = self.source.take_local()
            return taken
        shards = _shards_of(self.source)
        assert shards is not None  # trainer_init refuses such a source
        tensors = dict(shards())
        # Sources of vLLM before 0.33 do not say what a rank owns; the plan does.
        owned = set(self.source.owned_names(self.rank)) if hasattr(self.source, "owned_names") else set(tensors)
        if set(tensors) != owned:
            missing, more = sorted(owned - set(tensors)), sorted(set(tensors) - owned)
            raise InvalidArgument(f"iter_local of rank {self.rank} yields {len(tensors)} tensors, its metadata says "
                                  f"{len(owned)}: missing {missing[:3]}, unexpected {more[:3]}")
        rename = self._info.names or (lambda name: name)
        return Taken({rename(name): tensor for name, tensor in tensors.items()}, changes=self._info.changes)

    def _replace(self) -> None:
        info, sender = self._info, self._sender
        if sender is None or sender.executor is None:  # closed after an update that failed
            return self._join()
        plan, tensors = self._planned_tensors(sender)
        sender.replace(plan, info.rank, info.meeting, tensors, info.device)

    def _join(self) -> None:
        info = self._info
        with ending_the_meeting(info.meeting):
            sender = Sender(auto.load(info.plan), timeout=info.timeout, keep_them_there=_KEEP)
        self._sender = sender
        _, tensors = self._planned_tensors(sender)
        sender.bind(info.rank, info.meeting, tensors, info.device)

    def _planned_tensors(self, sender: Sender) -> tuple[Plan, Mapping[str, Any]]:
        """The plan of the init info, and this rank's shards. What is wrong with either ends the meeting."""
        info = self._info
        with ending_the_meeting(info.meeting):
            plan = auto.load(info.plan)

        def tensors() -> Taken:
            if not 0 <= info.rank < plan.source_ranks:
                raise InvalidArgument(f"the trainer is rank {info.rank}; the plan has {plan.source_ranks} source ranks")
            return self._tensors()

        return plan, sender.take(tensors, info.rank, info.meeting)

    def send_weights(self, version: Optional[str] = None, check: bool = False, dense: bool = False, bind: bool = False) -> None:
        """One refit; collective over all trainer ranks. `version` becomes the engines' weight version. `check`: all ranks
        compare what they hold, as `Executor.run(check=True)` does; give it on all trainers alike. `dense`, on one trainer or more: a refit
        of a plan with options.delta that sends all. `bind`, on all trainers alike: bind anew before, because an engine slept or a
        tensor moved since the last time. It connects first if the last refit failed."""
        sender, info = self._sender, self._info
        if sender is None or sender.executor is None:
            raise FailedPrecondition("this trainer did not join, or was shut down")
        check = self._checks.due or check
        tensors = sender.take(self._tensors, info.rank, info.meeting)
        if not bind:
            with closing_if_it_fails(sender):  # no rank is left waiting: they end with this one
                sender.bind(info.rank, info.meeting, tensors, info.device)

        def own_part() -> None:
            if bind:
                sender.bind(info.rank, info.meeting, tensors, info.device, anew=True)
            sender.run(None, version, check, dense)
            self._checks.passed()

        self._together(lambda: update_by(self.client, {"timeout": info.timeout, "check": check, "bind": bind}, version), own_part)

    @property
    def metrics(self) -> dict[str, float]:
        """What this trainer's last refit took, as `Executor.metrics` tells it."""
        return {} if self.executor is None else self.executor.metrics()

    @property
    def delta_report(self) -> Optional[DeltaReport]:
        """How this trainer's last refit went, as `Executor.delta_report` tells it."""
        return None if self.executor is None else self.executor.delta_report

    def moved(self, tensors: Taken) -> list[str]:
        """What lies elsewhere than when it was bound."""
        return [] if self._sender is None else self._sender.moved(self._info.rank, tensors)

    def _together(self, tell: Callable[[], Any], own_part: Callable[[], Any]) -> None:
        if self.is_sender:
            together(tell, own_part, self._info.timeout, self._give_up)
        else:
            own_part()

    def _give_up(self, error: BaseException) -> None:
        if self._sender is not None:
            self._sender.give_up(error)
        else:
            end_meeting(self._info.meeting, f"the engine failed: {error}")

    def shutdown(self) -> None:
        if self._sender is not None:
            self._sender.close()
