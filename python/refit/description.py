"""What a rank holds, said by the rank itself: a plain value that goes through JSON, Ray or all_gather_object.

    {"refit_description": 1, "side": "source", "rank": 0, "host": "…",
     "meshes": [{"axes": {"dp": 2}, "ranks": [0, 1]}],
     "tensors": [{"name": …, "parameter": …, "dtype": "bf16", "local_shape": […], "shape": […] or null,
                  "mesh": 0 or null, "placements": ["Shard(0)"]}]}

A tensor without a mesh is whole on each rank that names it.
"""
from __future__ import annotations

import socket
import sys
from typing import Any, Callable, Mapping, Optional, Sequence, Union

from refit.errors import InvalidArgument
from refit.globs import matcher
from refit.sharding import Placement, normalized, parse
from refit.tensors import DTYPES, WRAPPER, dtype_name, local_part

VERSION = 1
SIDES = ("source", "destination")
Names = Union[None, Mapping[str, str], Callable[[str], str]]


def describe(model: Any, side: str, *, rank: Optional[int] = None, first_rank: int = 0, names: Names = None,
             buffers: bool = False) -> dict[str, Any]:
    """Describes what this rank holds of a live model: a module, or a mapping of names to tensors.

    DTensors (FSDP2, tensor-parallel transformers) say themselves how they are sharded; any other tensor is taken to be
    whole on every rank that has it. For local shards that are plain tensors use `describe_state_dict`.

    `side` is "source" or "destination", `rank` this rank within the side. Where both sides are in one
    torch.distributed world, `first_rank` is the world's rank of the side's rank 0. `names` gives the logical parameter
    of a tensor where names differ, as a mapping or a function. `buffers`: persistent buffers too.
    """
    if rank is None:
        rank = _torch_rank() - first_rank
    tensors = dict(model) if isinstance(model, Mapping) else dict(model.named_parameters())
    if buffers and not isinstance(model, Mapping):
        persistent = model.state_dict()
        tensors.update((name, buffer) for name, buffer in model.named_buffers()
                       if name.replace(WRAPPER, "") in persistent)
    writer = _Writer(side, rank, names)
    for name, tensor in tensors.items():
        if hasattr(tensor, "placements") and hasattr(tensor, "device_mesh"):
            mesh = tensor.device_mesh
            axes = mesh.mesh_dim_names or [f"axis{i}" for i in range(mesh.ndim)]
            ranks = [r - first_rank for r in mesh.mesh.flatten().tolist()]
            writer.add(name, tensor, writer.mesh(dict(zip(axes, mesh.mesh.shape)), ranks),
                       [_placement(name, placement) for placement in tensor.placements], list(tensor.shape))
        else:
            writer.add(name, tensor, None, [], list(tensor.shape))
    return writer.description


def describe_state_dict(tensors: Mapping[str, Any], side: str, *, rank: int, mesh: Mapping[str, int] | None = None,
                        ranks: Optional[Sequence[int]] = None,
                        placements: Optional[Mapping[str, Union[str, Sequence[str]]]] = None,
                        names: Names = None) -> dict[str, Any]:
    """Describes local tensors of any framework, by an explicit map.

    `mesh` gives the sizes of its axes by name, slowest first, and `ranks` the side's ranks in it, row-major (default:
    0, 1, 2 …). `placements` maps globs over tensor names to a placement for each axis of the mesh; the first glob that
    matches counts, and a tensor that none matches is whole on every rank that has it. `merge` computes the whole shape
    from what all ranks hold. DTensors among `tensors` are described by their local part.
    """
    axes = dict(mesh or {})
    size = 1
    for extent in axes.values():
        size *= extent
    held_by = list(range(size)) if ranks is None else [int(r) for r in ranks]
    if len(held_by) != size:
        raise InvalidArgument(f"the mesh has {len(held_by)} ranks; wanted {size}, the product of its axes")
    rules = []
    for glob, wanted in (placements or {}).items():
        given = [wanted] if isinstance(wanted, str) else list(wanted)
        if len(given) != len(axes):
            raise InvalidArgument(f'"{glob}" has {len(given)} placements; wanted {len(axes)}, one per axis of the mesh')
        try:
            rules.append((matcher(glob), [parse(text) for text in given]))
        except ValueError as error:
            raise InvalidArgument(f'"{glob}": {error}') from None
    writer = _Writer(side, rank, names)
    for name, tensor in tensors.items():
        tensor = local_part(tensor)
        found = next((wanted for matches, wanted in rules if matches(name)), None)
        if found is None or all(placement.dim is None for placement in found) and not axes:
            writer.add(name, tensor, None, [], list(tensor.shape))
        else:
            writer.add(name, tensor, writer.mesh(axes, held_by), found, None)
    return writer.description


