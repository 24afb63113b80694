"""The values of logical parameters, and what a cast makes of them. All are bits (see safetensors.py)."""

import zlib

import numpy

import safetensors

SAFETENSORS_NAME = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp8_e4m3": "F8_E4M3", "uint8": "U8"}
GARBAGE = {"bf16": 0xDEAD, "fp16": 0xDEAD, "fp32": 0xDEADBEEF}


def bits_type(dtype):
    return safetensors.BITS[SAFETENSORS_NAME[dtype]]


def _spread_exponents(random, bits):
    """fp32 bits most of which lie where bf16 and fp16 round, tie, overflow and turn subnormal."""
    exponents = random.integers(96, 150, bits.shape, dtype=numpy.uint32)
    near = random.random(bits.shape) < 0.75
    bits = numpy.where(near, (bits & 0x807FFFFF) | (exponents << 23), bits).astype(numpy.uint32)
    kind = random.integers(0, 4, bits.shape)
    bits = numpy.where(kind == 0, (bits & 0xFFFF0000) | 0x8000, bits)  # halfway between two bf16
    return numpy.where(kind == 1, (bits & 0xFFFFE000) | 0x1000, bits)  # halfway between two fp16


def parameter(name, shape, dtype, is_cast):
    """Bits that depend on nothing but the arguments. What a cast makes of NaN is not specified: then there is none."""
    random = numpy.random.default_rng(zlib.crc32(name.encode()))
    bits = random.integers(0, 1 << 8 * bits_type(dtype).itemsize, shape, dtype=numpy.uint64)
    bits = numpy.asarray(bits).astype(bits_type(dtype))
    if not is_cast:
        return bits
    if dtype == "fp32":
        bits = _spread_exponents(random, bits)
    infinity = {"bf16": 0x7F80, "fp16": 0x7C00, "fp32": 0x7F800000}[dtype]
    sign = 1 << 8 * bits_type(dtype).itemsize - 1
    is_nan = (bits & (sign - 1)) > infinity
    return numpy.where(is_nan, bits & (sign | infinity), bits).astype(bits_type(dtype))


def cast(bits, source, destination):
    """Rounds to nearest, ties to even."""
    if source == destination:
        return bits
    if source == "bf16":
        wide = numpy.left_shift(bits, 16, dtype=numpy.uint32)
    elif source == "fp16":
        wide = bits.view(numpy.float16).astype(numpy.float32).view(numpy.uint32)
    else:
        wide = bits
    if destination == "fp32":
        return wide
    if destination == "fp16":
        with numpy.errstate(over="ignore"):
            return wide.view(numpy.float32).astype(numpy.float16).view(numpy.uint16)
    # Half of the last kept bit, less one if that bit is even, carries exactly when rounding goes up.
    rounded = (wide.astype(numpy.uint64) + 0x7FFF + ((wide >> 16) & 1)) >> 16
    return numpy.asarray(rounded).astype(numpy.uint16)


class Padding:
    """Fills what no parameter feeds."""

    def __init__(self, dtype, value):
        self.dtype, self.value = dtype, value

    def __call__(self, *shape):
        return numpy.full(shape, self.value, bits_type(self.dtype))
