"""From what all ranks say they hold to a job: `generic` on both sides, an ordinary job that can be saved and compiled
again without any model."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Callable, NamedTuple, Optional, Sequence, Union

from refit.description import SIDES, VERSION
from refit.errors import MergeError
from refit.globs import matcher
from refit.sharding import Placement, coordinates, local_shape, parse

PROBLEMS_MAX = 10

Description = Mapping[str, Any]


def merge(*descriptions: Any, topology: Optional[Mapping[str, Any]] = None,
          options: Optional[Mapping[str, Any]] = None, exclude: Union[str, Sequence[str]] = (),
          casts: Union[str, Sequence[str]] = (), colocated: bool = False,
          replicas: Optional[Mapping[str, int]] = None) -> dict[str, Any]:
    """The job of the given descriptions, one of every rank of both sides, in any order and nested in lists as
    all_gather_object returns them.

    `topology`, `options` and `colocated` are the job's; without a topology the ranks' host names are it. Parameters
    that only one side holds are an error unless a glob of `exclude` matches them: the refit then leaves them alone.
    Parameters whose dtype differs between the sides are an error unless a glob of `casts` matches them: the refit then
    casts them to the destination's. Both are a glob or a list of globs.

    `replicas` gives the copies of a side whose ranks describe meshes of their own, like {"destination": 4} of four
    engines. Without it a parameter on several meshes is an error: they might as well hold different parts.

    Raises MergeError: ranks are missing, disagree, or do not hold what their placements say.
    """
    given = list(_flat(descriptions))
    copies = _checked_replicas(replicas or {})
    sides = {side: _Side(side, [d for d in given if d["side"] == side], copies[side]) for side in SIDES}
    source, destination = sides["source"], sides["destination"]
    exclude = _globs("exclude", exclude)
    is_excluded = _any_of(exclude)
    _check_same_parameters(source, destination, is_excluded)
    is_cast = _any_of(_globs("casts", casts))
    _check_same_dtypes(source, destination, lambda name: is_excluded(name) or is_cast(name))

    params = {**destination.params, **source.params}
    job: dict[str, Any] = {
        "model": {"parameters": [{"name": name, "shape": held.shape, "dtype": held.dtype}
                                 for name, held in params.items()]},
        "source": source.generic(params),
        "destination": destination.generic(params),
    }
    if topology is not None:
        job["topology"] = dict(topology)
    else:
        hosts = source.hosts + destination.hosts
        if len(set(hosts)) > 1:
            numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
            job["topology"] = {"hosts": [numbers[host] for host in hosts]}
    if options is not None or exclude:
        job["options"] = dict(options or {})
    if exclude:
        job["options"]["exclude"] = [*job["options"].get("exclude", []), *exclude]
    if colocated:
        job["colocated"] = True
    return job


class _Mesh(NamedTuple):
    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        return [size for _, size in self.axes]


class _Held(NamedTuple):
    """A parameter as one side holds it."""

    name: str  # the tensor's
    dtype: str
    shape: list[int]
    mesh: _Mesh
    placements: tuple[str, ...]


class _Misfit(Exception):
    """Why the ranks' words on a parameter do not fit together."""


