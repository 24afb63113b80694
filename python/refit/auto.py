"""A job from what runs, and plans that are not files. docs/auto.md has the design."""
from __future__ import annotations

import base64
import json
import math
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Optional, Union

from refit.errors import Error, InvalidArgument, JobError, JobWarning
from refit.metrics import logger
from refit.plan import Job, Plan, compile
from refit.tensors import dtype_name

AUTO = "auto"
WRITE_A_JOB = "write a job, and pass its plan instead of \"auto\" (docs/jobs.md)"

# As torch and vLLM name dtypes -> as a job does.
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

# What adapters take as their plan: "auto", a path, a job, or a plan.
Given = Union[str, "os.PathLike[str]", Mapping[str, Any], Plan]


def is_made(given: Any) -> bool:
    """Whether an adapter has to compile what it was given, instead of reading a file."""
    return given == AUTO or isinstance(given, Mapping) and "base64" not in given


def inline(plan: Plan) -> dict[str, str]:
    """A plan as JSON can carry it, where a path is taken."""
    return {"base64": base64.b64encode(plan.to_bytes()).decode()}


def told(plan: Any) -> Union[str, dict[str, Any]]:
    """What workers, or a server by JSON, are told of a plan: its path, or the plan itself."""
    if isinstance(plan, Plan):
        return inline(plan)
    return dict(plan) if isinstance(plan, Mapping) else os.fspath(plan)


def load(plan: Any) -> Plan:
    """A plan, from its path or from what `inline` made of it."""
    if isinstance(plan, Plan):
        return plan
    return Plan.from_bytes(base64.b64decode(plan["base64"])) if isinstance(plan, Mapping) else Plan.load(plan)


def config_of(module: Any) -> Any:
    """The config of a model, which DDP and the like may wrap."""
    inner = module
    while not hasattr(inner, "config") and hasattr(inner, "module"):
        inner = inner.module
    if not hasattr(getattr(inner, "config", None), "to_dict"):
        raise InvalidArgument(f"the trainer's model is a {type(module).__name__} without a transformers config: {WRITE_A_JOB}")
    return inner.config


def source_of(module: Any, ranks: int) -> dict[str, Any]:
    """The source of a job for a module of `ranks` training processes."""
    if isinstance(module, (list, tuple)):
        raise InvalidArgument(f"the trainer has a list of model chunks, as Megatron; \"auto\" knows FSDP 2, DDP and one process: {WRITE_A_JOB}")
    named = dict(module.named_parameters())
    meshes = {_mesh_of(name, parameter) for name, parameter in named.items()}
    if len(meshes) != 1:
        raise InvalidArgument(f"the trainer's parameters are on {len(meshes)} different meshes; \"auto\" knows one: {WRITE_A_JOB}")
    (mesh,) = meshes
    replicas, shards = (ranks, 1) if mesh is None else mesh
    if replicas * shards != ranks:
        raise InvalidArgument(f"the trainer's mesh has {replicas * shards} ranks, and {ranks} train: {WRITE_A_JOB}")
    dtypes = sorted({dtype_name(parameter.dtype) or str(parameter.dtype) for parameter in named.values()})
    if len(dtypes) != 1:
        raise InvalidArgument(f"the trainer's parameters have the dtypes {', '.join(dtypes)}; \"auto\" knows one: {WRITE_A_JOB}")
    side: dict[str, Any] = {"layout": "fsdp", "data_parallel": shards, "dtype": dtypes[0]}
    if replicas > 1:
        side["replicas"] = replicas
    if any(name.endswith(".experts.gate_up_proj") for name in named):
        side["fused_experts"] = True
    inner = module
    while hasattr(inner, "module"):
        inner = inner.module
    release = getattr(sys.modules.get("transformers"), "__version__", "0")
    if int(release.split(".")[0]) >= 5 and any(base.__module__.startswith("transformers.") for base in type(inner).__mro__):
        side["version"] = "5"  # names of its live models
    return side


