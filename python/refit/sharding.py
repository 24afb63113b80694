"""Placements as DTensor means them: which part of a dimension a coordinate holds.

A second opinion beside the compiler's own arithmetic: `merge` compares with it what each rank says it holds.
"""
from __future__ import annotations

import re
from typing import NamedTuple, Optional, Sequence


class Placement(NamedTuple):
    """How a tensor lies over one mesh axis. `dim` is None if it is replicated."""

    dim: Optional[int] = None
    split_factor: Optional[int] = None  # of a strided shard

    def __str__(self) -> str:
        if self.dim is None:
            return "Replicate"
        if self.split_factor is None:
            return f"Shard({self.dim})"
        return f"StridedShard({self.dim}, split_factor={self.split_factor})"


_TEXT = re.compile(r"(?:Replicate|R)(?:\(\))?$|(?:_?Strided)?Shard\((?:dim=)?(-?\d+)(?:, *(?:split_factor|sf)=(\d+))?\)$"
                   r"|S\((-?\d+)\)$")


def parse(text: str) -> Placement:
    """"Replicate", "Shard(d)" or "StridedShard(d, split_factor=k)". Error: ValueError."""
    found = _TEXT.match(text)
    strided = "Strided" in text
    if not found or strided != (found[2] is not None):
        raise ValueError(f'unknown placement "{text}"; wanted Replicate, Shard(d) or StridedShard(d, split_factor=k)')
    dim = found[1] or found[3]
    return Placement(None if dim is None else int(dim), None if found[2] is None else int(found[2]))


def normalized(placement: Placement, dimensions: int) -> Placement:
    """With the dimension counted from the front. Error: ValueError."""
    if placement.dim is None:
        return placement
    dim = placement.dim + dimensions if placement.dim < 0 else placement.dim
    if not 0 <= dim < dimensions:
        raise ValueError(f"{placement} of a tensor of {dimensions} dimensions")
    return placement._replace(dim=dim)


def _chunk(size: int, parts: int, part: int) -> range:
    """What torch.chunk gives to `part` of `parts`: equal steps, rounded up; the last may be short or empty."""
    step = -(-size // parts)
    return range(min(size, part * step), min(size, (part + 1) * step))


def local_size(size: int, cuts: Sequence[tuple[Placement, int, int]]) -> int:
    """Elements of a dimension of `size` after `cuts`, each the placement, the size and the coordinate of an axis."""
    for placement, parts, coordinate in cuts:
        if placement.split_factor is None:
            size = len(_chunk(size, parts, coordinate))
        else:
            pieces = parts * placement.split_factor
            size = sum(len(_chunk(size, pieces, piece)) for piece in range(coordinate, pieces, parts))
    return size


def local_indices(size: int, cuts: Sequence[tuple[Placement, int, int]]) -> list[int]:
    """Which indices of a dimension of `size` are left after `cuts`, in the order in which the rank holds them."""
    held: Sequence[int] = range(size)
    for placement, parts, coordinate in cuts:
        pieces = parts * (placement.split_factor or 1)
        held = [held[i] for piece in range(coordinate, pieces, parts) for i in _chunk(len(held), pieces, piece)]
    return list(held)


def coordinates(shape: Sequence[int], index: int) -> list[int]:
    """Of the rank at `index` of a mesh, whose last axis is fastest."""
    found = []
    for extent in reversed(shape):
        found.append(index % extent)
        index //= extent
    return found[::-1]


def local_shape(shape: Sequence[int], placements: Sequence[Placement], mesh: Sequence[int], index: int) -> list[int]:
    """The part of a tensor that the rank at `index` of the mesh holds."""
    place = coordinates(mesh, index)
    return [local_size(size, [(placement, mesh[axis], place[axis]) for axis, placement in enumerate(placements)
                              if placement.dim == dim])
            for dim, size in enumerate(shape)]
