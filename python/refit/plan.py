"""Compiling jobs, and plans as values."""
from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tempfile
import warnings
from typing import Any, Mapping, NamedTuple, Optional, Union

from refit import _core, view
from refit.errors import InvalidArgument, JobWarning, ProofError, of_file
from refit.progress import Progress, hearing

Job = Union[str, "os.PathLike[str]", Mapping[str, Any]]


def compile(job: Job, *, directory: Optional[Union[str, "os.PathLike[str]"]] = None,
            progress: Optional[Progress] = None) -> "Plan":
    """Compiles and proves a job: the path of a file, a dict, or JSON text (comments allowed).

    Besides what a job file may hold, a dict's "model" may be the dict of a config.json, an object with `to_dict()`
    (a `transformers` config), or a list of {"name", "shape", "dtype"}. Paths are relative to the job file; of a dict
    or a text to `directory` (default: the working directory). `progress` is `tqdm.tqdm` or the like.

    Raises JobError, with the place of every mistake. Issues a JobWarning, by Python's `warnings`, for each doubt
    about the job.
    """
    with tempfile.TemporaryDirectory(prefix="refit-") as scratch:
        text, name, base = _read(job, pathlib.Path(scratch), "" if directory is None else os.fspath(directory))
        with hearing(progress, "compile") as hear:
            file, doubts = _core.compile(text, name, base, hear)
    for doubt in doubts:
        warnings.warn(doubt, JobWarning, stacklevel=2)
    return Plan(file)


def _read(job: Job, scratch: pathlib.Path, directory: str) -> tuple[str, str, str]:
    """The text of a job, the name it has in messages, and the directory that its paths are relative to."""
    config: Any = job.to_dict() if hasattr(job, "to_dict") else job
    if isinstance(config, Mapping) and "model_type" in config and "model" not in config:
        raise InvalidArgument(f'the job is the config of a model, {config["model_type"]}; wanted {{"model": that, "source": {{…}}, '
                              '"destination": {…}}')
    if isinstance(job, Mapping):
        return json.dumps(_plain(job, scratch), indent=1, default=_as_dict), "<job>", directory
    if isinstance(job, str) and "{" in job:
        return job, "<job>", directory
    path = os.fspath(job)
    with of_file(path):
        text = pathlib.Path(path).read_bytes().decode("utf-8", "surrogateescape")
    return text, path, os.path.dirname(path)


def _as_dict(value: Any) -> dict[str, Any]:
    """For json.dumps, which knows of all mappings dict alone."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"the job holds a {type(value).__name__}, which JSON has not")


def _config_value(value: Any) -> Union[dict[str, Any], str]:
    """The same of a config, which may also hold dtypes and the like."""
    return dict(value) if isinstance(value, Mapping) else str(value)


def _plain(job: Mapping[str, Any], scratch: pathlib.Path) -> dict[str, Any]:
    """`job` as a job file would say it."""
    plain = dict(job)
    model: Any = plain.get("model")
    if hasattr(model, "to_dict"):
        model = model.to_dict()
    if isinstance(model, Mapping) and "model_type" in model:
        config = scratch / "config.json"
        config.write_text(json.dumps(model, indent=1, default=_config_value))
        plain["model"] = str(config)
    elif isinstance(model, (list, tuple)):
        plain["model"] = {"parameters": [dict(parameter) for parameter in model]}
    elif isinstance(model, os.PathLike):
        plain["model"] = os.fspath(model)
    return plain


class TensorInfo(NamedTuple):
    """A tensor that a rank binds."""

    dtype: str
    shape: tuple[int, ...]


class PostHook(NamedTuple):
    """What is done to a tensor after each refit, before the worker serves. docs/plan-format.md lists the names.

    `by_executor`: the executor does it behind the last round; otherwise the caller does. `refit` is
    `Executor.refits` after the refit that it was last done for, 0 if it was not or if only the caller knows.
    """

    tensor: str
    name: str
    detail: str
    by_executor: bool
    refit: int = 0


@dataclasses.dataclass(frozen=True)
class Proof:
    """What was proved of a plan."""

    messages: int
    destination_elements: int
    moved_bytes: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """What differs between two plans, by meaning. `str()` is what refit-diff prints."""

    same: bool
    summary: str
    differences: list[dict[str, Any]]
    text: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a plan costs. `str()` is what `refitc --stats` prints."""

    moved_bytes: int
    local_bytes: int
    peer_bytes: int
    network_bytes: int
    lower_bound_seconds: float
    predicted_seconds: float
    binding_link: str
    messages: int
    rounds: int
    staging_bytes_max: int
    params: int
    param_stacks: int
    tensors: int
    skips: int
    file_bytes: int
    text: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return self.text