def _mesh_of(name: str, parameter: Any) -> Optional[tuple[int, int]]:
    """How many replicas and shards a DTensor has; None of a plain tensor."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return None
    kinds = [type(placement).__name__ for placement in parameter.placements]
    if kinds == ["Shard"]:
        return 1, mesh.size()
    if kinds == ["Replicate", "Shard"]:
        return mesh.size(0), mesh.size(1)
    raise InvalidArgument(f'"{name}" has the placements {", ".join(map(str, parameter.placements))}; "auto" knows those of FSDP 2 alone: '
                          f"{WRITE_A_JOB}")


def destination_of(side: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The destination of a job, of an engine whose worker has the layout `side` and these `facts`."""
    if facts.get("quantization") is not None:
        raise InvalidArgument(f'the engine quantizes ({facts["quantization"]}), and "auto" does not choose how: {WRITE_A_JOB}')
    return {**side, "dtype": DTYPES.get(facts["dtype"], facts["dtype"])}


def job_of(sides: Mapping[str, Any], workers: int) -> dict[str, Any]:
    """The job of a model, a source and one engine's destination, of which the `workers` make several."""
    if missing := [key for key in ("model", "source", "destination") if key not in sides]:
        raise InvalidArgument(f'plan="auto": no rank knows the {" and the ".join(missing)}: {WRITE_A_JOB}')
    engine = math.prod(sides["destination"].get(f"{axis}_parallel", 1) for axis in ("tensor", "pipeline", "data"))
    if workers % engine:
        raise InvalidArgument(f"engines of {engine} workers each have {workers} workers together: {WRITE_A_JOB}")
    return {**sides, "destination": sides["destination"] | ({"replicas": workers // engine} if workers > engine else {})}


def made(given: Given, job: Callable[[], Mapping[str, Any]], save_to: Optional[Union[str, "os.PathLike[str]"]]) -> Plan:
    """The plan of a job that was given, or of the one that `job` makes for "auto", which is shown and saved; if `save_to` is None another
    rank does so."""
    if isinstance(given, Mapping):
        return compile(given)
    found = dict(job())
    if save_to is None:
        return compile(found)
    folder = pathlib.Path(save_to)
    folder.mkdir(parents=True, exist_ok=True)
    model = found["model"]
    (folder / "config.json").write_text(json.dumps(model.to_dict() if hasattr(model, "to_dict") else model, indent=1, default=str) + "\n")
    text = json.dumps({**found, "model": "config.json"}, indent=1)
    (folder / "job.json").write_text(text + "\n")
    logger.info('plan="auto": the job, also in %s: %s', folder / "job.json", json.dumps({**found, "model": "config.json"}))
    plan = compile(folder / "job.json")
    plan.save(folder / "plan.refit")
    return plan


def supports(job: Job, facts: Optional[Mapping[str, Any]] = None) -> list[str]:
    """Every reason why Refit does not do a job, in one call; [] if it does. Needs no GPU and no framework. `facts`: of a live engine, as
    refit.vllm.facts and refit.sglang.facts return them for each worker; then the order and the placement of experts that the plan requires are
    compared, too. Meshes, dtypes and shapes are not: a worker compares these when it joins and binds."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", JobWarning)
            plan = compile(job)
    except JobError as error:
        return [place.message for place in error.places] or [error.message]
    except (Error, OSError) as error:
        return [str(error)]
    if facts is None:
        return []
    facts = facts.get("facts", facts)  # refit.sglang.facts returns replies
    if "vllm" in facts:
        from refit.vllm import refusal_of
    else:
        from refit.sglang import refusal_of
    stated = plan.requirements(plan.source_ranks)
    reasons = [refusal_of(facts, {key: value}) if key == "moe_backend" else refusal_of(facts, {key: value}, check_backends=False)
               for key, value in stated.items()]
    return [reason for reason in reasons if reason]
