"""Arithmetic of the elements that a refit changes: casts, post-hooks, fp8 blocks. compiler/layout/README.md has the formulas.

For `refit.check`, which must not take the executor's word. Needs numpy alone: bf16 and fp8 are handled as bits.
"""
from __future__ import annotations

from typing import Any, NamedTuple

# The unsigned integers that hold a dtype's elements.
BITS = {"bf16": "u2", "fp16": "u2", "fp32": "u4", "fp64": "u8", "int8": "u1", "int16": "u2", "int32": "u4", "int64": "u8",
        "uint8": "u1", "bool": "u1", "fp8_e4m3": "u1", "fp8_e5m2": "u1"}
_NUMPY = {"fp16": "f2", "fp32": "f4", "fp64": "f8", "int8": "i1", "int16": "i2", "int32": "i4", "int64": "i8", "uint8": "u1",
          "bool": "u1"}


# Post-hooks that are arithmetic of each element.
ARITHMETIC = ("negative-exp", "log-of-negative", "add-one", "subtract-one")


class Values(NamedTuple):
    """Elements of a tensor: unsigned integers as wide as the dtype, in the tensor's shape."""

    dtype: str
    bits: Any


def decode(values: Values) -> Any:
    """Elements as numbers: fp64 as such, narrower floats as fp32, integers as they are."""
    import numpy as np

    dtype, bits = values
    if dtype == "bf16":
        return (bits.astype("u4") << 16).view("f4")
    if dtype == "fp8_e4m3":
        code = np.arange(127)
        exponent, mantissa = code >> 3, code & 7
        magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0**(exponent - 10.0))
        found = np.append(magnitude, np.nan).astype("f4")[bits & 0x7f]
        return np.where(bits & 0x80, -found, found)
    if dtype == "fp8_e5m2":
        return (bits.astype("u2") << 8).view("f2").astype("f4")
    found = np.ascontiguousarray(bits).view(_NUMPY[dtype])
    return found.astype("f4") if dtype == "fp16" else found


def encode(numbers: Any, dtype: str) -> Values:
    """Rounds to nearest even. fp8_e4m3 ends at 448 as the executor's does; fp8_e5m2 has infinities, as torch's."""
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "bf16":
            bits = np.ascontiguousarray(numbers, "f4").reshape(np.shape(numbers)).view("u4")
            rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16
            return Values(dtype, np.where((bits & 0x7fffffff) > 0x7f800000, (bits >> 16) | 0x40, rounded).astype("u2"))
        if dtype == "fp8_e4m3":
            magnitude = np.minimum(np.abs(np.ascontiguousarray(numbers, "f4")), np.float32(448))
            bits = magnitude.view("u4")
            normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # three bits of mantissa, bias 7
            found = np.where(magnitude < 2.0**-6, np.rint(magnitude * np.float32(512)).astype("u4"), normal)
            sign = np.signbit(numbers) & ~np.isnan(numbers)
            return Values(dtype, (np.where(np.isnan(numbers), 0x7f, found) | np.where(sign, 0x80, 0)).astype("u1"))
        if dtype == "fp8_e5m2":
            magnitude = np.abs(np.ascontiguousarray(numbers, "f4").reshape(np.shape(numbers)))
            bits = magnitude.view("u4")
            normal = ((bits + 0xfffff + ((bits >> 21) & 1)) >> 21) - (112 << 2)  # two bits of mantissa, bias 15
            found = np.where(magnitude < 2.0**-14, np.rint(magnitude * np.float32(2.0**16)), np.minimum(normal, 0x7c)).astype("u4")
            found = np.where(np.isnan(magnitude), 0x7e, found)
            return Values(dtype, (found | np.where(np.signbit(numbers), 0x80, 0)).astype("u1"))
        return Values(dtype, np.ascontiguousarray(numbers, _NUMPY[dtype]).reshape(np.shape(numbers)).view(BITS[dtype]))


def convert(values: Values, dtype: str) -> Values:
    """A cast as the executor does it; the same elements if the dtype is the same."""
    return values if values.dtype == dtype else encode(decode(values), dtype)


def after_hook(hook: str, values: Values) -> Values:
    """What an arithmetic post-hook makes of elements; others leave them. In fp64, rounded to fp32 and to the dtype."""
    import numpy as np

    functions = {"negative-exp": lambda x: -np.exp(x), "log-of-negative": lambda x: np.log(-x), "add-one": lambda x: x + 1,
                 "subtract-one": lambda x: x - 1}
    if hook not in functions:
        return values
    with np.errstate(all="ignore"):
        return encode(functions[hook](decode(values).astype("f8")).astype("f4"), values.dtype)


def before_hook(hook: str, values: Values) -> Values:
    """From a checkpoint's elements to those of a source whose destination has the post-hook: only of a zero-centred norm
    they differ."""
    return after_hook("subtract-one", values) if hook == "add-one" else values


def quantized(values: Values, block: tuple[int, int], scale_format: str, on_gpu: bool) -> tuple[Values, Values]:
    """fp8 elements and scales of matrices, whose blocks lie in the last two dimensions, as a GPU or a CPU computes them.

    PyTorch and the executor divide by 448 on CPUs. On GPUs both multiply by its reciprocal, rounded to fp32.
    """
    import numpy as np

    numbers = decode(values)
    *outer, rows, columns = numbers.shape
    padding = [(0, 0)] * len(outer) + [(0, -rows % block[0]), (0, -columns % block[1])]
    padded = np.pad(numbers, padding)
    blocks = padded.reshape(*outer, padded.shape[-2] // block[0], block[0], padded.shape[-1] // block[1], block[1])
    with np.errstate(all="ignore"):
        largest = np.abs(blocks).max(axis=(-3, -1), keepdims=True)  # NaN if a block has one
        if scale_format == "e8m0":
            scale = np.maximum(_power_of_two(largest / np.float32(448)), np.float32(2.0**-127))
        else:
            least = np.maximum(largest, np.float32(1e-4))
            scale = least * (np.float32(1) / np.float32(448)) if on_gpu else least / np.float32(448)
            if scale_format == "ue8m0":
                scale = _power_of_two(scale)
        scaled = (blocks * (np.float32(1) / scale)).reshape(padded.shape)[..., :rows, :columns]
    found = encode(scaled, "fp8_e4m3")
    flat = scale.squeeze((-3, -1))
    if scale_format != "e8m0":
        return found, encode(flat, "fp32")
    exponent = np.where(np.isnan(flat), 255, np.clip(np.frexp(flat)[1] + 126, 0, 254))
    return found, Values("uint8", np.where(np.isinf(flat), 254, exponent).astype("u1"))


def _power_of_two(numbers: Any) -> Any:
    """Rounded up to a power of two."""
    import numpy as np

    fraction, exponent = np.frexp(numbers)
    return np.where(np.isfinite(numbers) & (numbers > 0),
                    np.ldexp(np.float32(1), exponent - (fraction == 0.5)).astype("f4"), numbers)
