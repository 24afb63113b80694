"""Meshes and DTensor placements; flat buffers."""

import fnmatch
import re

import numpy

from layout import Buffer
from values import GARBAGE, Padding, cast


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


def whole_flat_buffer(flat, layer, tensors, parameter_dtype, dtype, gaps):
    """All of a flat buffer, and the names of what it holds."""
    whole, held = gaps(flat["length"]), set()
    for entry in flat["entries"]:
        name = entry["param"].replace("{layer}", str(layer))
        rows = slice(*entry["rows"]) if "rows" in entry else ...
        part = cast(tensors[name][rows], parameter_dtype, dtype).ravel()
        whole[entry["offset"] : entry["offset"] + part.size] = part
        held.add(name)
    return whole, held


def place_flat_buffer(flat, mesh, tensors, parameter_dtype, dtype, padding, buffers):
    """Adds its shards to `buffers`; returns the names of what it holds."""
    dtype = flat.get("dtype", dtype)
    gaps = Padding(dtype, GARBAGE[dtype] if padding.value else 0)
    shape, numbers = mesh
    held = set()
    for layer in range(*flat.get("layers", (0, 1))):
        whole, names = whole_flat_buffer(flat, layer, tensors, parameter_dtype, dtype, gaps)
        held |= names
        for position, rank in enumerate(numbers):
            if "ranges" in flat:
                indices = [numpy.arange(*flat["ranges"][position])]
            else:
                indices = [numpy.arange(flat["length"])]
                for placement, coordinate, size in zip(flat["placements"], numpy.unravel_index(position, shape), shape):
                    place(indices, placement, int(coordinate), size)
            buffers[rank][flat["name"].replace("{layer}", str(layer))] = Buffer(dtype, whole[indices[0]])
    return held


def ranks(side, tensors, parameter_dtype, dtype, padding):
    """name -> Buffer of every rank; `tensors` are of `parameter_dtype`, buffers of `dtype` unless a rule says else.

    `padding` is what stands in the gaps of flat buffers.
    """
    meshes = {}
    for name, mesh in side["meshes"].items():
        shape = tuple(mesh["axes"].values())
        meshes[name] = shape, mesh.get("ranks", list(range(int(numpy.prod(shape)))))
    buffers = [{} for _ in range(1 + max(max(numbers) for _, numbers in meshes.values()))]
    held = set()
    for flat in side.get("flat_buffers", []):
        held |= place_flat_buffer(flat, meshes[flat["mesh"]], tensors, parameter_dtype, dtype, padding, buffers)
    for name, tensor in tensors.items():
        if name in held:
            continue
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
