"""What lets SGLang run where there is no GPU. Call it before sglang is imported.

Packages of kernels are empty: a model is built and loaded without a call of theirs, and SGLang on the CPU computes by torch
where it has none. `pretend_hopper` makes torch.cuda tell of a GPU, since SGLang's layers take their shapes and dtypes by it;
tensors that ask for it lie on the CPU.
"""

import importlib.abc
import importlib.machinery
import sys
import types

import torch

EMPTY = ("triton", "triton_kernels", "cuda", "sgl_kernel", "flashinfer", "deep_gemm", "deep_ep", "tilelang", "cutlass", "quack", "flash_attn")
CAPABILITY = (9, 0)
NAME = "NVIDIA H200"


class EmptyClass(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Empty(types.ModuleType):
    """A module that has every name: classes for those in capitals, else modules like it, which decorate as they are called."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
        self.__version__ = "0.0.0"
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            value = EmptyClass(name, (), {"__init__": lambda self, *_, **__: None})
        else:
            value = Empty(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *arguments, **options):
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]
        return lambda function=None, *_, **__: function

    def __bool__(self):
        return False

    def __or__(self, _):
        return self

    __ror__ = __getitem__ = __or__


class EmptyPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in EMPTY and not name.startswith("triton._"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        pass


def on_cpu(device):
    return torch.device("cpu") if isinstance(device, int) or str(device).startswith("cuda") else device


class CudaOnCpu(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types_, arguments=(), options=None):
        options = dict(options or {})
        if options.get("device") is not None:
            options["device"] = on_cpu(options["device"])
        if function is torch.Tensor.cuda:
            return arguments[0]
        if function is torch.Tensor.to:
            arguments = tuple(on_cpu(argument) if isinstance(argument, (str, torch.device)) else argument for argument in arguments)
        return function(*arguments, **options)


def pretend_hopper():
    """Makes torch.cuda tell of a Hopper GPU whose tensors lie on the CPU, in this process and those forked from it."""
    properties = types.SimpleNamespace(
        major=CAPABILITY[0], minor=CAPABILITY[1], name=NAME, total_memory=141 << 30, multi_processor_count=132,
        shared_memory_per_block_optin=227 << 10, L2_cache_size=50 << 20, warp_size=32, is_integrated=False,
    )  # fmt: skip
    cuda = {
        "is_available": True, "device_count": 8, "current_device": 0, "get_device_capability": CAPABILITY,
        "get_device_name": NAME, "get_device_properties": properties, "mem_get_info": (140 << 30, 141 << 30), "set_device": None,
        "synchronize": None, "empty_cache": None, "memory_allocated": 0, "max_memory_allocated": 0,
        "get_arch_list": ["sm_90a"], "is_initialized": True, "_lazy_init": None,
    }  # fmt: skip
    for name, value in cuda.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.cuda.Stream = torch.cuda.Event = type("Stream", (), {"__init__": lambda self, *_, **__: None})
    CudaOnCpu().__enter__()


def install_empty_packages():
    import torch._inductor.config  # these ask whether there is a Triton, before there is an empty one
    import torch.utils._triton

    torch.utils._triton.has_triton_package()
    sys.meta_path.insert(0, EmptyPackages())
    import deep_gemm

    deep_gemm.get_num_sms = lambda: 132  # an indexer sizes a buffer by it
