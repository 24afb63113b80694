"""Whether a DTensor's local part is what the plan says that the rank holds. Shapes do not tell: the ranks of a mesh may stand in
another order, and a square matrix cut by columns is shaped as one cut by rows."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

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
        if tuple(tensor.shape) != part.param_shape:
            continue  # a part of a tensor that holds several params: its global shape is none of theirs
        at = part.offset
        for dim, size in enumerate(held.shape):
            step = math.prod(held.shape[dim + 1:])
            first, at = divmod(at, step) if step else (0, at)
            indices = local_indices(int(tensor.shape[dim]), cuts[dim])[first:first + part.extent[dim]]
            wanted = list(range(part.lo[dim], part.lo[dim] + part.extent[dim]))
            if indices != wanted:
                places = ", ".join(str(placement) for placement in tensor.placements)
                return (f"holds {_shown(indices)} of dimension {dim} of \"{part.param}\", by {places} at {list(coordinate)} of mesh "
                        f"{list(mesh.mesh.shape)}; wanted {_shown(wanted)}")
    return ""


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
