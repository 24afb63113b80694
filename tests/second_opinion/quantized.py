"""Matrices in fp8 blocks: values, scales, and where both stand on each rank.

Where a matrix's scales stand is not written down a second time. Each element of a matrix is replaced by its block's
scale, the result is laid out as any matrix, and of every block one element is kept.
"""

import dataclasses
import re
import zlib

import numpy

import values
from layout import Buffer

# Linear layers of attention, delta nets, MLP and experts.
LINEAR = re.compile(
    r".*\.(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkvz|out_proj)"
    r"|mlp\.(experts\.\d+\.|shared_expert\.)?(gate|up|down)_proj)\.weight"
)

# The magnitudes of e4m3 by their code; 0x7f is NaN.
MAGNITUDES = numpy.array(
    [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127]
)
LARGEST = numpy.float32(448)


@dataclasses.dataclass(frozen=True)
class Scheme:
    rows: int
    columns: int
    scales: str  # "fp32", "ue8m0" or "e8m0"
    suffix: str

    @property
    def scale_dtype(self):
        return "uint8" if self.scales == "e8m0" else "fp32"


def scheme_of(side):
    """None for a side that holds nothing quantized."""
    dtype = side.get("dtype")
    if dtype == "fp8_e4m3_block128":
        return Scheme(128, 128, side.get("scale_fmt", "fp32"), "_scale_inv")
    return Scheme(1, 32, "e8m0", "_scale") if dtype == "mxfp8_e4m3" else None


def is_linear(name):
    return LINEAR.fullmatch(name) is not None


def fp32(bits, dtype):
    return values.cast(bits, dtype, "fp32").view(numpy.float32)


