"""Refit inside SkyRL: policy workers that send their own shards straight into vLLM's workers.

    python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=refit.skyrl refit.plan=plan.refit …

Policy workers of the FSDP or the Megatron strategy are the plan's source ranks, vLLM's workers its destination ranks. SkyRL drives
vLLM's weight transfer, of which Refit is a backend: vLLM's workers have `RefitWeightTransferEngine`, and a policy worker has the
trainer's engine of it. An experiment of your own takes `Experiment` as its base. docs/integrations/skyrl.md is the guide.
"""
# SkyRL reads the annotations of Config, so they are no texts here.
import asyncio
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import ray
import torch
from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.config.config import BaseConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from refit import auto, trainers, vllm
from refit.errors import FailedPrecondition, InvalidArgument
from refit.executor import TIMEOUT_SECONDS
from refit.plan import Plan
from refit.rendezvous import ray_unique_id
from refit.vllm import BACKEND
from refit.workers import end_meeting

# What a policy worker of each of SkyRL's strategies is.
WORKERS = {"fsdp": ("fsdp.fsdp_worker", "FSDPPolicyWorkerBase"), "megatron": ("megatron.megatron_worker", "MegatronPolicyWorkerBase")}


@dataclass
class Options(BaseConfig):
    """Those of `trainers.Adapter`. `on_refusal`: "framework" has SkyRL move the weights if its configuration is one that Refit refuses."""

    plan: str = ""
    check: bool = False
    check_every: int = 0
    timeout: float = TIMEOUT_SECONDS
    save_to: str = "refit-auto"
    on_refusal: str = "raise"


@dataclass
class Config(SkyRLTrainConfig):
    refit: Options = field(default_factory=Options)


class Source:
    """A weight source of vLLM that has this rank's own live tensors: nothing is gathered or cast."""

    def __init__(self, worker: Any, plan: Plan, rank: int):
        self._worker = worker
        self._planned = functools.cache(lambda: frozenset(plan.tensors(rank)))
        self._all: Optional[trainers.Taken] = None

    def take_local(self) -> trainers.Taken:
        taken = trainers.live_shards_of(self._worker, _module_of(self._worker)).take()
        if taken is not self._all:
            self._all, self._moved = taken, taken.moved_by(self._planned)
        return self._moved

    def iter_local(self) -> Iterator[tuple[str, Any]]:
        return iter(self.take_local().items())


def _module_of(worker: Any) -> Any:
    """Megatron's model chunks, or the Hugging Face model that FSDP shards."""
    chunks = getattr(worker, "actor_module", None)
    return worker.model.model if chunks is None else chunks


class Client(SkyrlWeightSyncClient):
    """SkyRL's own client of the engines."""

    def finish_weight_update(self, weight_version: Optional[str] = None) -> None:
        super().finish_weight_update(weight_version)
        # SkyRL resets the prefix cache alone; this one holds what the old vision tower made of images.
        self._fanout_uniform("/reset_encoder_cache", None)


