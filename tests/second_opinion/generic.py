"""Meshes and DTensor placements."""

import fnmatch
import re

import numpy

from layout import Buffer
from values import cast


def chunk(indices, part, parts):
    """torch.chunk: parts of ceil(n / parts), the last ones shorter or empty."""
    size = -(-len(indices) // parts)
    return indices[part * size : (part + 1) * size]


def place(indices, placement, coordinate, size):
    """Narrows the per-dimension `indices` that one mesh axis leaves to `coordinate`."""
    kind, *arguments = re.findall(r"[A-Za-z_]+|\d+", placement.replace("split_factor=", ""))
    if kind == "Replicate":
        return
    dim = int(arguments[0])
    if kind == "Shard":
        indices[dim] = chunk(indices[dim], coordinate, size)
        return
    # FSDP inside TP: every one of `factor` parts is cut by this axis.
    factor = int(arguments[1])
    parts = [chunk(indices[dim], part, factor) for part in range(factor)]
    indices[dim] = numpy.concatenate([chunk(part, coordinate, size) for part in parts])


def ranks(side, tensors, parameter_dtype, dtype):
    """name -> Buffer of every rank; `tensors` are of `parameter_dtype`, buffers of `dtype` unless a rule says else."""
    meshes = {}
    for name, mesh in side["meshes"].items():
        shape = tuple(mesh["axes"].values())
        meshes[name] = shape, mesh.get("ranks", list(range(int(numpy.prod(shape)))))
    buffers = [{} for _ in range(1 + max(max(numbers) for _, numbers in meshes.values()))]
    for name, tensor in tensors.items():
        rule = next(rule for rule in side["tensors"] if fnmatch.fnmatchcase(name, rule["match"]))
        shape, numbers = meshes[rule["mesh"]]
        buffer_dtype = rule.get("dtype", dtype)
        bits = cast(tensor, parameter_dtype, buffer_dtype)
        for position, rank in enumerate(numbers):
            indices = [numpy.arange(extent) for extent in tensor.shape]
            for placement, coordinate, size in zip(rule["placements"], numpy.unravel_index(position, shape), shape):
                place(indices, placement, int(coordinate), size)
            local = bits[numpy.ix_(*indices)] if indices else bits
            buffers[rank][rule.get("rename", "{name}").replace("{name}", name)] = Buffer(buffer_dtype, local)
    return buffers
