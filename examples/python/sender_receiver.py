"""A sender and a receiver as SkyRL's weight_sync strategies pair them, and NeMo-RL's policy and generation workers.

    init_info = RefitTransferStrategy.create_init_info(plan_path, unique_id)     # the controller
    sender = RefitTransferStrategy.create_sender(init_info, client, rank, named_tensors)     # every trainer
    receiver = RefitTransferStrategy.create_receiver(init_info, rank, model)     # every inference worker, same time
    await sender.send_chunks(())                                                 # every step, on every trainer

Other strategies gather whole tensors into chunks and stream them to a loader. Here trainers send what they hold, and the
weights are in place when the receiver returns: there are no chunks to gather, and nothing for a loader to do.
"""
import asyncio
import dataclasses

import refit


@dataclasses.dataclass(frozen=True)
class RefitInitInfo:
    """Plain values, for any RPC."""

    plan: str
    unique_id: str  # as hex; made in the process of source rank 0

    @staticmethod
    def strategy_type():
        return RefitTransferStrategy


class RefitSender:
    """The client has `update_named_weights(request)`: a coroutine that returns when all receivers have answered."""

    def __init__(self, executor, client):
        self._executor = executor
        self._client = client

    async def send_chunks(self, chunks=(), weight_metadata=None):
        own_part = asyncio.to_thread(self._executor.run)
        if self._executor.rank == 0:  # one trainer tells the workers, who receive while all trainers send
            await asyncio.gather(own_part, self._client.update_named_weights({"strategy": "refit"}))
        else:
            await own_part

    def teardown(self):
        self._executor.close()


class RefitReceiver:
    def __init__(self, executor):
        self._executor = executor

    def receive_weights(self, request):
        """Yields nothing: the weights are in the model when the iteration ends."""
        self._executor.run()
        return iter(())

    def teardown(self):
        self._executor.close()


class RefitTransferStrategy:
    @staticmethod
    def create_init_info(plan, unique_id):
        return RefitInitInfo(plan=str(plan), unique_id=unique_id.hex())

    @staticmethod
    def create_sender(init_info, client, rank, named_tensors, device="cuda"):
        plan = refit.Plan.load(init_info.plan)
        return RefitSender(refit.join(plan, rank, named_tensors, device=device,
                                      unique_id=bytes.fromhex(init_info.unique_id)), client)

    @staticmethod
    def create_receiver(init_info, rank, model, device="cuda"):
        """`rank` counts the inference workers alone."""
        plan = refit.Plan.load(init_info.plan)
        return RefitReceiver(refit.join(
            plan, plan.source_ranks + rank, dict(model.named_parameters()), buffers=dict(model.named_buffers()),
            device=device, unique_id=bytes.fromhex(init_info.unique_id)))
