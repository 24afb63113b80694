"""Refit inside NeMo-RL: a checkpoint engine, and what it needs at its two ends.

    policy.generation:
      refit_transport: "refit.nemo_rl:CheckpointEngine"
      refit_cfg: {"refit.nemo_rl:CheckpointEngine": {plan: /shared/plan.refit}}
      vllm_kwargs: {worker_cls: refit.nemo_rl.VllmWorker}

    setup(config, tokenizer, dataset, val_dataset, policy_factory=refit.nemo_rl.policy)

Policy workers are the plan's source ranks, vLLM's workers its destination ranks. docs/integrations/nemo_rl.md is the guide.
"""
from __future__ import annotations

import asyncio
import functools
import importlib
from typing import Any, AsyncGenerator, Callable, Iterable, Iterator, Optional

from nemo_rl.utils.checkpoint_engines import base

from refit import trainers
from refit.errors import FailedPrecondition, InvalidArgument
from refit.executor import TIMEOUT_SECONDS, DeltaReport
from refit.plan import Plan
from refit.rendezvous import ray_unique_id
from refit.workers import checked

WORKERS = "nemo_rl.models.policy.workers"

# vLLM's worker, where this process has one.
_vllm_worker: Any = None


class Sender(trainers.Sender):
    keep_them_there = "set cpu_offload: false, and no phase may move the policy to the CPU between updates"


class CheckpointEngine(base.CheckpointEngine):
    """A policy worker's or a vLLM worker's part in NeMo-RL's refits. `plan`: a path that all of them can read. `check`: after each
    update all ranks compare what they hold, as `Executor.run(check=True)` does; `check_every=K`: after the first since ranks met, and
    each K-th. `snapshot_on_host`: of policy workers, as `Executor` has it. `timeout`: seconds.

    Ranks meet and bind at the first update. After one that failed they meet again once NeMo-RL's synchronizer was shut down.
    `bucket_size` and `release_after_refit` are NeMo-RL's; the plan has its own staging.
    """

    def __init__(self, bucket_size: int, plan: str, check: bool = False, check_every: int = 0, snapshot_on_host: bool = False,
                 timeout: float = TIMEOUT_SECONDS, release_after_refit: bool = False, device: Any = "cuda"):
        self._path, self._plan = str(plan), Plan.load(plan)
        self._timeout, self._device = timeout, device
        self._new_checks = functools.partial(trainers.Checks, check, check_every)
        self._checks = self._new_checks()
        self._sender = Sender(self._plan, timeout=timeout, check=False, snapshot_on_host=snapshot_on_host)
        self._rank: Optional[int] = None  # of the plan
        self._engine: Optional[int] = None  # of vLLM's worker: the number of its engine, of those that the plan has
        self._meeting: Optional[bytes] = None
        self._vllm_joined = False

    def prepare(self) -> dict[str, Any]:
        """Rank 0 makes the id that all ranks meet by."""
        import torch

        is_first = _vllm_worker is None and torch.distributed.get_rank() == 0
        return {"plan": self._plan.digest, "meeting": ray_unique_id().hex() if is_first else None}

    def init_policy_process_group(self, *, worker_rank: int, train_world_size: int, rollout_world_size: int,
                                  metadata: list[Any]) -> None:
        """Nothing is connected before the first update."""
        self._meet(worker_rank, train_world_size, rollout_world_size, metadata)

    def init_rollout_process_group(self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int,
                                   metadata: list[Any]) -> None:
        if _vllm_worker is None:
            raise FailedPrecondition("vLLM's worker is another class; wanted policy.generation.vllm_kwargs.worker_cls "
                                     '"refit.nemo_rl.VllmWorker"')
        rank = train_world_size + rollout_rank
        self._meet(rank, train_world_size, rollout_world_size, metadata)
        self._engine = self._engine_of(rank)

    def _meet(self, rank: int, train: int, rollout: int, metadata: list[Any]) -> None:
        first = trainers.first_of(metadata)
        if (train, rollout) != (self._plan.source_ranks, self._plan.destination_ranks):
            raise InvalidArgument(f"NeMo-RL has {train} policy workers and {rollout} workers of vLLM; the plan has "
                                  f"{self._plan.source_ranks} source and {self._plan.destination_ranks} destination ranks")
        self._rank, self._meeting, self._vllm_joined = rank, bytes.fromhex(first["meeting"]), False
        self._checks = self._new_checks()  # all ranks count from here

    def _met(self) -> tuple[int, bytes]:
        if self._rank is None or self._meeting is None:
            raise FailedPrecondition("the last update failed, or none was prepared; call weight_synchronizer.shutdown() before the "
                                     "next one, so that all ranks meet again")
        return self._rank, self._meeting

    async def send_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """One refit from this policy worker's live shards, which `weights` must yield (`LiveShards`): nothing is gathered."""
        rank, meeting = self._met()
        self._rank = None
        tensors = self._sender.take(weights, rank, meeting)
        await asyncio.to_thread(self._sender.send, rank, meeting, tensors, *trainers.here(self._device), False, None, self._checks.next())
        self._rank = rank

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, Any]], None]:
        """One refit of vLLM's worker, in place. Yields nothing: there is nothing left to load."""
        rank, meeting = self._met()
        self._rank = None
        worker = _vllm_worker
        if not self._vllm_joined:
            checked([worker.refit_init(self._path, meeting, engine=self._engine, timeout=self._timeout)])
            self._vllm_joined = True
        checked([worker.refit_update(timeout=self._timeout, check=self._checks.next())])
        self._rank = rank
        nothing: list[list[tuple[str, Any]]] = []
        for batch in nothing:
            yield batch

    def _engine_of(self, rank: int) -> int:
        parallel = _vllm_worker.vllm_config.parallel_config
        engine_ranks: int = parallel.world_size * parallel.data_parallel_size
        engine, within = divmod(rank - self._plan.source_ranks, engine_ranks)
        wanted = parallel.data_parallel_index * parallel.world_size + _vllm_worker.rank
        if within != wanted:
            raise InvalidArgument(f"NeMo-RL counts this worker as {within} of its engine's {engine_ranks}, vLLM as {wanted}")
        return engine

    @property
    def delta_report(self) -> Optional[DeltaReport]:
        """How this policy worker's last update went, as `Executor.delta_report` tells it."""
        return self._sender.delta_report

    def metrics(self) -> dict[str, float]:
        """What this rank's last update took, as `Executor.metrics` tells it, with "refit/" before each name: for NeMo-RL's logger. A policy
        worker answers `checkpoint_engine_rpc("metrics")`."""
        if _vllm_worker is not None and self._vllm_joined:
            return {f"refit/{name}": value for name, value in _vllm_worker.refit_metrics().items()}
        return self._sender.metrics

    def ask_dense(self) -> None:
        """Makes the next update of a plan with options.delta send all, on all ranks. One policy worker's request is enough."""
        self._sender.ask_dense()

    def finalize(self) -> None:
        self._rank = self._meeting = None
        self._sender.close()
        if _vllm_worker is not None and self._vllm_joined:
            self._vllm_joined = False
            checked([_vllm_worker.refit_close()])