class _Side:
    """One side's descriptions, checked against each other."""

    def __init__(self, side: str, descriptions: list[Description], replicas: int):
        self.side = side
        self.replicas = replicas
        self._problems: list[str] = []
        by_rank = sorted(descriptions, key=lambda d: d["rank"])
        found = [d["rank"] for d in by_rank]
        if not found:
            raise MergeError(f"no description of the {side}; wanted one of each of its ranks")
        if found != list(range(len(found))):
            missing = sorted(set(range(max(found) + 1)) - set(found))
            twice = sorted({rank for rank in found if found.count(rank) > 1})
            raise MergeError(f"{side} ranks " + (f"{missing} are missing" if missing else f"{twice} are described twice"))
        self.hosts = [str(d.get("host", "")) for d in by_rank]
        self.params: dict[str, _Held] = {}
        holders: dict[str, list[tuple[int, Mapping[str, Any], Optional[_Mesh]]]] = {}
        for description in by_rank:
            meshes = [_Mesh(tuple(mesh["axes"].items()), tuple(mesh["ranks"])) for mesh in description["meshes"]]
            for tensor in description["tensors"]:
                mesh = None if tensor["mesh"] is None else meshes[tensor["mesh"]]
                holders.setdefault(tensor["parameter"], []).append((description["rank"], tensor, mesh))
        for param, held in holders.items():
            try:
                self.params[param] = self._merge(param, held)
            except _Misfit as misfit:
                self._problems.append(f"{side}: {misfit}")
        _raise(self._problems)

    def _merge(self, param: str, holders: list[tuple[int, Mapping[str, Any], Optional[_Mesh]]]) -> _Held:
        first_rank, first, first_mesh = holders[0]
        for rank, tensor, mesh in holders[1:]:
            for key in ("name", "dtype", "placements", "shape"):
                if tensor[key] != first[key]:
                    raise _Misfit(f'"{param}" has {key} {first[key]} on rank {first_rank}, {tensor[key]} on '
                                  f"rank {rank}")
            if (mesh and mesh.axes) != (first_mesh and first_mesh.axes):
                raise _Misfit(f'"{param}" is on mesh {mesh and dict(mesh.axes)} on rank {rank}, '
                              f"{first_mesh and dict(first_mesh.axes)} on rank {first_rank}")
        by_rank = {rank: tensor["local_shape"] for rank, tensor, _ in holders}
        if len(by_rank) != len(holders):
            raise _Misfit(f'"{param}" is described twice by one rank')
        placements = tuple(first["placements"])
        if first_mesh is None:
            mesh = _Mesh((("replicate", len(by_rank)),), tuple(by_rank))
            placements = ("Replicate",)
        else:
            # Engines, HSDP written as separate groups; or experts that each group numbers for itself.
            meshes = sorted({mesh for _, _, mesh in holders if mesh is not None}, key=lambda mesh: mesh.ranks)
            mesh = meshes[0]
            if len(meshes) > 1:
                self._check_copies(param, meshes)
                mesh = _Mesh((("replica", len(meshes)), *mesh.axes), tuple(r for m in meshes for r in m.ranks))
                placements = ("Replicate", *placements)
        if sorted(mesh.ranks) != sorted(by_rank):
            lacking = sorted(set(mesh.ranks) - set(by_rank)) or sorted(set(by_rank) - set(mesh.ranks))
            raise _Misfit(f'"{param}" is on a mesh of ranks {list(mesh.ranks)}, but ranks {sorted(by_rank)} '
                              f"describe it (rank {lacking[0]} does not fit)")
        parsed = [parse(text) for text in placements]
        shape = first["shape"] or _whole_shape(parsed, mesh, by_rank)
        for index, rank in enumerate(mesh.ranks):
            wanted = local_shape(shape, parsed, mesh.sizes, index)
            if wanted != by_rank[rank]:
                raise _Misfit(f'"{param}" is {by_rank[rank]} on rank {rank}; wanted {wanted}, the part of {shape} '
                              f"by {', '.join(placements)} on mesh {dict(mesh.axes)}")
        return _Held(first["name"], first["dtype"], shape, mesh, placements)

    def _check_copies(self, param: str, meshes: list[_Mesh]) -> None:
        if len(meshes) == self.replicas:
            return
        where = f'"{param}" is on {len(meshes)} meshes {dict(meshes[0].axes)}, of ranks {list(meshes[0].ranks)} and ' \
                f"{list(meshes[1].ranks)}" + (" and others" if len(meshes) > 2 else "")
        if self.replicas > 1:
            raise _Misfit(f'{where}; wanted {self.replicas}, as replicas["{self.side}"] says')
        raise _Misfit(f'{where}; if they are copies, pass replicas={{"{self.side}": {len(meshes)}}}, if they are parts, '
                      "give them names of their own or one mesh")

    def generic(self, params: Mapping[str, _Held]) -> dict[str, Any]:
        """This side as a job writes it. `params` are the job's, whose dtype is written only where it differs."""
        names: dict[_Mesh, str] = {}
        bodies = {}
        for param, held in self.params.items():
            names.setdefault(held.mesh, f"mesh{len(names)}")
            body: dict[str, Any] = {"mesh": names[held.mesh], "placements": list(held.placements)}
            if held.name != param:
                prefix, found, suffix = held.name.partition(param)
                body["rename"] = f"{prefix}{{name}}{suffix}" if found else held.name
            if held.dtype != params[param].dtype:
                body["dtype"] = held.dtype
            bodies[param] = body
        return {
            "layout": "generic",
            "meshes": {name: {"axes": dict(mesh.axes), "ranks": list(mesh.ranks)} for mesh, name in names.items()},
            "tensors": _rules(bodies),
        }


def _globs(argument: str, given: Any) -> list[str]:
    """One glob or several."""
    globs = [given] if isinstance(given, str) else list(given)
    for glob in globs:
        if not isinstance(glob, str):
            raise MergeError(f"{argument} has {glob!r}; wanted a glob or a list of globs over parameter names")
    return globs


def _any_of(globs: Sequence[str]) -> Callable[[str], bool]:
    matchers = [matcher(glob) for glob in globs]
    return lambda name: any(matches(name) for matches in matchers)


