"""What SkyRL's processes lack on a CPU. Call this before they import SkyRL; Ray's workers call `set_up` as they start."""

import sys
import typing

import kernel_stand_ins
import typing_extensions


def stand_in():
    """For flash_attn, and on Python 3.11 for the TypedDict that pydantic asks of SkyRL's types."""
    kernel_stand_ins.PACKAGES = {"flash_attn": "2.8.3"}
    if sys.version_info < (3, 12):
        typing.TypedDict = typing_extensions.TypedDict


def set_up():
    """Has SkyRL's policy workers shard on the CPU, too, what they would on GPUs."""
    stand_in()
    import torch
    from torch.distributed import device_mesh

    made, empty = device_mesh.init_device_mesh, torch.empty
    device_mesh.init_device_mesh = torch.distributed.init_device_mesh = lambda device, *sizes, **named: made("cpu", *sizes, **named)
    torch.empty = lambda *sizes, device=None, **named: empty(*sizes, device="cpu" if device == "cuda" else device, **named)
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
