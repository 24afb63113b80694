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
import importlib
from typing import Any, AsyncGenerator, Callable, Iterable, Iterator, Optional

from nemo_rl.utils.checkpoint_engines import base

from refit import trainers, vllm
from refit.errors import FailedPrecondition, InvalidArgument
from refit.rendezvous import ray_unique_id
from refit.workers import checked

WORKERS = "nemo_rl.models.policy.workers"

# The worker of this process, of vLLM or of the policy.
_vllm_worker: Any = None
_policy_now: Any = None


class CheckpointEngine(trainers.Adapter, base.CheckpointEngine):
    """A policy worker's or a vLLM worker's part in NeMo-RL's refits. Its options are those of `trainers.Adapter`.

    Ranks meet and bind at the first update. After one that failed they meet again once NeMo-RL's synchronizer was shut down.
    `bucket_size` and `release_after_refit` are NeMo-RL's; the plan has its own staging.
    """

    keep_them_there = "set cpu_offload: false, and no phase may move the policy to the CPU between updates"

    def __init__(self, bucket_size: int, plan: Any, release_after_refit: bool = False, device: Any = "cuda", **options: Any):
        trainers.Adapter.__init__(self, plan, **options)
        self._device = device
        self._rank: Optional[int] = None  # of the plan
        self._engine: Optional[int] = None  # of vLLM's worker: the number of its engine, of those that the plan has
        self._meeting: Optional[bytes] = None
        self._vllm_joined = False
        self._updates = 0  # NeMo-RL names no version, so the number of an update is its version

    def prepare(self) -> dict[str, Any]:
        """Rank 0 makes the id that all ranks meet by."""
        import torch

        is_first = _vllm_worker is None and torch.distributed.get_rank() == 0

        def side() -> dict[str, Any]:
            if _vllm_worker is not None:
                return {"destination": vllm.destination_of(_vllm_worker.refit_facts())}
            return trainers.source_of(_policy_now.model) if is_first and _policy_now is not None else {}

        return {**self._said(side), "meeting": ray_unique_id().hex() if is_first else None, "updates": self._updates}

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
        self._engine = self._engine_of(rollout_rank)

    def _meet(self, rank: int, train: int, rollout: int, metadata: list[Any]) -> None:
        first = trainers.first_of(metadata)
        plan = self._agree(trainers.job_of(metadata, rollout), saves=rank == 0)
        trainers.refuse_ranks(plan, "NeMo-RL", (train, "policy workers"), (rollout, "workers of vLLM"))
        self._rank, self._meeting, self._vllm_joined = rank, bytes.fromhex(first["meeting"]), False
        self._checks, self._updates = self._new_checks(), first["updates"]  # all ranks count from here

    def _met(self) -> tuple[int, bytes]:
        if self._rank is None or self._meeting is None:
            raise FailedPrecondition("the last update failed, or none was prepared; call weight_synchronizer.shutdown() before the "
                                     "next one, so that all ranks meet again")
        return self._rank, self._meeting

    async def send_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """One refit from this policy worker's live shards, which `weights` must yield (`LiveShards`): nothing is gathered."""
        rank, meeting = self._met()
        self._rank = None
        self._updates += 1
        tensors = self._sender.take(weights, rank, meeting)
        device, stream = trainers.here(self._device)
        await asyncio.to_thread(self._sender.send, rank, meeting, tensors, device, stream, False, str(self._updates), self._checks.due)
        self._checks.passed()
        self._rank = rank

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, Any]], None]:
        """One refit of vLLM's worker, in place. Yields nothing: there is nothing left to load."""
        rank, meeting = self._met()
        self._rank = None
        self._updates += 1
        worker = _vllm_worker
        if not self._vllm_joined:
            checked([worker.refit_init(self._told, meeting, engine=self._engine, timeout=self._timeout)])
            self._vllm_joined = True
        checked([worker.refit_update(version=str(self._updates), timeout=self._timeout, check=self._checks.due)])
        self._checks.passed()
        self._rank = rank
        nothing: list[list[tuple[str, Any]]] = []
        for batch in nothing:
            yield batch

    def _engine_of(self, rank: int) -> int:
        """Of vLLM's worker, which is the one of this `rank` among all."""
        parallel = _vllm_worker.vllm_config.parallel_config
        engine_ranks: int = parallel.world_size * parallel.data_parallel_size
        engine, within = divmod(rank, engine_ranks)
        wanted = parallel.data_parallel_index * parallel.world_size + _vllm_worker.rank
        if within != wanted:
            raise InvalidArgument(f"NeMo-RL counts this worker as {within} of its engine's {engine_ranks}, vLLM as {wanted}")
        return engine

    def metrics(self) -> dict[str, float]:  # a method, as NeMo-RL calls it
        """What this rank's last update took, as `Executor.metrics` tells it, with "refit/" before each name: for NeMo-RL's logger. A policy
        worker answers `checkpoint_engine_rpc("metrics")`."""
        if _vllm_worker is not None and self._vllm_joined:
            return {f"refit/{name}": value for name, value in _vllm_worker.refit_metrics().items()}
        told: dict[str, float] = super().metrics
        return told

    def finalize(self) -> None:
        self._rank = self._meeting = None
        self.close()
        if _vllm_worker is not None and self._vllm_joined:
            self._vllm_joined = False
            checked([_vllm_worker.refit_close()])


class LiveShards:
    """Before a policy worker of NeMo-RL: its checkpoint engine gets this rank's own live tensors, where NeMo-RL gathers them."""

    async def checkpoint_engine_rpc(self, checkpoint_method: str, method_kwargs: Optional[dict[str, Any]] = None) -> Any:
        if checkpoint_method == "init_checkpoint_engine":
            self._refuse_what_moves()
            globals()["_policy_now"] = self
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
