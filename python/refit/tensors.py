"""Tensors as the executor takes them: address, dtype, shape. torch, numpy, and whatever shows an array interface.

No array library is imported here: what a tensor is, its own attributes say.
"""
from __future__ import annotations

import math
import sys
from typing import Any, Callable, NamedTuple, Optional

from refit.errors import InvalidArgument

# What torch puts around a layer whose activations are checkpointed: a part of its parameters' names, but not of state_dict's.
WRAPPER = "_checkpoint_wrapped_module."

# As torch and numpy name them -> as a plan does.
DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "int8": "int8", "int16": "int16",
    "int32": "int32", "int64": "int64", "uint8": "uint8", "bool": "bool", "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}


class View(NamedTuple):
    """Where a tensor is. `problem` says why it cannot be bound, "" if it can."""

    address: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]
    device: str
    problem: str = ""


def local_part(tensor: Any) -> Any:
    """Of a DTensor what this rank holds; anything else as it is."""
    if hasattr(tensor, "_local_tensor"):  # to_local tells autograd, 8 µs
        return tensor._local_tensor
    return tensor.to_local() if hasattr(tensor, "placements") and hasattr(tensor, "to_local") else tensor


def locator(tensor: Any) -> Callable[[], int]:
    """Tells where a tensor is now: asked of every tensor before every refit, so it must be quick."""
    if hasattr(tensor, "_local_tensor"):  # a DTensor
        return lambda: int(tensor._local_tensor.data_ptr())
    if hasattr(tensor, "data_ptr"):
        return tensor.data_ptr  # type: ignore[no-any-return]
    return lambda: view(tensor).address


def dtype_name(dtype: Any) -> Optional[str]:
    """The plan's name of a torch or numpy dtype; None if it has none."""
    return DTYPES.get(str(getattr(dtype, "name", dtype)).removeprefix("torch."))


def numpy_dtype(name: str) -> Any:
    """The numpy dtype of a plan's dtype; bf16 and fp8 are those of ml_dtypes, which must be installed then."""
    import numpy as np

    by_plan = {plan: array for array, plan in DTYPES.items()}
    if name not in by_plan:
        raise InvalidArgument(f'dtype is "{name}"; wanted one of {", ".join(by_plan)}')
    if name != "bf16" and not name.startswith("fp8"):
        return np.dtype(by_plan[name])
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError(f"{name} in numpy needs ml_dtypes: pip install ml_dtypes") from None
    return np.dtype(getattr(ml_dtypes, by_plan[name]))


def view(tensor: Any) -> View:
    local = local_part(tensor)
    if hasattr(local, "data_ptr") and hasattr(local, "is_contiguous"):
        return _torch_view(local)
    for attribute, device in (("__cuda_array_interface__", "cuda"), ("__array_interface__", "cpu")):
        interface = getattr(local, attribute, None)
        if interface is not None:
            return _array_view(local, interface, device)
    return View(0, 0, "", (), "", f"{type(tensor).__name__} is no tensor; wanted torch, numpy or an array interface")


def words_view(bits: Any) -> View:
    """The 32-bit words of a bitmap."""
    # No dtype of a plan, but the words of a bitmap.
    if str(getattr(bits, "dtype", "")) == "uint32":
        bits = bits.view("i4")
    elif str(getattr(bits, "dtype", "")) == "torch.uint32":
        bits = bits.view(sys.modules["torch"].int32)
    seen = view(bits)
    if not seen.problem and seen.dtype != "int32":
        return seen._replace(address=0, problem=f"has dtype {seen.dtype}; wanted int32 or uint32")
    return seen


def bitmap_view(bits: Any, elements: int) -> View:
    """A bitmap of a tensor's changes: a bit for each of its elements."""
    seen = words_view(bits)
    words = (elements + 31) // 32
    if seen.problem or seen.size_bytes == 4 * words:
        return seen
    return seen._replace(address=0, problem=f"has {seen.size_bytes // 4} words; wanted {words}, a bit for each of {elements} "
                                            "elements")


def _torch_view(tensor: Any) -> View:
    dtype = dtype_name(tensor.dtype)
    problem = ""
    if dtype is None:
        problem = f"has dtype {tensor.dtype}, which no plan has"
    elif tensor.device.type not in ("cpu", "cuda"):
        problem = f"is on device {tensor.device}; wanted cpu or cuda"
    elif str(getattr(tensor, "layout", "torch.strided")) != "torch.strided":
        problem = f"has layout {tensor.layout}; wanted a dense tensor"
    elif not tensor.is_contiguous():
        wanted = [math.prod(tensor.shape[dim + 1:]) for dim in range(len(tensor.shape))]
        problem = f"is not contiguous: shape {list(tensor.shape)}, strides {list(tensor.stride())}; wanted strides {wanted}"
    address = 0
    try:
        address = 0 if problem else tensor.data_ptr()
    except RuntimeError:  # of a FakeTensor
        pass
    if address == 0 and tensor.numel() > 0 and not problem:
        problem = f"is a {type(tensor).__name__}, which has no memory of its own; wanted the tensors that it is made of"
    return View(address, tensor.numel() * tensor.element_size(), dtype or "",
                tuple(tensor.shape), str(tensor.device), problem)


def _array_view(array: Any, interface: dict[str, Any], device: str) -> View:
    dtype = dtype_name(getattr(array, "dtype", None))
    shape = tuple(interface["shape"])
    item_bytes = int(interface["typestr"][2:])
    size_bytes = item_bytes * math.prod(shape)
    address, read_only = interface["data"]
    strides = interface.get("strides")
    problem = ""
    if dtype is None or interface["typestr"][0] == ">":
        problem = f"has dtype {getattr(array, 'dtype', None)}, which no plan has"
    elif strides is not None and size_bytes > 0 and tuple(strides) != _dense_strides(shape, item_bytes, strides):
        problem = f"is not contiguous: shape {list(shape)}, strides {list(strides)} bytes"
    elif read_only:
        problem = "is read-only"
    return View(0 if problem else address, size_bytes, dtype or "", shape, device, problem)


def _dense_strides(shape: tuple[int, ...], item_bytes: int, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides; of a dimension of one element any stride will do."""
    dense = []
    for extent, stride in zip(reversed(shape), reversed(strides)):
        dense.append(stride if extent == 1 else item_bytes)
        item_bytes *= extent
    return tuple(reversed(dense))
