"""Refit inside verl: a checkpoint engine, and what it needs at its two ends.

    VERL_USE_EXTERNAL_MODULES=refit.verl VERL_ENGINE_VENDOR=refit python -m verl.trainer.main_ppo …
      actor_rollout_ref.rollout.checkpoint_engine.backend=refit
      actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=refit.verl
      +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.refit.plan=plan.refit
      +actor_rollout_ref.rollout.engine_kwargs.vllm.weight_transfer_config.backend=refit

Trainers are the plan's source ranks, vLLM's workers its destination ranks: verl's rollout ranks only tell vLLM what to do.
Importing this module registers all of it. docs/integrations/verl.md is the guide.
"""
from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any, AsyncGenerator, Iterable, Iterator, Optional

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout import base as rollout_base

from refit import trainers, vllm
from refit.errors import FailedPrecondition, InvalidArgument
from refit.rendezvous import ray_unique_id
from refit.vllm import BACKEND

WIRE_FORMAT = "refit"

# What plan="auto" reads in this process: the actor's engine, or the configuration of the rollout.
_actor: Any = None
_rollout_config: Any = None


def destination_of(config: Any) -> dict[str, Any]:
    """The destination of a job for verl's rollout of this configuration: one engine."""
    return vllm.destination_of({
        "vllm": importlib.import_module("vllm").__version__, "dtype": config.dtype, "quantization": getattr(config, "quantization", None),
        "tensor_parallel": config.tensor_model_parallel_size, "pipeline_parallel": config.pipeline_model_parallel_size,
        "data_parallel": config.data_parallel_size, "expert_parallel": config.expert_parallel_size > 1, "expert_placements": [],
        "moe_backends": []})