def engine_payloads(init_info: dict[str, Any], server_urls: Sequence[str], data_parallel_size: int) -> list[dict[str, Any]]:
    """What each server's workers are told: the number of their engine, of those that join. An engine's ranks of data parallelism
    are servers of their own."""
    ranks = max(1, int(data_parallel_size))
    engines = len(server_urls) // ranks
    return [{**init_info, "engine": number // ranks, "engines": engines} for number in range(len(server_urls))]


@functools.cache
def trainer_class() -> Any:
    """The trainer's engine of Refit's backend, as SkyRL's workers drive it. Made where vLLM is needed."""
    from skyrl.backends.skyrl_train.weight_sync.weight_senders import SkyrlTrainerCapabilities

    from refit.vllm_weight_transfer import RefitTrainerWeightTransferEngine

    class Trainer(SkyrlTrainerCapabilities, RefitTrainerWeightTransferEngine):
        # What SkyRL's workers ask of an engine: Refit's buffers are not torch's, so emptying torch's cache would only cost time.
        skyrl_empty_cache_after_send = False

        refit_check = False
        refit_binds_always = False
        _dense = False
        _updates = 0

        def send_weights(self, version: Optional[str] = None, check: bool = False, dense: bool = False, bind: bool = False) -> None:
            """One refit; collective over the policy workers. They agree first whether all bind anew, because engines slept or a policy
            worker's tensors moved, or meet anew, because the last update failed."""
            def wanted() -> int:
                if self.executor is None:
                    return _MEET
                tensors = self._tensors()
                return _BIND if bind or self.refit_binds_always or self.moved(tensors) else _KEEP

            agreed = max(on_all(wanted))
            try:
                if agreed == _MEET:
                    self.shutdown()
                    self._info.meeting = new_meeting()
                self._updates += 1
                version = str(self._updates) if version is None else version  # SkyRL gives none
                dense, self._dense = dense or self._dense, False
                on_all(lambda: self._update(agreed, version, check or self.refit_check, dense))
            except BaseException:
                self.shutdown()  # the others end with this one
                raise

        def _update(self, agreed: int, version: Optional[str], check: bool, dense: bool) -> None:
            try:
                if agreed == _MEET:
                    self._meet()
                super().send_weights(version, check=check, dense=dense, bind=agreed == _BIND)
            except BaseException:
                self.shutdown()  # what the others wait in ends, so that they come to hear why
                raise

        def ask_dense(self) -> None:
            """Makes the next update of a plan with options.delta send all, on all ranks. One worker's request is enough."""
            self._dense = True

    return Trainer


# What a policy worker wants of an update. The highest that any wants is done by all.
_KEEP, _BIND, _MEET = range(3)


def on_all(action: Callable[[], Any]) -> list[Any]:
    """What `action` returns on each policy worker. If it fails on one it fails on all."""
    return trainers.agreed(action, trainers.gathered)


def new_meeting() -> str:
    """A unique id that policy worker 0 makes, on all of them."""
    meeting: str = on_all(lambda: ray_unique_id().hex() if torch.distributed.get_rank() == 0 else "")[0]
    return meeting


class LiveShards:
    """Before a policy worker of SkyRL."""

    refit_options: Options
    refit_device: Any = "cuda"

    def refit_metrics(self) -> dict[str, float]:
        """What this policy worker's last update took, as `Executor.metrics` tells it, with "refit/" before each name."""
        engine = getattr(self, "_weight_sync_engine", None)
        return {} if engine is None else {f"refit/{name}": value for name, value in engine.metrics.items()}

    async def init_weight_sync_state(self, inference_engine_client: Any, inference_engine_cfg: Any) -> None:
        """Instead of SkyRL's, which makes one of its own engines. All ranks meet and bind here."""
        worker: Any = self
        refuse(worker.cfg, inference_engine_cfg)
        worker._weight_sync_inference_client = inference_engine_client  # SkyRL sends it once
        # Each policy worker asks, so each may fail alone.
        asked: Any = (await asyncio.gather(inference_engine_client.get_world_size(), return_exceptions=True))[0]
        worker._weight_sync_engine = await worker._weight_sync_thread(
            self._join, inference_engine_client, inference_engine_cfg, asked)

    def _join(self, client: Any, config: Any, asked: Any) -> Any:
        """`asked`: what the engines say of their workers, or why they do not."""
        made: list[Any] = []
        meeting, plan = on_all(lambda: self._prepare(config, asked))[0]
        try:
            on_all(lambda: made.append(self._engine(client, config, meeting, auto.load(plan))))
        except BaseException:
            for engine in made:  # the others end with this one
                engine.shutdown()
            raise
        return made[0]

    def _prepare(self, config: Any, asked: Any) -> Any:
        """Policy worker 0 returns the unique id that all ranks meet by, and the plan."""
        if isinstance(asked, BaseException):
            raise asked
        engine_workers, _ = asked
        given, rank, policy_workers = self.refit_options.plan, torch.distributed.get_rank(), torch.distributed.get_world_size()
        if given == auto.AUTO and rank > 0:
            return None
        plan = auto.load(given) if given != auto.AUTO else auto.made(given, lambda: auto.job_of(
            trainers.source_of(_module_of(self)) | {"destination": destination_of(config)}, engine_workers), self.refit_options.save_to)
        trainers.refuse_ranks(plan, "SkyRL", (policy_workers, "policy workers"), (engine_workers, "workers of vLLM"))
        if config.speculative_config is not None and not any(plan.job.get(f"{side}.mtp") == "true" for side in ("source", "destination")):
            raise FailedPrecondition("generator.inference_engine.speculative_config: vLLM drafts with the policy's multi-token-prediction "
                                     'layers, which the plan leaves alone: put "mtp": true into the job\'s source')
        return (ray_unique_id().hex(), auto.told(plan if given == auto.AUTO else given)) if rank == 0 else None

    def _engine(self, client: Any, config: Any, meeting: str, plan: Plan) -> Any:
        from refit.vllm_weight_transfer import RefitTrainerInitInfo

        options, rank = self.refit_options, torch.distributed.get_rank()
        try:
            device, _ = trainers.here(self.refit_device)
            info = RefitTrainerInitInfo(rank=rank, plan=plan if options.plan == auto.AUTO else options.plan, meeting=meeting, device=device,
                                        check_every=options.check_every, timeout=options.timeout)
            urls = Client(list(client.server_urls), int(client.data_parallel_size), init_payload_fn=engine_payloads)
            if config.speculative_config is not None and rank == 0:
                # Tells the workers which model drafts. From then on each update writes both, so that SkyRL's second session is not needed.
                with urls.draft_session():
                    urls.start_weight_update()
                    urls.finish_weight_update()
        except BaseException as error:
            end_meeting(meeting, f"rank {rank}: {error}", rank=rank, world_size=plan.world_size)
            raise
        engine = trainer_class().trainer_init(info, client=urls, source=Source(self, plan, rank))
        engine.refit_check, engine.refit_binds_always = options.check, config.offload_kv_for_weight_sync
        return engine


def destination_of(config: Any) -> dict[str, Any]:
    """The destination of a job for engines that SkyRL starts by this configuration: one of them."""
    import importlib

    return vllm.destination_of({
        "vllm": importlib.import_module("vllm").__version__, "dtype": config.model_dtype,
        "quantization": config.engine_init_kwargs.get("quantization"), "tensor_parallel": config.tensor_parallel_size,
        "pipeline_parallel": config.pipeline_parallel_size, "data_parallel": config.data_parallel_size,
        "expert_parallel": config.expert_parallel_size > 1, "expert_placements": [], "moe_backends": []})


def refuse(trainer: Any, engine: Any) -> None:
    if reasons := refusals(trainer, engine):
        raise FailedPrecondition("\n".join(reasons))


def refusals(trainer: Any, engine: Any) -> list[str]:
    """Every reason why Refit does not do what SkyRL is set to do with weights. `trainer` and `engine` are these parts of its configuration."""
    reasons = []
    where = "generator.inference_engine."
    if trainer.strategy not in WORKERS:
        reasons.append(f'trainer.strategy is "{trainer.strategy}"; refit.skyrl has policy workers for {" and ".join(WORKERS)}')
    if trainer.policy.model.lora.rank > 0:
        reasons.append("SkyRL sends LoRA adapters, or merges them into copies; Refit moves the live weights: set "
                       "trainer.policy.model.lora.rank=0")
    if trainer.placement.colocate_all:
        reasons.append("SkyRL moves the policy's weights between CPU and GPU where all models are colocated; Refit reads "
                       "them where they were: set trainer.placement.colocate_all=false")
    if engine.weight_sync_backend != "nccl":
        reasons.append(f'{where}weight_sync_backend is "{engine.weight_sync_backend}", for which SkyRL starts and pauses engines '
                       f'in another way; leave it "nccl", and Refit takes the place of NCCL: {where}weight_sync_backend=nccl')
    if engine.enable_pd:
        reasons.append(f"{where}enable_pd: SkyRL then starts engines of two kinds, and a plan's engines are alike: set "
                       f"{where}enable_pd=false")
    if engine.offload_kv_for_weight_sync and trainer.fully_async.enabled:
        reasons.append(f"{where}offload_kv_for_weight_sync: with fully asynchronous training SkyRL discards weights behind "
                       f"vLLM's back, also those that a plan leaves alone: set {where}offload_kv_for_weight_sync=false")
    return reasons


def policy_worker(options: Options, strategy: str = "fsdp") -> Any:
    """The Ray actor that takes the place of SkyRL's PolicyWorker, for `RayPPOTrainer.build_models`. `strategy`: trainer.strategy."""
    import importlib

    if not options.plan:
        raise InvalidArgument('refit.plan is not set; wanted the path of a plan that all workers can read, or "auto"')
    module, name = WORKERS[strategy]
    theirs = getattr(importlib.import_module(f"skyrl.backends.skyrl_train.workers.{module}"), name)
    worker = type("RefitPolicyWorker", (LiveShards, theirs), {"__module__": __name__, "refit_options": options})
    return ray.remote(num_gpus=1)(worker)


class Experiment(BasePPOExp):
    """SkyRL's experiment with policy workers that refit. `cfg` is a `Config`."""

    def __init__(self, cfg: Any):
        engine = cfg.generator.inference_engine
        reasons = refusals(cfg.trainer, engine)
        self._by_framework = bool(reasons) and trainers.falls_back(cfg.refit.on_refusal)
        if self._by_framework:
            trainers.log_fallback("SkyRL", reasons)
        else:
            refuse(cfg.trainer, engine)
            # The engines' part of Refit's backend, which vLLM finds by its plugin entry point.
            engine.engine_init_kwargs = {**engine.engine_init_kwargs, "weight_transfer_config": {"backend": BACKEND}}
        super().__init__(cfg)

    def get_trainer(self, *args: Any, **kwargs: Any) -> Any:
        trainer = super().get_trainer(*args, **kwargs)
        if self._by_framework:
            return trainer
        build, cfg = trainer.build_models, self.cfg
        trainer.build_models = lambda PolicyWorker, *others: build(policy_worker(cfg.refit, cfg.trainer.strategy), *others)
        return trainer


def _run(cfg: Config) -> None:
    Experiment(cfg).run()


def main() -> None:
    """As SkyRL's own, which hands over to it where trainer.override_entrypoint says so."""
    cfg = Config.from_cli_overrides([text for text in sys.argv[1:] if not text.startswith("trainer.override_entrypoint=")])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(ray.remote(num_cpus=1)(_run).remote(cfg))
