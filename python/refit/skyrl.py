"""Refit inside SkyRL: policy workers that send their own shards straight into vLLM's workers.

    python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=refit.skyrl refit.plan=plan.refit …

Policy workers of the FSDP strategy are the plan's source ranks, vLLM's workers its destination ranks. An experiment of your own
takes `Experiment` as its base. docs/integrations/skyrl.md is the guide.
"""
# SkyRL reads the annotations of Config, so they are no texts here.
import asyncio
import sys
from dataclasses import dataclass, field
from typing import Any, Iterable, Iterator, Optional

import ray
import torch
from skyrl.backends.skyrl_train.weight_sync import WeightChunk, WeightExtractor, WeightTransferSender
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.config.config import BaseConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from refit import trainers
from refit.errors import FailedPrecondition, InvalidArgument
from refit.executor import TIMEOUT_SECONDS, DeltaReport
from refit.plan import Plan
from refit.rendezvous import unique_id
from refit.workers import checked

WORKER_EXTENSION = "refit.vllm.WorkerExtension"


@dataclass
class Options(BaseConfig):
    """`plan`: a path that policy workers and vLLM's workers can read. `check`: after each update all ranks compare what they hold,
    as `Executor.run(check=True)` does. `snapshot_on_host`: of policy workers, as `Executor` has it. `timeout`: seconds."""

    plan: str = ""
    check: bool = False
    snapshot_on_host: bool = False
    timeout: float = TIMEOUT_SECONDS


@dataclass
class Config(SkyRLTrainConfig):
    refit: Options = field(default_factory=Options)


class LiveExtractor(WeightExtractor):
    """This rank's own live tensors, a chunk each: nothing is gathered or cast."""

    def __init__(self, module: Any):
        self._module = module

    def extract_weights(self, dtype: torch.dtype) -> Iterator[WeightChunk]:
        for name, tensor in trainers.live_shards(self._module):
            yield WeightChunk(names=[name], dtypes=[str(tensor.dtype)], shapes=[list(tensor.shape)], tensors=[tensor])

    def get_weight_metadata(self, dtype: torch.dtype) -> dict[str, list[Any]]:
        tensors = dict(trainers.live_shards(self._module))
        return {"names": list(tensors), "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
                "shapes": [list(tensor.shape) for tensor in tensors.values()]}