@CheckpointEngineRegistry.register(BACKEND)
class RefitCheckpointEngine(trainers.Adapter, CheckpointEngine):
    """A trainer's or a rollout rank's part in verl's update_weights. Its options are those of `trainers.Adapter`.

    verl makes a process group before every update. Here ranks meet at the first, and again at the one after a failed update:
    the plan's own executor stays. Where vLLM sleeps before updates (rollout.free_cache_engine), all bind anew at each: its weights
    wake up in other memory. `bucket_size` is verl's; the plan has its own.
    """

    wire_format = WIRE_FORMAT
    keep_them_there = ("keep parameters on the GPU (param_offload=False) and let the engine yield live shards "
                       "(VERL_ENGINE_VENDOR=refit)")

    def __init__(self, bucket_size: int, plan: Any, is_master: bool = False, device: Any = "cuda", **options: Any):
        trainers.Adapter.__init__(self, plan, **options)
        self._device, self._check = device, False  # trainer 0 says before each update whether it is checked
        self._is_master = is_master
        self._meeting: Optional[bytes] = None
        self._rank: Optional[int] = None
        self._engine_sleeps = False  # of a rollout rank, which hears it at its first update
        self._bind = False

    def prepare(self) -> dict[str, Any]:
        # Rank 0 makes the id that all ranks meet by, and keeps it while updates succeed.
        if self._is_master and (self._sender is None or not self._sender.joined):
            self._meeting = ray_unique_id()
        plan = self._plan
        return {**self._said(self._side), "ranks": None if plan is None else (plan.source_ranks, plan.destination_ranks),
                "meeting": None if self._meeting is None else self._meeting.hex(), "engine_sleeps": self._engine_sleeps,
                "check": self._is_master and self._checks.due}

    def _side(self) -> dict[str, Any]:
        return ({} if _rollout_config is None else {"destination": destination_of(_rollout_config)}) | (
            trainers.source_of(_actor.module) if self._is_master and _actor is not None else {})

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]],
                       ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        first = trainers.first_of(metadata)
        if first["ranks"] not in (None, (actor_wg_world_size, rollout_world_size)):
            raise InvalidArgument(f"verl has {actor_wg_world_size} trainer and {rollout_world_size} rollout ranks; the plan has "
                                  f"{first['ranks'][0]} source and {first['ranks'][1]} destination ranks")
        world = actor_wg_world_size + rollout_world_size
        ranks = list(range(world))
        # All bind or none: no rank but vLLM's workers knows what slept.
        told = {"rank": ranks, "meeting": [first["meeting"]] * world, "bind": [any(said["engine_sleeps"] for said in metadata)] * world,
                "check": [first["check"]] * world, "job": [trainers.job_of(metadata, rollout_world_size)] * world}
        return ({name: values[:actor_wg_world_size] for name, values in told.items()},
                {name: values[actor_wg_world_size:] for name, values in told.items()})

    def init_process_group(self, rank: int, meeting: str, bind: bool = False, check: bool = False, job: Optional[dict[str, Any]] = None) -> None:
        """Nothing is connected yet: the trainers' tensors and vLLM's workers come with the update."""
        self._rank, self._meeting, self._bind, self._check = rank, bytes.fromhex(meeting), bind, check
        self._agree(job or {}, saves=rank == 0)

    async def send_weights(self, weights: Iterable[tuple[str, Any]], global_steps: Optional[int] = None) -> dict[str, float]:
        """One refit from this trainer's live shards, which `weights` must be (`LiveShards`): nothing is gathered. Returns metrics, which
        verl logs: those of trainer 0."""
        import asyncio

        if self._rank is None or self._meeting is None:
            raise FailedPrecondition("init_process_group was not called")
        # Of DTensors bind compares the placements with the plan's, so they stay what they are.
        tensors = self._sender.take(weights if isinstance(weights, trainers.LiveShards) else _refused(weights), self._rank, self._meeting)
        # In a thread: verl's event loop has the rollout's part to do, where both are in one process.
        device, stream = trainers.here(self._device)
        await asyncio.to_thread(self._sender.send, self._rank, self._meeting, tensors, device, stream, self._bind,
                                _version(global_steps), self._check)
        self._checks.passed()
        found: dict[str, float] = self.metrics
        return found if self._rank == 0 else {}

    async def receive_weights(self, global_steps: Optional[int] = None) -> AsyncGenerator[tuple[str, Any], None]:
        """Yields what `ServerAdapter` tells vLLM's workers, who take the weights, and a function for what it tells this engine."""
        if self._meeting is None:
            raise FailedPrecondition("init_process_group was not called")
        yield "init", {"plan": self._told, "meeting": self._meeting.hex(), "timeout": self._timeout}
        yield "update", {"timeout": self._timeout, "check": self._check, "bind": self._bind, "version": _version(global_steps)}
        yield "engine_sleeps", self.set_engine_sleeps

    def set_engine_sleeps(self, sleeps: bool) -> None:
        """Of a rollout rank: whether its engine sleeps and wakes up before each update."""
        self._engine_sleeps = sleeps

    def finalize(self) -> None:
        """Nothing: executors stay bound for the next update."""


def _version(global_steps: Optional[int]) -> Optional[str]:
    return None if global_steps is None else str(global_steps)


def _refused(weights: Any) -> Iterator[tuple[str, Any]]:
    """Where verl knows no engine of the vendor it takes its own, and says nothing: that gathers whole tensors."""
    raise FailedPrecondition(
        f"the actor's engine yields a {type(weights).__name__}, whole tensors that verl gathers; wanted refit.verl.LiveShards: "
        f"""VERL_ENGINE_VENDOR is {os.environ.get("VERL_ENGINE_VENDOR", "not set")}, wanted "{BACKEND}", and the actor's strategy is to be """
        '"fsdp2" or "megatron"')
    yield