class LiveShards:
    """Before a policy worker of NeMo-RL: its checkpoint engine gets this rank's own live tensors, where NeMo-RL gathers them."""

    async def checkpoint_engine_rpc(self, checkpoint_method: str, method_kwargs: Optional[dict[str, Any]] = None) -> Any:
        if checkpoint_method == "init_checkpoint_engine":
            self._refuse_what_moves()
        return await super().checkpoint_engine_rpc(checkpoint_method, method_kwargs)  # type: ignore[misc]

    def _refuse_what_moves(self) -> None:
        worker: Any = self
        _refuse_quantized(worker.cfg)
        if getattr(worker, "cpu_offload", False):
            raise FailedPrecondition("NeMo-RL moves the policy between CPU and GPU at each refit; Refit reads it where it was: set "
                                     "policy.dtensor_cfg.cpu_offload=false")
        megatron = worker.cfg.get("megatron_cfg") or {}
        peft, fp8 = megatron.get("peft") or {}, megatron.get("fp8_cfg") or {}
        if getattr(worker, "lora_enabled", False) or peft.get("enabled", False):
            raise FailedPrecondition("NeMo-RL merges LoRA adapters into copies; Refit moves the live weights: switch LoRA off")
        if (worker.cfg.get("draft") or {}).get("enabled", False):
            raise FailedPrecondition("NeMo-RL sends a draft model with the weights; Refit moves the policy's: set "
                                     "policy.draft.enabled=false")
        if megatron.get("enabled", False) and fp8.get("enabled", False) and fp8.get("fp8_param", False):
            raise FailedPrecondition("Megatron keeps parameters in fp8; Refit moves them in bf16: set "
                                     "policy.megatron_cfg.fp8_cfg.fp8_param=false")
        vllm = (worker.cfg.get("generation") or {}).get("vllm_cfg") or {}
        if str(vllm.get("kv_cache_dtype", "auto")).startswith("fp8"):
            raise FailedPrecondition("NeMo-RL sends scales of an fp8 KV cache with the weights; Refit moves weights: set "
                                     "policy.generation.vllm_cfg.kv_cache_dtype=auto")

    def _checkpoint_engine_weight_iterator(self, kv_scales: Optional[dict[str, float]] = None) -> Iterable[tuple[str, Any]]:
        worker: Any = self
        return trainers.live_shards_of(worker, worker.model) if kv_scales is None else _refused_scales()