class Plan:
    """A compiled refit. Immutable; may be pickled, and shared by threads."""

    def __init__(self, file: _core.PlanFile):
        self._file = file

    @classmethod
    def load(cls, path: Union[str, "os.PathLike[str]"]) -> "Plan":
        """Opens a plan file and checks it; `verify` proves it. The file is mapped: replace it, do not rewrite it."""
        path = os.fspath(path)
        with of_file(path):
            return cls(_core.PlanFile.open(path))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Plan":
        return cls(_core.PlanFile.from_bytes(data))

    def to_bytes(self) -> bytes:
        """The plan file's bytes: what a controller broadcasts."""
        return self._file.to_bytes()

    def save(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Writes the plan file, whole or not at all. An older file keeps its mode, a symbolic link stays one, and a
        device or a pipe is written to."""
        path = os.fspath(path)
        with of_file(path):
            self._file.save(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan.from_bytes, (self.to_bytes(),)

    @property
    def world_size(self) -> int:
        """Source ranks are 0 … source_ranks-1, destination ranks go on from there."""
        return self._file.world_size

    @property
    def source_ranks(self) -> int:
        return self._file.source_ranks

    @property
    def destination_ranks(self) -> int:
        return self.world_size - self.source_ranks

    @property
    def digest(self) -> str:
        """What all ranks must have in common."""
        return self._file.digest

    @property
    def inputs_digest(self) -> str:
        """Equal for plans of the same job and model, written alike. `verify` says whether a plan is a job's."""
        return self._file.inputs_digest

    @property
    def job(self) -> dict[str, str]:
        """What the job said, such as {"destination.tensor_parallel": "4"}, and what its model is; a long value is cut. {}: a plan
        of an earlier build."""
        return dict(self._file.job)

    @property
    def format_version(self) -> str:
        return self._file.format_version

    @property
    def colocated(self) -> bool:
        return self._file.colocated

    @property
    def stats(self) -> Stats:
        return Stats(**self._file.stats(), text=self._file.stats_text())

    def side(self, rank: int) -> str:
        """"source" or "destination"."""
        self._file.host(rank)  # a rank at all
        return "source" if rank < self.source_ranks else "destination"

    def host(self, rank: int) -> int:
        """Ranks with equal numbers share a host."""
        return self._file.host(rank)

    def staging_bytes(self, rank: int) -> int:
        """Device memory that an executor of `rank` allocates for staging."""
        return self._file.staging_bytes(rank)

    def tensors(self, rank: int) -> dict[str, TensorInfo]:
        """What `rank` binds, by name, in plan order."""
        return {name: TensorInfo(dtype, tuple(shape)) for name, dtype, shape in self._file.tensors(rank)}

    def requirements(self, rank: int) -> dict[str, str]:
        """What the framework of `rank`'s worker must be set to, such as {"moe_backend": "triton"}.

        With another setting the tensors have the same names, dtypes and shapes and hold other elements, so that
        `bind` cannot see it: compare these with the live framework before. docs/plan-format.md lists the keys.
        """
        return self._file.requirements(rank)

    def skipped(self, rank: int) -> set[str]:
        """Names among `tensors(rank)` that the plan declares as skips: no refit reads or writes them."""
        return set(self._file.skipped(rank))

    def left_alone(self, rank: int) -> set[str]:
        """Names among `tensors(rank)` with elements that the worker needs and no refit writes: options.exclude names them."""
        return set(self._file.left_alone(rank))

    def post_hooks(self, rank: int) -> list[PostHook]:
        """What is done to tensors of `rank` after each refit, in order. `bind(…, hooks=…)` takes those that are not the
        executor's."""
        return [PostHook(*hook) for hook in self._file.post_hooks(rank)]

    def traffic(self) -> dict[tuple[int, int], int]:
        """Bytes moved, by sender and receiver; pairs that move nothing are left out."""
        return {(sender, receiver): size for sender, receiver, size in self._file.traffic()}

    def text(self, rank: Optional[int] = None, tensor: str = "") -> str:
        """What refit-dump prints, of all or of one rank and the tensors that a glob matches."""
        return self._file.text(rank, tensor, False)

    def json(self, rank: Optional[int] = None, tensor: str = "") -> dict[str, Any]:
        """The same facts as JSON."""
        found: dict[str, Any] = json.loads(self._file.text(rank, tensor, True))
        return found

    def verify(self, job: Optional[Job] = None, *, progress: Optional[Progress] = None) -> Proof:
        """Proves the plan from its file alone; with `job` also that it is this job's plan. Raises ProofError."""
        with hearing(progress, "verify") as hear:
            found = self._file.verify(hear)
        if not found.pop("valid"):
            raise ProofError(found["violation"])
        del found["violation"]
        if job is not None:
            with tempfile.TemporaryDirectory(prefix="refit-") as scratch:
                difference = self._file.difference_from_job(*_read(job, pathlib.Path(scratch), ""))
            if difference:
                raise ProofError(f"not the plan of this job; {difference}")
        return Proof(**found)

    def diff(self, other: "Plan") -> Difference:
        """What changes from this plan to `other`: contract, traffic, schedule."""
        text, as_json = self._file.diff(other._file)
        found = json.loads(as_json)
        return Difference(same=not found["differences"], summary=found["summary"], differences=found["differences"],
                          text=text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return view.one_line(self)

    def _repr_html_(self) -> str:
        return view.html(self)

    def plot(self) -> Any:
        """A matplotlib figure: traffic matrix, and bytes sent or received by each rank."""
        return view.figure(self)
