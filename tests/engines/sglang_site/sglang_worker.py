"""A plugin of SGLang for sglang_cpu.py: a scheduler saves the tensors of its model whenever it tells its facts."""


def register():
    import os

    import refit.sglang
    import torch
    from sglang.srt.distributed.device_communicators import pynccl

    # SGLang makes NCCL's communicators for pipeline stages on the CPU too.
    pynccl.PyNcclCommunicator = lambda **_: None

    told = refit.sglang.Worker.facts

    def facts(worker):
        place = refit.sglang.place_of(worker._parallel)
        model = worker._runner.model
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        for path, module in model.named_modules():  # what it derived from its weights
            tensors |= {f"{path}.{name}": value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
        file = os.path.join(os.environ["REFIT_TEST_STATE"], f"{place.pipeline_rank}.{place.tensor_rank}.pt")
        torch.save({name: tensor.detach().clone() for name, tensor in tensors.items()}, file)
        return {**told(worker), "state": file}

    refit.sglang.Worker.facts = facts