class ServerAdapterMixin:
    """Before a server adapter of verl for vLLM: updates of wire format "refit" are vLLM's weight transfer, by its backend "refit".
    Others go on to verl's own."""

    _refit_joined: Optional[str] = None  # the meeting

    def __init__(self, *args: Any, **named: Any):
        global _rollout_config
        super().__init__(*args, **named)
        _rollout_config = getattr(self, "config", None)

    async def update_weights(self, weights: Any, global_steps: Optional[int] = None, wire_format: str = "named_tensors",
                             **more: Any) -> None:
        adapter: Any = self
        if wire_format != WIRE_FORMAT:
            await super().update_weights(weights, global_steps=global_steps, wire_format=wire_format, **more)  # type: ignore[misc]
            return
        told = {name: info async for name, info in weights}
        told["engine_sleeps"](bool(adapter.config.free_cache_engine))
        update = told["update"]
        if self._refit_joined != told["init"]["meeting"]:
            # Also where this rank is not the one that has a server: it then does nothing.
            await adapter._execute_method("init_weight_transfer_engine",
                                          kwargs={"init_info": {**told["init"], "engine": adapter.replica_rank}})
            self._refit_joined = told["init"]["meeting"]
            update = {**update, "bind": False}  # they just did
        try:
            await adapter._execute_method("start_weight_update")
            await adapter._execute_method("update_weights", kwargs={"update_info": update})
        except Exception:
            # Ends the update on the workers that began one and did not raise; Refit's take an end without a beginning for none.
            with contextlib.suppress(Exception):
                await adapter._execute_method("finish_weight_update")
            raise
        await adapter._execute_method("finish_weight_update")
        if adapter._has_server:
            await adapter.server_handle.clear_kv_cache.remote()
            if global_steps is not None:
                await adapter.server_handle.set_global_steps.remote(global_steps)


class LiveShards:
    """Before a model engine of verl: get_per_tensor_param yields this rank's own live tensors, by the plan's names, and gathers
    nothing. Not for LoRA, whose weights are merged in copies, nor for quantization-aware training, whose weights are quantized in
    copies."""

    def initialize(self) -> None:
        global _actor
        super().initialize()  # type: ignore[misc]
        if not self.__dict__["engine_config"].forward_only:  # that of a reference model
            _actor = self

    def get_per_tensor_param(self, **_: Any) -> tuple[trainers.LiveShards, None]:
        engine: Any = self
        if getattr(engine, "_qat_enabled", False):
            raise FailedPrecondition("verl quantizes the weights of quantization-aware training in copies; Refit moves the live weights: "
                                     "set qat.enable=false of the actor's engine")
        # What verl's FSDP engine, and what its Megatron engine, knows LoRA by.
        if getattr(engine, "_is_lora", False) or getattr(engine, "peft_cls", None) is not None:
            raise FailedPrecondition("verl sends LoRA adapters, or merges them into copies; Refit moves the live weights: train without "
                                     "LoRA, actor_rollout_ref.model.lora_rank=0 and actor_rollout_ref.model.lora.rank=0")
        return trainers.live_shards_of(engine, engine.module), None


def __getattr__(name: str) -> Any:
    """`ServerAdapter`, made when verl asks for it: it imports vLLM."""
    if name != "ServerAdapter":
        raise AttributeError(name)
    theirs = importlib.import_module("verl.workers.rollout.vllm_rollout").ServerAdapter
    globals()[name] = type(name, (ServerAdapterMixin, theirs), {"__module__": __name__})
    return globals()[name]


def register_engines(vendor: str = "refit") -> None:
    """Registers verl's FSDP2 and Megatron engines with `LiveShards` before them, for the environment
    VERL_ENGINE_VENDOR=`vendor`. One that cannot be imported is left out; verl then takes its own, whose weights the checkpoint
    engine refuses."""
    from verl.workers.engine.base import EngineRegistry

    for module, theirs, backends in (("fsdp", "FSDPEngineWithLMHead", ["fsdp2"]),
                                     ("megatron", "MegatronEngineWithLMHead", ["megatron"])):
        try:
            engine = getattr(importlib.import_module(f"verl.workers.engine.{module}.transformer_impl"), theirs)
        except ImportError:
            continue
        EngineRegistry.register("language_model", backends, "cuda", vendor)(
            type(f"Refit{theirs}", (LiveShards, engine), {"__module__": __name__}))


rollout_base._ROLLOUT_REGISTRY[("vllm", "async")] = f"{__name__}.ServerAdapter"
if os.environ.get("VERL_ENGINE_VENDOR") == BACKEND:
    register_engines()
