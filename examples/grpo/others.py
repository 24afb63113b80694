"""The ways of grpo.py that are not Refit: through a file, and the frameworks' own."""


class ByFile:
    backend, how = None, "save_pretrained, vLLM's reload_weights, reset of its caches; nothing is compared"

    def __init__(self, run):
        without_communicator()
        self.run, self.directory = run, run.work / "through-a-file"

    def send(self, generation):
        import torch

        if generation.accelerator.is_main_process:
            model, server = generation.accelerator.unwrap_model(generation.model), self.run.server
            model.save_pretrained(self.directory, state_dict={name: t.to(torch.bfloat16) for name, t in model.state_dict().items()})
            server.post("/collective_rpc", method="reload_weights", kwargs={"weights_path": str(self.directory)})
            server.post("/reset_prefix_cache")
            server.post("/reset_encoder_cache")
            server.post("/update_weight_version", new_version=self.run.version())

    def facts(self):
        return {"bytes": sum(file.stat().st_size for file in self.directory.glob("*.safetensors")), "digest": None}


class ByNccl:
    backend, how = "nccl", "TRL's own way, vLLM's nccl backend; nothing is compared"

    def __init__(self, run):
        from trl.generation.vllm_generation import VLLMGeneration

        self.run, self.send = run, VLLMGeneration.sync_weights

    def facts(self):
        return {"bytes": sum(p.numel() * p.element_size() for p in self.run.model.parameters()), "digest": None}


class ByIpc(ByNccl):
    backend, how = "ipc", "vLLM's ipc backend: NCCL lets no two processes share a GPU; nothing is compared"

    def __init__(self, run):
        without_communicator()
        self.run, self.sender = run, None

    def send(self, generation):
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        if self.sender is None:
            self.sender = WeightTransferTrainerFactory.trainer_init(
                IPCTrainerInitInfo(rank=0), source=ModuleSource(generation.model), client=HTTPVLLMWeightSyncClient(self.run.server.url))
        self.sender.send_weights()
        self.run.server.post("/reset_prefix_cache")


def without_communicator():
    """TRL's client makes an NCCL group when a trainer is made."""
    from trl.generation.vllm_client import VLLMClient

    VLLMClient.init_communicator = lambda client, device=0: None