def _checked_replicas(replicas: Mapping[str, int]) -> dict[str, int]:
    for side, copies in replicas.items():
        # A bool is an int to Python, and no number of copies.
        if side not in SIDES or not isinstance(copies, int) or isinstance(copies, bool) or copies < 1:
            raise MergeError(f"replicas has {side!r}: {copies!r}; wanted a number from 1 on for {' and '.join(SIDES)}")
    return {side: replicas.get(side, 1) for side in SIDES}


def _rules(bodies: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One rule for all parameters that differ in numbers only and lie alike; of those that do not, a rule each."""
    by_pattern: dict[str, list[str]] = {}
    for param in bodies:
        pattern = ".".join("*" if part.isdigit() else part for part in param.split("."))
        by_pattern.setdefault(pattern, []).append(param)
    exact: dict[str, Mapping[str, Any]] = {}
    globs: dict[str, Mapping[str, Any]] = {}
    for pattern, members in by_pattern.items():
        alike = all(bodies[member] == bodies[members[0]] for member in members)
        if "*" in pattern and alike:
            globs[pattern] = bodies[members[0]]
        else:
            exact.update((member, bodies[member]) for member in members)
    # A '*' also matches dots: what an earlier glob would take goes before them all.
    in_order = sorted(globs, key=len, reverse=True)
    matchers = [(matcher(glob), globs[glob]) for glob in in_order]
    for param, body in bodies.items():
        if param not in exact and next(found for matches, found in matchers if matches(param)) != body:
            exact[param] = body
    used = {glob for glob in in_order if any(matcher(glob)(param) for param in bodies if param not in exact)}
    return [{"match": param, **body} for param, body in exact.items()] + [
        {"match": glob, **globs[glob]} for glob in in_order if glob in used]


def _whole_shape(placements: list[Placement], mesh: _Mesh, by_rank: Mapping[int, list[int]]) -> list[int]:
    """Of local shapes: along the axes that cut a dimension they add up."""
    whole = list(by_rank[mesh.ranks[0]])
    sizes = mesh.sizes
    for dim in range(len(whole)):
        cutting = [axis for axis, placement in enumerate(placements) if placement.dim == dim]
        if not cutting:
            continue
        total = 0
        for index, rank in enumerate(mesh.ranks):
            place = coordinates(sizes, index)
            if all(place[axis] == 0 for axis in range(len(sizes)) if axis not in cutting):
                total += by_rank[rank][dim]
        whole[dim] = total
    return whole


def _check_same_parameters(source: _Side, destination: _Side, is_excluded: Callable[[str], bool]) -> None:
    problems = []
    for here, there in ((source, destination), (destination, source)):
        for param in here.params:
            if param not in there.params and not is_excluded(param):
                problems.append(f'"{param}" is on the {here.side} only; name it in `exclude`, or map its name')
    for param in source.params.keys() & destination.params.keys():
        shapes = source.params[param].shape, destination.params[param].shape
        if shapes[0] != shapes[1]:
            problems.append(f'"{param}" is {shapes[0]} on the source, {shapes[1]} on the destination')
    _raise(sorted(problems))


def _check_same_dtypes(source: _Side, destination: _Side, is_allowed: Callable[[str], bool]) -> None:
    """A cast that nobody asked for is an error, as in a job file."""
    params: dict[tuple[str, str], list[str]] = {}
    for param, held in source.params.items():
        wanted = destination.params.get(param)
        if wanted is not None and wanted.dtype != held.dtype and not is_allowed(param):
            params.setdefault((held.dtype, wanted.dtype), []).append(param)
    problems = []
    for (here, there), names in params.items():
        others = len(names) - 1
        which = f'"{names[0]}"' + (f" and {others} other{'s' if others > 1 else ''}" if others else "")
        problems.append(f"{which} {'are' if others else 'is'} {here} on the source, {there} on the destination; if the "
                        'refit is to cast, pass casts="*" or globs of the parameters to cast')
    _raise(problems)


def _raise(problems: list[str]) -> None:
    if not problems:
        return
    lines = problems[:PROBLEMS_MAX]
    if len(problems) > len(lines):
        lines.append(f"and {len(problems) - len(lines)} more")
    raise MergeError("descriptions do not fit:\n  " + "\n  ".join(lines))


def _flat(values: Iterable[Any]) -> Iterable[Description]:
    for value in values:
        if isinstance(value, (str, bytes)) or not isinstance(value, (Mapping, Iterable)):
            raise MergeError(f"not a description: {str(value)[:80]!r}; wanted what describe returns, or lists of it")
        if not isinstance(value, Mapping):
            yield from _flat(value)
        elif value.get("refit_description") != VERSION:
            raise MergeError(f"not a description of version {VERSION}: {str(value)[:80]}")
        else:
            yield value
