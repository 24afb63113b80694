"""Updates by vLLM's weight-transfer engines, from vllm_gpu.py's trainers into its engine.

From 0.28 on vLLM has an engine for trainers, which drives an update: it tells the engine what to do by a client, and sends. Here trainer
0 has the client, and the driver serves it. "refit" is Refit's backend, the other ways are vLLM's own.
"""
import multiprocessing.connection
import socket
import time

import refit.vllm

WAYS = {"refit": "refit", "nccl": "nccl", "nccl-unpacked": "nccl", "nccl_m2n": "nccl_m2n", "ipc": "ipc"}  # and their backends
M2N_NEEDS_NCCL = (2, 30, 5)


def why_not(way):
    """Why a way cannot run here, or ""."""
    import torch
    import vllm
    from vllm.distributed.weight_transfer import factory

    refit.vllm.register()
    trainers = getattr(factory, "WeightTransferTrainerFactory", None)
    if trainers is None:
        return f"vLLM {vllm.__version__} has no weight-transfer engine for trainers"
    if WAYS[way] not in trainers._registry:
        return f"vLLM {vllm.__version__} has no such backend"
    if way == "nccl_m2n":
        if torch.cuda.nccl.version() < M2N_NEEDS_NCCL:
            return f"it needs NCCL {dotted(M2N_NEEDS_NCCL)}; torch has {dotted(torch.cuda.nccl.version())}"
        try:
            import nccl.m2n  # noqa: F401
        except ImportError as error:
            return f"it needs the package nccl-extensions: {error}"
    return ""


def dotted(version):
    return ".".join(map(str, version))


# The trainer's side.


class Client:
    """What a trainer's engine tells vLLM's, the driver does."""

    def __init__(self, work):
        self._driver = multiprocessing.connection.Client(str(work / "client"))

    def _tell(self, method, *arguments):
        self._driver.send((method, arguments))
        if failed := self._driver.recv():
            raise RuntimeError(failed)

    def init_weight_transfer_engine(self, init_info):
        self._tell("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self):
        self._tell("start_weight_update")

    def update_weights(self, update_info):
        self._tell("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version=None):
        self._tell("finish_weight_update")


def trainer_of(way, model, rank, trainers, workers, port, work):
    """A trainer's engine. Collective over trainers and workers."""
    import torch
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    def meeting_at(senders):
        return {"rank": rank, "master_address": "127.0.0.1", "master_port": port, "world_size": senders + workers}

    client = Client(work) if rank == 0 else None
    if way == "refit":
        from refit.vllm_weight_transfer import RefitTrainerInitInfo

        refit.vllm.register()
        meeting = [refit.rendezvous.unique_id().hex() if rank == 0 else None]
        torch.distributed.broadcast_object_list(meeting, device=torch.device("cuda", rank))
        info = RefitTrainerInitInfo(plan=str(work / "plan.refit"), meeting=meeting[0], device=f"cuda:{rank}", rank=rank)
    elif way == "nccl_m2n":
        from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo

        info = M2NTrainerInitInfo(**meeting_at(trainers), num_trainer_ranks=trainers, dst_mesh_dims=(1, workers))
    elif way == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        info = IPCTrainerInitInfo(rank=rank)
    else:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info = NCCLTrainerInitInfo(**meeting_at(1), packed=way == "nccl")  # trainer 0 alone sends
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))


# The engine's side.


class Extension:
    """vLLM mixes these methods into its worker."""

    def use_transfer(self, backend):
        """A worker has one weight-transfer engine, of the configured backend, and calls it for each update."""
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        refit.vllm.register()
        self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=backend), self.vllm_config, self.device, self.model_runner.get_model())

    def leave_transfer(self):
        self.weight_transfer_engine.shutdown()

    def clear_weights(self):
        """So that an update that does nothing is found out."""
        import torch

        with torch.no_grad():
            for parameter in self.model_runner.get_model().parameters():
                parameter.zero_()
        torch.cuda.synchronize()


def serve(llm, client, last):
    """Does what trainer 0's client tells, until it has told `last`."""
    method = None
    while method != last:
        method, arguments = client.recv()
        try:
            getattr(llm, method)(*arguments)
        except Exception as error:
            client.send(f"{method}: {error}")
            raise
        client.send("")


def seconds_of(way, llm, trainers, work, updates):
    """The seconds of each update, from the driver's word to the trainers until the engine has finished. No caches are reset."""
    workers = llm.llm_engine.vllm_config.parallel_config.world_size
    llm.collective_rpc("use_transfer", args=(WAYS[way],))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with multiprocessing.connection.Listener(str(work / "client")) as listener:
        trainers.tell(f"transfer {way} {port} {workers}")
        with listener.accept() as client:
            serve(llm, client, "init_weight_transfer_engine")
            trainers.done()
            seconds = []
            for _ in range(updates):
                llm.collective_rpc("clear_weights")
                start = time.perf_counter()
                trainers.tell("send")
                serve(llm, client, "finish_weight_update")
                seconds.append(time.perf_counter() - start)
                trainers.done()
            trainers.tell("leave")
            llm.collective_rpc("leave_transfer")
            trainers.done()
    return seconds