class Sender(WeightTransferSender):
    """A policy worker's part of an update; rank 0 also tells the engines' workers theirs. `client`: SkyRL's of the engines."""

    def __init__(self, options: Options, client: Any, device: Any = "cuda"):
        self._options, self._client, self._device = options, client, device
        self._sender = trainers.Sender(Plan.load(options.plan), timeout=options.timeout, check=options.check,
                                      snapshot_on_host=options.snapshot_on_host)
        self._meeting: Optional[bytes] = None
        self._engines_joined: Optional[bytes] = None

    async def send_chunks(self, chunks: Iterable[WeightChunk], weight_metadata: Optional[dict[str, list[Any]]] = None) -> None:
        rank, workers = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if workers != self._sender.plan.source_ranks:
            raise InvalidArgument(f"SkyRL has {workers} policy workers; the plan has {self._sender.plan.source_ranks} source ranks")
        # Rank 0 makes the id that all ranks meet by, and keeps it while updates succeed.
        meeting = [unique_id() if rank == 0 and not self._sender.joined else self._meeting]
        torch.distributed.broadcast_object_list(meeting, src=0)
        self._meeting = meeting[0]
        assert self._meeting is not None
        tensors = self._sender.take((pair for chunk in chunks for pair in zip(chunk.names, chunk.tensors)), rank, self._meeting)
        device, stream = trainers.here(self._device)

        def own_part() -> None:
            self._sender.send(rank, self._meeting, tensors, device, stream)  # type: ignore[arg-type]

        if rank == 0:
            await trainers.together_async(self._tell(self._meeting), own_part, self._options.timeout, self._sender.give_up)
        else:
            await asyncio.to_thread(own_part)

    async def _tell(self, meeting: bytes) -> None:
        timeout = self._options.timeout
        if self._engines_joined != meeting:
            await self._ask("refit_init", plan=self._options.plan, meeting=meeting.hex(), timeout=timeout)
            self._engines_joined = meeting
        await self._ask("refit_update", timeout=timeout, check=self._options.check)
        # SkyRL resets the prefix cache alone; this one holds what the old vision tower made of images.
        await asyncio.gather(*[self._client._call_server(url, "/reset_encoder_cache") for url in self._client.server_urls])

    async def _ask(self, method: str, **arguments: Any) -> None:
        """Calls a method of `refit.vllm.WorkerExtension` on all workers of all engines, and raises what they tell."""
        urls, ranks = self._client.server_urls, self._client.data_parallel_size

        async def one(number: int, url: str) -> list[Any]:
            # An engine's ranks of data parallelism are servers of their own.
            engine = {"engine": number // ranks, "engines": len(urls) // ranks} if method == "refit_init" else {}
            _, answer = await self._client._call_server(url, "/collective_rpc", {"method": method, "kwargs": {**arguments, **engine}})
            replies: list[Any] = answer["body"]["results"]
            return replies

        replies = await asyncio.gather(*[one(number, url) for number, url in enumerate(urls)])
        checked([reply for of_server in replies for reply in of_server])

    @property
    def delta_report(self) -> Optional[DeltaReport]:
        """How this worker's last update went, as `Executor.delta_report` tells it."""
        return self._sender.delta_report

    def ask_dense(self) -> None:
        """Makes the next update of a plan with options.delta send all, on all ranks. One worker's request is enough."""
        self._sender.ask_dense()

    def teardown(self) -> None:
        self._sender.close()


class LiveShards:
    """Before a policy worker of SkyRL's FSDP strategy."""

    refit_options: Options

    async def init_weight_sync_state(self, inference_engine_client: Any, inference_engine_cfg: Any) -> None:
        """Instead of SkyRL's: its senders are not given the model. Nothing is connected before the first update."""
        worker: Any = self
        if worker._is_lora:
            raise FailedPrecondition("SkyRL sends LoRA adapters by files; Refit moves whole weights: set trainer.policy.model.lora.rank=0")
        if worker.cfg.placement.colocate_all:
            raise FailedPrecondition("SkyRL moves the policy's weights between CPU and GPU where all models are colocated; Refit reads "
                                     "them where they were: set trainer.placement.colocate_all=false")
        extension = dict(inference_engine_cfg.engine_init_kwargs).get("worker_extension_cls")
        if extension != WORKER_EXTENSION:
            raise FailedPrecondition("generator.inference_engine.engine_init_kwargs.worker_extension_cls is "
                                     f'{extension!r}; wanted "{WORKER_EXTENSION}"')
        self.weight_extractor = LiveExtractor(worker.model.model)
        self._weight_transfer_sender = Sender(self.refit_options, inference_engine_client)
        torch.distributed.barrier()


def policy_worker(options: Options) -> Any:
    """The Ray actor that takes the place of SkyRL's PolicyWorker, for `RayPPOTrainer.build_models`."""
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase

    if not options.plan:
        raise InvalidArgument("refit.plan is not set; wanted the path of a plan that all workers can read")
    worker = type("RefitPolicyWorker", (LiveShards, FSDPPolicyWorkerBase), {"__module__": __name__, "refit_options": options})
    return ray.remote(num_gpus=1)(worker)


class Experiment(BasePPOExp):
    """SkyRL's experiment with policy workers that refit. `cfg` is a `Config`."""

    def __init__(self, cfg: Any):
        if cfg.trainer.strategy != "fsdp":
            raise InvalidArgument(f'trainer.strategy is "{cfg.trainer.strategy}"; refit.skyrl has policy workers for "fsdp"')
        engine = cfg.generator.inference_engine
        engine.engine_init_kwargs = {**engine.engine_init_kwargs, "worker_extension_cls": WORKER_EXTENSION}
        super().__init__(cfg)

    def get_trainer(self, *args: Any, **kwargs: Any) -> Any:
        trainer = super().get_trainer(*args, **kwargs)
        build, options = trainer.build_models, self.cfg.refit
        trainer.build_models = lambda PolicyWorker, *others: build(policy_worker(options), *others)
        return trainer


@ray.remote(num_cpus=1)
def _run(cfg: Config) -> None:
    Experiment(cfg).run()


def main() -> None:
    """As SkyRL's own, which hands over to it where trainer.override_entrypoint says so."""
    cfg = Config.from_cli_overrides([text for text in sys.argv[1:] if not text.startswith("trainer.override_entrypoint=")])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(_run.remote(cfg))
