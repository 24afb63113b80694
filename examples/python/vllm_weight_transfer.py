"""A weight-transfer engine for vLLM, in the shape of vllm.distributed.weight_transfer: worker side and trainer side.

    register()                                                # in every process, before vLLM makes its engines
    LLM(model, weight_transfer_config=WeightTransferConfig(backend="refit"), …)

Trainer, on every rank: `RefitTrainer.trainer_init(config, RefitTrainerInitInfo(plan, rank=rank), client=…, source=…)`, then
`send_weights()` after each step. `source` is any object with `named_tensors()`: this rank's own shards, which the plan's
source names; nothing is gathered.
"""
import dataclasses
import threading

import refit
from vllm.distributed.weight_transfer.base import (TrainerInitInfo, TrainerWeightTransferEngine, WeightTransferEngine,
                                                   WeightTransferInitInfo, WeightTransferUpdateInfo)


@dataclasses.dataclass
class RefitInitInfo(WeightTransferInitInfo):
    """What a worker needs to join: the plan's file, and the id that all ranks meet by."""

    plan: str
    unique_id: str  # as hex
    engine: int = 0


@dataclasses.dataclass
class RefitUpdateInfo(WeightTransferUpdateInfo):
    """Nothing: the plan knows."""


class RefitEngine(WeightTransferEngine):
    init_info_cls = RefitInitInfo
    update_info_cls = RefitUpdateInfo
    supports_draft_weight_update = False
    _refit = None

    def init_transfer_engine(self, init_info):
        plan = refit.Plan.load(init_info.plan)
        parallel = self.parallel_config
        rank = (plan.source_ranks + init_info.engine * parallel.world_size * parallel.data_parallel_size
                + parallel.data_parallel_index * parallel.world_size + parallel.rank)
        self._refit = refit.join(plan, rank, dict(self.model.named_parameters()),
                                 buffers=dict(self.model.named_buffers()),
                                 unique_id=bytes.fromhex(init_info.unique_id), device=self.device)

    def start_weight_update(self):
        """Weights are written in place, in the layout of the live model: nothing to prepare."""

    def receive_weights(self, update_info):
        if self._refit is None:
            raise RuntimeError("init_transfer_engine was not called")
        self._refit.run()

    def finish_weight_update(self):
        """Nothing to finish either."""

    def shutdown(self):
        if self._refit is not None:
            self._refit.close()
            self._refit = None

    @staticmethod
    def trainer_send_weights(iterator, trainer_args):
        """Runs the trainer's part; `trainer_args` has its executor. The iterator is not read: it is bound already."""
        trainer_args["executor"].run()


@dataclasses.dataclass
class RefitTrainerInitInfo(TrainerInitInfo):
    plan: str
    unique_id: str = ""  # made by rank 0 and handed to the other trainers, as hex
    device: str = "cuda"


class RefitTrainer(TrainerWeightTransferEngine):
    """Every trainer rank is a source rank of the plan; rank 0 also tells the workers what to do."""

    init_info_cls = RefitTrainerInitInfo
    config_cls = object

    @classmethod
    def trainer_init(cls, config, init_info, *, client, source):
        engine = cls(config, client=client, source=source, is_sender=init_info.is_sender)
        engine._call_while(
            lambda: client.init_weight_transfer_engine({"plan": init_info.plan, "unique_id": init_info.unique_id}),
            lambda: engine._join(init_info))
        return engine

    def _join(self, init_info):
        self._refit = refit.join(refit.Plan.load(init_info.plan), init_info.rank, self.source.named_tensors(),
                                 unique_id=bytes.fromhex(init_info.unique_id), device=init_info.device)

    def send_weights(self):
        def workers():
            self.client.start_weight_update()
            self.client.update_weights({})
            self.client.finish_weight_update()

        self._call_while(workers, self._refit.run)

    def _call_while(self, call, own_part):
        """The sender's call returns when the workers are through, who need all trainers meanwhile."""
        if not self.is_sender:
            return own_part()
        failed = []

        def guarded():
            try:
                call()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        own_part()
        thread.join()
        if failed:
            raise failed[0]

    def shutdown(self):
        self._refit.close()


def register():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    WeightTransferEngineFactory.register_engine("refit", RefitEngine)
    WeightTransferTrainerFactory.register_engine("refit", RefitTrainer)