def _refused_scales() -> Iterator[tuple[str, Any]]:
    """Raises where weights are taken: there the other ranks hear of it."""
    raise FailedPrecondition("NeMo-RL gave scales of an fp8 KV cache; Refit moves weights")
    yield


def _refuse_quantized(config: Any) -> None:
    """NeMo-RL has other classes of workers for such a policy."""
    if config.get("quant_cfg") is not None:
        raise FailedPrecondition("refit.nemo_rl has no workers for quantization-aware training: set policy.quant_cfg=null")


def policy(base: Optional[Callable[..., Any]] = None, **options: Any) -> Any:
    """For `setup(policy_factory=refit.nemo_rl.policy)` of an algorithm: NeMo-RL's `Policy` with workers that have `LiveShards`.
    `base`: another class or factory that takes what `Policy` does, as TQPolicy with its dp_cfg."""
    from nemo_rl.distributed import ray_actor_environment_registry as registry

    config = options["config"]
    _refuse_quantized(config)
    if config.get("megatron_cfg", {}).get("enabled"):
        module, name = "megatron_policy_worker", "MegatronPolicyWorker"
    elif config.get("dtensor_cfg", {}).get("_v2"):
        module, name = "dtensor_policy_worker_v2", "DTensorPolicyWorkerV2"
    else:
        module, name = "dtensor_policy_worker", "DTensorPolicyWorker"
    theirs = registry.get_actor_python_env(f"{WORKERS}.{module}.{name}")
    registry.ACTOR_ENVIRONMENT_REGISTRY.setdefault(f"{__name__}.{name}", theirs)
    if base is None:
        base = importlib.import_module("nemo_rl.models.policy.lm_policy").Policy
    return base(**options, worker_extension_cls_fqn=f"{__name__}.{name}")


def _policy_worker(module: str, name: str) -> Any:
    """The Ray actor that takes the place of NeMo-RL's of this name."""
    import ray

    theirs = getattr(importlib.import_module(f"{WORKERS}.{module}"), f"{name}Impl")
    environment = importlib.import_module("nemo_rl.models.policy.utils").get_runtime_env_for_policy_worker(module)
    return ray.remote(runtime_env=environment)(type(name, (LiveShards, theirs), {"__module__": __name__}))


def _vllm_worker_class() -> Any:
    from vllm.v1.worker.gpu_worker import Worker

    from refit.vllm import WorkerExtension

    class VllmWorker(WorkerExtension, Worker):
        """vLLM's worker, which the checkpoint engine of its process finds."""

        def __init__(self, *arguments: Any, **options: Any):
            global _vllm_worker
            super().__init__(*arguments, **options)
            _vllm_worker = self

    return VllmWorker


def __getattr__(name: str) -> Any:
    """What NeMo-RL and vLLM ask for by name, made then: each imports what only its own processes have."""
    makers: dict[str, Callable[[], Any]] = {
        "VllmWorker": _vllm_worker_class,
        "DTensorPolicyWorker": lambda: _policy_worker("dtensor_policy_worker", name),
        "DTensorPolicyWorkerV2": lambda: _policy_worker("dtensor_policy_worker_v2", name),
        "MegatronPolicyWorker": lambda: _policy_worker("megatron_policy_worker", name)}
    if name not in makers:
        raise AttributeError(name)
    globals()[name] = makers[name]()
    return globals()[name]
