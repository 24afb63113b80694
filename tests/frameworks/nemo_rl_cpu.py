"""What NeMo-RL's processes lack on a CPU. Call this before they import NeMo-RL; Ray's workers call `set_up` as they start."""

import importlib.abc
import importlib.util
import sys
import types
import typing

import kernel_stand_ins
import typing_extensions

# What only training, its data and its logs need.
ABSENT = ("absl", "colored", "datasets", "debugpy", "decord", "math_verify", "matplotlib", "megatron", "mlflow", "modelopt", "nccl",
          "num2words", "nvidia_resiliency_ext", "pandas", "pynvml", "scipy", "soundfile", "swanlab", "tensorboard", "tensordict",
          "torchcodec", "transfer_queue", "transformer_engine", "wandb")  # fmt: skip


def stand_in():
    """For packages, and on Python 3.11 for the TypedDict that pydantic asks of NeMo-RL's types."""
    kernel_stand_ins.PACKAGES = dict.fromkeys(ABSENT, "2.20.0")
    if sys.version_info < (3, 12):
        typing.TypedDict = typing_extensions.TypedDict


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module as soon as it was imported."""

    def __init__(self, name, function):
        self._name, self._function = name, function

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        executed = spec.loader.exec_module

        def exec_module(module):
            executed(module)
            self._function(module)

        spec.loader.exec_module = exec_module
        return spec


class TorchOfCpus(types.ModuleType):
    """torch, whose current device is the CPU: NeMo Automodel builds models there."""

    def __init__(self):
        super().__init__("torch")
        self.cuda = types.SimpleNamespace(current_device=lambda: "cpu", empty_cache=lambda: None)

    def __getattr__(self, name):
        import torch

        return (lambda *_: torch.device("cpu")) if name == "device" else getattr(torch, name)


def set_up():
    """Has NeMo-RL's policy workers shard on the CPU, too, what they would on GPUs."""
    stand_in()
    import torch
    from torch.distributed import device_mesh

    made, started = device_mesh.init_device_mesh, torch.distributed.init_process_group
    device_mesh.init_device_mesh = torch.distributed.init_device_mesh = (
        lambda device_type, *sizes, **named: made("cpu", *sizes, **named))
    torch.distributed.init_process_group = lambda backend=None, **named: started("gloo", **named)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(total_memory=80 << 30)
    sys.meta_path.insert(0, AfterImport("nemo_automodel._transformers.auto_model",
                                        lambda module: setattr(module, "torch", TorchOfCpus())))