def parameter(name, shape, dtype):
    """Finite values of all sizes, also such that a block is zero or nearly so."""
    random = numpy.random.default_rng(zlib.crc32(name.encode()))
    numbers = random.standard_normal(shape) * 2.0 ** random.integers(-12, 4, shape)
    if len(shape) == 2:
        sizes = 2.0 ** random.integers(-30, 12, (-(-shape[0] // 128), -(-shape[1] // 32)))
        sizes[random.random(sizes.shape) < 0.1] = 0
        numbers *= spread(sizes, Scheme(128, 32, "fp32", ""), shape)
    return values.cast(numbers.astype(numpy.float32).view(numpy.uint32), "fp32", dtype)


def spread(blocks, scheme, shape):
    """A matrix in which each element is its block's."""
    return blocks.repeat(scheme.rows, 0).repeat(scheme.columns, 1)[: shape[0], : shape[1]]


def encode(numbers):
    """fp32 to the nearest e4m3, ties to an even code, at most the largest."""
    magnitudes = numpy.minimum(numpy.abs(numbers.astype(numpy.float64)), MAGNITUDES[-1])
    above = numpy.searchsorted(MAGNITUDES, magnitudes)
    below = numpy.maximum(above - 1, 0)
    to_above, to_below = MAGNITUDES[above] - magnitudes, magnitudes - MAGNITUDES[below]
    is_up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return (numpy.where(is_up, above, below) | numpy.where(numpy.signbit(numbers), 0x80, 0)).astype(numpy.uint8)


def largest_of_blocks(numbers, scheme):
    rows, columns = (-(-extent // block) for extent, block in zip(numbers.shape, (scheme.rows, scheme.columns)))
    whole = numpy.zeros((rows * scheme.rows, columns * scheme.columns), numpy.float32)
    whole[: numbers.shape[0], : numbers.shape[1]] = numpy.abs(numbers)
    return whole.reshape(rows, scheme.rows, columns, scheme.columns).max((1, 3))


def power_above(numbers):
    """The exponent of the least power of two that is not below."""
    mantissas, exponents = numpy.frexp(numbers)
    return exponents - (mantissas == 0.5)


def quantize(numbers, scheme):
    """Returns (codes, bits of scales)."""
    largest = largest_of_blocks(numbers, scheme)
    if scheme.scales == "e8m0":
        exponents = numpy.where(largest > 0, numpy.clip(power_above(largest / LARGEST), -127, 127), -127)
        inverse = numpy.ldexp(numpy.float32(1), -exponents).astype(numpy.float32)
        return encode(numbers * spread(inverse, scheme, numbers.shape)), (exponents + 127).astype(numpy.uint8)
    scales = (numpy.maximum(largest, numpy.float32(1e-4)) / LARGEST).astype(numpy.float32)
    if scheme.scales == "ue8m0":
        scales = numpy.ldexp(numpy.float32(1), power_above(scales)).astype(numpy.float32)
    inverse = (numpy.float32(1) / scales).astype(numpy.float32)
    return encode(numbers * spread(inverse, scheme, numbers.shape)), scales.view(numpy.uint32)


def ranks(layout, model, side, scheme, plain, codes, scales, fill):
    """name -> Buffer of every rank. `plain`, `codes` and `scales` are bits by parameter."""
    plain_dtype = model.dtype

    def laid_out(tensor_of, dtype, padding):
        tensors = {name: tensor_of(name) for name in model.parameters()}
        return layout.ranks(model, side, tensors, values.Padding(dtype, padding), dtype)

    def of_values(name):
        return codes[name].astype(values.bits_type(plain_dtype)) if is_linear(name) else plain[name]

    def of_scales(name):
        shape = model.parameters()[name]
        if not is_linear(name):
            return numpy.zeros(shape, numpy.uint32)
        return spread(scales[name].astype(numpy.uint32), scheme, shape)

    def of_marks(name):
        return numpy.full(model.parameters()[name], is_linear(name), numpy.uint32)

    sides = laid_out(of_values, plain_dtype, fill), laid_out(of_scales, "fp32", 0), laid_out(of_marks, "fp32", 0)
    for of_rank in zip(*sides):
        buffers = {}
        for name, buffer in of_rank[0].items():
            if of_rank[2][name].bits.size == 0 or not of_rank[2][name].bits.all():
                buffers[name] = buffer
                continue
            buffers[name] = Buffer("fp8_e4m3", buffer.bits.astype(numpy.uint8))
            kept = of_rank[1][name].bits[..., :: scheme.rows, :: scheme.columns]
            kept = kept.astype(values.bits_type(scheme.scale_dtype))
            # SGLang has one name for the scales of all blocks.
            suffix = "_scale_inv" if side["layout"] == "sglang" else scheme.suffix
            buffers[name + suffix] = Buffer(scheme.scale_dtype, kept)
        yield buffers


def both_sides(job, destination_layout, source_layout, plain_ranks):
    """The source's and the destination's ranks of a job whose destination is quantized.

    `plain_ranks(side, tensors, padding, dtype)` lays out a side of which nothing is quantized.
    """
    scheme = scheme_of(job.destination)
    shapes = job.model.parameters()
    is_quantized_before = scheme_of(job.source) is not None
    source_dtype = job.model.dtype if is_quantized_before else job.source.get("dtype", job.model.dtype)
    plain = {name: parameter(name, shape, source_dtype) for name, shape in shapes.items()}
    codes, scales = {}, {}
    for name in filter(is_linear, shapes):
        codes[name], scales[name] = quantize(fp32(plain[name], source_dtype), scheme)
    garbage = values.GARBAGE[source_dtype]
    if is_quantized_before:
        source = ranks(source_layout, job.model, job.source, scheme, plain, codes, scales, garbage)
    else:
        source = plain_ranks(job.source, plain, values.Padding(source_dtype, garbage), source_dtype)
    cast = {name: values.cast(bits, source_dtype, job.model.dtype) for name, bits in plain.items()}
    wanted = ranks(destination_layout, job.model, job.destination, scheme, cast, codes, scales, 0)
    return list(source), list(wanted)
