"""Whether a DTensor's local part is what the plan says that the rank holds. Shapes do not tell: the ranks of a mesh may stand in
another order, and a square matrix cut by columns is shaped as one cut by rows."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from refit.plan import Plan
from refit.sharding import Placement, local_indices

KINDS = ("Replicate", "Shard", "_StridedShard")


def problems(plan: Plan, rank: int, tensors: Mapping[str, Any]) -> dict[str, str]:
    """By name, why a DTensor among `tensors` cannot be bound."""
    placed = {name: tensor for name, tensor in tensors.items()
              if hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")}
    found = {name: problem for name, tensor in placed.items() if (problem := _kind_problem(tensor))}
    if len(placed) > len(found):
        from refit.contract import tensors_of

        for held in tensors_of(plan, rank):
            if held.name in placed and held.name not in found:
                problem = _place_problem(held, placed[held.name])
                if problem:
                    found[held.name] = problem
    return found


def _kind_problem(tensor: Any) -> str:
    for placement in tensor.placements:
        if type(placement).__name__ not in KINDS:
            return f"is placed {placement}: its local part is no part of a parameter; wanted Replicate, Shard or _StridedShard"
    if tensor.device_mesh.get_coordinate() is None:
        return "is on a mesh that this rank is not in"
    return ""


def _place_problem(held: Any, tensor: Any) -> str:
    """Compares the elements of the local part, dimension by dimension, with those of the plan."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    cuts: list[list[tuple[Placement, int, int]]] = [[] for _ in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if type(placement).__name__ != "Replicate":
            dim = placement.dim % len(tensor.shape)
            cut = Placement(dim, int(placement.split_factor) if type(placement).__name__ == "_StridedShard" else None)
            cuts[dim].append((cut, int(mesh.size(axis)), int(coordinate[axis])))
    for part in held.parts:
        box = _stored_box(part, tensor.shape)
        if box is None:
            continue  # a part of a tensor that holds several params: its global shape is none of theirs
        at = part.offset
        for dim, size in enumerate(held.shape):
            step = math.prod(held.shape[dim + 1:])
            first, at = divmod(at, step) if step else (0, at)
            lo, extent = box[dim]
            indices = local_indices(int(tensor.shape[dim]), cuts[dim])[first:first + extent]
            wanted = list(range(lo, lo + extent))
            if indices != wanted:
                places = ", ".join(str(placement) for placement in tensor.placements)
                return (f"holds {_shown(indices)} of dimension {dim} of \"{part.param}\", by {places} at {list(coordinate)} of mesh "
                        f"{list(mesh.mesh.shape)}; wanted {_shown(wanted)}")
    return ""


def _stored_box(part: Any, shape: Sequence[int]) -> Optional[list[tuple[int, int]]]:
    """By dimension of a tensor of `shape`: where the part begins in it, and how much of it it holds. The plan may have a dimension
    as several, of which a part is a run, and in another order. None: the tensor is not the param."""
    stored = sorted(range(len(part.param_shape)), key=lambda dim: -part.stride[dim])
    box, at = [], 0
    for size in shape:
        lo, extent, whole, begin = 0, 1, 1, at
        while at < len(stored) and (at == begin or whole < size):
            dim = stored[at]
            lo = lo * part.param_shape[dim] + part.lo[dim]
            extent *= part.extent[dim]
            whole *= part.param_shape[dim]
            at += 1
        if whole != size:
            return None
        box.append((lo, extent))
    return box if at == len(stored) else None


def _shown(indices: Sequence[int]) -> str:
    """Runs of consecutive indices."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    shown = [str(first) if first == last else f"{first}..{last}" for first, last in runs[:4]]
    return ", ".join(shown) + (" …" if len(runs) > 4 else "") if runs else "nothing"