def transformers_placements(tp_plan: Mapping[str, str]) -> dict[str, str]:
    """The placements of a transformers `tp_plan` (`model.tp_plan`, `config.base_model_tp_plan`) over one axis, for
    `describe_state_dict`: where a release holds local shards as plain tensors. Styles that only act on activations
    leave weights whole.
    """
    weight = {"colwise": "Shard(-2)", "colwise_rep": "Shard(-2)", "colwise_gather_output": "Shard(-2)",
              "rowwise": "Shard(-1)", "rowwise_rep": "Shard(-1)", "rowwise_split_input": "Shard(-1)",
              "packed_colwise": "StridedShard(-2, split_factor=2)", "packed_rowwise": "StridedShard(-1, split_factor=2)",
              "embedding_rowwise": "Shard(0)", "embedding_colwise": "Shard(1)", "grouped_gemm": "Shard(0)"}
    bias = {"colwise": "Shard(0)", "colwise_rep": "Shard(0)", "colwise_gather_output": "Shard(0)",
            "packed_colwise": "Shard(0)"}
    placements = {}
    for module, style in tp_plan.items():
        style = style.removeprefix("local_")
        if style in bias:
            placements[f"*{module}.bias"] = bias[style]
        if style in weight:
            placements[f"*{module}.weight"] = weight[style]
            placements[f"*{module}"] = weight[style]  # experts are parameters, not modules
    return placements


class _Writer:
    """Collects a description."""

    def __init__(self, side: str, rank: int, names: Names):
        if side not in SIDES:
            raise InvalidArgument(f'side is "{side}"; wanted "source" or "destination"')
        if rank < 0:
            raise InvalidArgument(f"rank within the side is {rank}; wanted 0 or more")
        self.names = names
        self.description: dict[str, Any] = {
            "refit_description": VERSION, "side": side, "rank": rank, "host": socket.gethostname(), "meshes": [],
            "tensors": []}

    def mesh(self, axes: Mapping[str, int], ranks: Sequence[int]) -> int:
        lowest = min(ranks, default=0)
        if lowest < 0:
            raise InvalidArgument(f"a mesh holds rank {lowest} of the side; is first_rank right?")
        mesh = {"axes": {str(axis): int(size) for axis, size in axes.items()}, "ranks": [int(r) for r in ranks]}
        meshes: list[Any] = self.description["meshes"]
        if mesh not in meshes:
            meshes.append(mesh)
        return meshes.index(mesh)

    def add(self, name: str, tensor: Any, mesh: Optional[int], placements: Sequence[Placement],
            shape: Optional[list[int]]) -> None:
        local = local_part(tensor)
        dtype = dtype_name(local.dtype)
        if dtype is None:
            raise InvalidArgument(f'"{name}" has dtype {local.dtype}; wanted one of {", ".join(DTYPES)}')
        try:
            front = [str(normalized(placement, len(local.shape))) for placement in placements]
        except ValueError as error:
            raise InvalidArgument(f'"{name}": {error}') from None
        self.description["tensors"].append({
            "name": name, "parameter": self._parameter(name), "dtype": dtype,
            "local_shape": [int(size) for size in local.shape],
            "shape": None if shape is None else [int(size) for size in shape], "mesh": mesh, "placements": front})

    def _parameter(self, name: str) -> str:
        name = name.replace(WRAPPER, "")
        if self.names is None:
            return name
        if callable(self.names):
            return self.names(name)
        return self.names.get(name, name)


def _placement(name: str, placement: Any) -> Placement:
    """Of a torch.distributed.tensor placement, told by its class."""
    kind = type(placement).__name__
    if kind == "Replicate":
        return Placement()
    if kind == "Shard":
        return Placement(int(placement.dim))
    if kind == "_StridedShard":
        return Placement(int(placement.dim), int(placement.split_factor))
    raise InvalidArgument(f'"{name}" is placed {kind}; wanted Replicate, Shard or _StridedShard')


def _torch_rank() -> int:
    dist = sys.modules.get("torch.distributed")
    return int(dist.get_rank()) if dist is not None and dist.is_available() and dist.is_initialized() else 0
