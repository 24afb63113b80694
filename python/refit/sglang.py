"""Refit inside SGLang: what its schedulers do, and what drives them.

    engine = sglang.Engine(model_path=…, load_format="dummy", …)     # or the URL of a server
    refit.sglang.init(engine, "plan.refit", unique_id)               # while the trainers join
    refit.sglang.update(engine, version="42")                        # while the trainers run theirs

SGLang finds `register` by its plugin entry point. docs/integrations/sglang.md goes from `pip install` to a refit of a live engine.

A request of ours is SGLang's own update_weights_from_tensor, of load format "refit", with JSON in place of tensors. Every
scheduler process gets it: there is one for each rank of tensor and pipeline parallelism. Pipeline stages get it one after the
other, each when the one before it is done; but a refit needs all ranks at once. So there a request begins the work on a thread,
and a second request waits for it. The second one ends every update: it has SGLang's weight version, and flushes the caches.
"""
from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import http.client
import importlib
import inspect
import json
import os
import threading
import urllib.error
import urllib.request
from typing import Any, Callable, Coroutine, Mapping, NamedTuple, Optional, Sequence, Union

from refit import auto, contract, weight_memory, workers
from refit.errors import FailedPrecondition, InvalidArgument
from refit.executor import TIMEOUT_SECONDS, Executor, meet
from refit.plan import Plan
from refit.workers import GRACE_SECONDS, Reply, WorkerError, checked, deadline

__all__ = [
    "MOE_BACKENDS", "Place", "Server", "TOWERS", "Worker", "WorkerError", "bind", "bind_async", "checked", "close", "close_async", "destination", "facts",
    "facts_async", "facts_of", "finish", "finish_async", "hooks_of", "init", "init_async", "place_of", "rank_in_plan", "refusal_before_bind", "refusal_of", "register", "tensors_of",
    "update", "update_async",
]

LOAD_FORMAT = "refit"

# Backends of unquantized experts, and the job's "moe_backend" that has their order of w13 and w2. Others reorder these as no
# plan does, behind the same shapes.
MOE_BACKENDS = {"triton": "triton", "deep_gemm": "triton", "triton_kernel": "triton_kernel",
                "flashinfer_cutlass": "flashinfer_cutlass"}

# What its classes call vision towers, and what joins them to the language model.
TOWERS = ("visual", "vision_model", "vision_tower", "multi_modal_projector", "mm_projector")

# What the names of a language model begin with where its class is inside one with a vision tower.
LANGUAGE_MODEL = "language_model."

# What SGLang's pause_generation knows.
PAUSES = ("retract", "abort", "in_place")

_MANAGER = "SchedulerWeightUpdaterManager"
_UPDATER = f"sglang.srt.managers.scheduler_components.weight_updater.{_MANAGER}"
_registered = False

# The updater's methods by which an update ends, with their parameters.
_ENDS = (("record_weight_version_after_update", ("weight_version",)), ("flush_cache_after_weight_update", ("recv_req", "success", "message")))


def register() -> None:
    """Makes "refit" a load format of this process's update_weights_from_tensor. SGLang calls it in each of its own. Safe to
    call again. Does nothing where SGLang has no plugins."""
    global _registered
    try:
        plugins = importlib.import_module("sglang.srt.plugins.hook_registry")
    except ImportError:
        return
    if not _registered:
        for method, around in (("update_weights_from_tensor", _update_weights_from_tensor),
                               ("release_memory_occupation", _release_memory_occupation)):
            plugins.HookRegistry.register(f"{_UPDATER}.{method}", around, plugins.HookType.AROUND)
        _registered = True


# The scheduler's side.


class Place(NamedTuple):
    """Where a scheduler process stands in its engine. Attention's data parallelism and expert parallelism lie within tensor
    parallelism; `data_parallel` counts whole engines of one server."""

    tensor_rank: int = 0
    tensor_parallel: int = 1
    pipeline_rank: int = 0
    pipeline_parallel: int = 1
    data_rank: int = 0
    data_parallel: int = 1


def place_of(parallel: Any) -> Place:
    """From SGLang's ParallelContext."""
    return Place(parallel.tp_rank, parallel.tp_size, parallel.pp_rank, parallel.pp_size, parallel.dp_rank or 0,
                 parallel.dp_size)


def rank_in_plan(plan: Plan, place: Place, engine: int = 0) -> int:
    """The plan's rank of a scheduler process: tensor-parallel fastest, then pipeline, then data-parallel, then engines."""
    world = place.tensor_parallel * place.pipeline_parallel
    within = place.data_rank * world + place.pipeline_rank * place.tensor_parallel + place.tensor_rank
    return workers.rank_in_plan(
        plan, within, engine, tensor_parallel=place.tensor_parallel, pipeline_parallel=place.pipeline_parallel,
        data_parallel=place.data_parallel, ranks=world * place.data_parallel)


def tensors_of(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters that a refit may write, and the buffers. Not among them: scales of the cache, which no layout has."""
    parameters = {name: tensor for name, tensor in model.named_parameters()
                  if name.rpartition(".")[2] not in ("k_scale", "v_scale")}
    return parameters, dict(model.named_buffers())


def hooks_of(model: Any) -> dict[str, Callable[[str, Any], None]]:
    """The post-hooks that SGLang's own code performs, for `Executor.bind`. What they make stays where it is, so that captured
    CUDA graphs hold."""
    modules = dict(model.named_modules())

    def derive_latent(name: str, _: Any) -> None:
        """w_kc and w_vc of the attention that holds kv_b_proj. SGLang copies them into the tensors it has."""
        torch = importlib.import_module("torch")
        # A class with a vision tower passes no names on to its language model.
        beside_tower = name.startswith(LANGUAGE_MODEL)
        decoder = model.language_model if beside_tower else model
        if not hasattr(decoder, "post_load_weights"):
            raise LookupError(f'SGLang\'s {type(decoder).__name__} has no post_load_weights, which would derive from "{name}"')
        with torch.no_grad():
            decoder.post_load_weights(weight_names=[name[len(LANGUAGE_MODEL):] if beside_tower else name])

    def refresh_router_copy(name: str, tensor: Any) -> None:
        """Releases before 0.5.19 compute with an fp32 copy of the router, which they make where they find none. One that is
        there is written in place: captured graphs read it."""
        gate = modules[name.rpartition(".")[0]]
        if not hasattr(gate, "_weight_fp32"):
            raise LookupError(f'SGLang\'s gate of "{name}" keeps no copy _weight_fp32: put the "version" of this SGLang into '
                              "the job's destination")
        if gate._weight_fp32 is not None:
            with importlib.import_module("torch").no_grad():
                gate._weight_fp32.copy_(tensor)

    return {"negative-exp": workers.negative_exp, "derive-latent-projections": derive_latent,
            "drop-router-copy": refresh_router_copy}


# What SGLang's configuration says beside its ParallelContext.
CHOSEN = {"mm_encoder_tp_mode": "weights", "expert_location": "trivial", "expert_rebalancing": False}


def facts_of(runner: Any, parallel: Any, chosen: Mapping[str, Any] = CHOSEN) -> dict[str, Any]:
    """What the worker's SGLang chose that a job has to say, or that no job can. `chosen`: facts by the names in CHOSEN."""
    methods = [method for _, module in runner.model.named_modules()
               if (method := getattr(module, "quant_method", None)) is not None]
    backends = {runner_of.runner_backend.value for method in methods
                if (runner_of := getattr(method, "runner", None)) is not None and hasattr(runner_of, "runner_backend")}
    return {"sglang": importlib.import_module("sglang").__version__,
            "tensor_parallel": parallel.tp_size,
            "pipeline_parallel": parallel.pp_size,
            "data_parallel": parallel.dp_size,
            "dp_attention": parallel.attn_dp_size,
            "expert_parallel": parallel.moe_ep_size,
            "dp_lm_head": bool(parallel.enable_dp_lm_head),
            "dtype": str(runner.model_config.dtype).removeprefix("torch."),
            "quantization": runner.model_config.quantization,
            "holds_experts": workers.holds_experts(name for name, _ in runner.model.named_parameters()),
            "moe_backends": sorted(backends),
            "swiglu_interleaved": any(getattr(method, "w13_swiglu_interleaved", False) for method in methods),
            **chosen}


def refusal_of(facts: Mapping[str, Any], requirements: Mapping[str, str], check_backends: bool = True) -> str:
    """Why a plan of these `requirements` does not fit this worker although names and shapes may; "" if it does. Without
    `check_backends` the experts' backend is not compared, where they stand is."""
    def moe_backend(wanted: str) -> str:
        restart = f"start SGLang with --moe-runner-backend {wanted}"
        if refusal := workers.moe_backend_refusal(facts["moe_backends"], MOE_BACKENDS, wanted, restart, facts["holds_experts"]):
            return refusal
        return "" if not facts["swiglu_interleaved"] else (
            "the experts' gate and up rows are interleaved, which no plan does: start SGLang with "
            "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED=0")

    def expert_placement(wanted: str) -> str:
        if facts["expert_rebalancing"]:
            return "the engine moves experts while it serves, which no plan follows: start SGLang without --enable-eplb"
        location = facts["expert_location"]
        if wanted == "linear" and location != "trivial":
            return (f"the engine places experts by --init-expert-location {location[:80]}; the plan has them in their order: put "
                    "the map as \"experts\" into the job's destination, or start SGLang without the option")
        if wanted == "table" and location == "trivial":
            return ("the engine has the experts in their order; the plan places them by the job's physical_to_logical: start SGLang "
                    "with --init-expert-location and that map, or leave \"experts\" out of the job's destination")
        return "" if wanted in ("linear", "table") else f'the plan places experts "{wanted}", as SGLang never does'

    return workers.refusal_of(requirements, moe_backend, expert_placement, check_backends)


def experts_of(location: Any, ep_rank: int) -> list[list[int]]:
    """This rank's experts by layer, of SGLang's ExpertLocationMetadata."""
    count = location.physical_to_logical_map_cpu.shape[1] // location.ep_size
    experts: list[list[int]] = location.physical_to_logical_map_cpu[:, ep_rank * count:(ep_rank + 1) * count].tolist()
    return experts


def refusal_of_table(planned: Mapping[int, Sequence[int]], held: Optional[Sequence[Sequence[int]]]) -> str:
    """Why an engine that places experts by a map does not have a plan's; "" if it has. `planned` and `held`: by layer, the experts of
    this rank in the order of its tensors."""
    if held is None:
        return ('the plan places experts by the job\'s physical_to_logical, and this SGLang does not tell its map: leave "experts" out of the '
                "job's destination, and start SGLang without --init-expert-location")
    for layer, wanted in planned.items():
        found = list(held[layer]) if layer < len(held) else []
        if found != list(wanted):
            return (f"in layer {layer} this rank of the engine holds experts {found[:16]}; the plan has {list(wanted)[:16]} there: start SGLang "
                    "with --init-expert-location and the job's physical_to_logical, or put the engine's map into the job")
    return ""


def side_of(facts: Mapping[str, Any], vision: bool = False) -> dict[str, Any]:
    """The destination of a job for this worker; with `vision` of one that moves the vision tower."""
    return workers.side_of("sglang", str(facts["sglang"]), facts, (
        "tensor_parallel", "pipeline_parallel", "data_parallel", "dp_attention", "expert_parallel", "dp_lm_head"), MOE_BACKENDS, vision)


def job_side(facts: Mapping[str, Any], vision: bool = False) -> str:
    """The same in words."""
    return workers.job_side(side_of(facts, vision), facts)


def refusal_before_bind(model: Any) -> str:
    """Why the worker has to bind before its next refit, or ""."""
    return "" if not weight_memory.released(model) else (
        "SGLang released the memory of its weights since this worker bound, and they are in other memory now: bind anew on all ranks "
        "before the update, by refit.sglang.bind and executor.bind")


class Worker:
    """What a scheduler process keeps. Its methods are for that process's main thread.

    `runner` is SGLang's ModelRunner, `parallel` its ParallelContext. `gather` gives each rank of the engine the replies of
    all; collective over them. `chosen` gives the facts in CHOSEN, `experts` this rank's experts by layer, if SGLang has a map of them.
    """

    def __init__(self, runner: Any, parallel: Any, gather: Callable[[dict[str, Any], float], list[dict[str, Any]]],
                 chosen: Callable[[], Mapping[str, Any]] = lambda: CHOSEN,
                 experts: Callable[[], Optional[Sequence[Sequence[int]]]] = lambda: None):
        self._runner = runner
        self._parallel = parallel
        self._gather = gather
        self._chosen, self._experts = chosen, experts
        self.executor: Optional[Executor] = None
        self._version: Optional[str] = None
        self._counts: dict[str, float] = {}
        self._check_backends = True
        self._thread: Optional[threading.Thread] = None
        self._replies: list[Reply] = []
        self._updated = False
        self._recorded: list[Optional[str]] = []  # SGLang's weight version, once it is that of the update

    def handle(self, request: Mapping[str, Any]) -> Optional[list[Reply]]:
        """Performs a request, on all ranks of the engine. Returns the replies of all, or None: then a request {"op": "wait"}
        does so, since the work has only begun."""
        self._wait()  # before another request than "wait" only if whoever drove us went away in between
        if request["op"] == "wait":
            return self._replies
        # What is told if the work ends without a reply.
        self._replies = [workers.reply_of(self.executor, self._version, f'the request "{request["op"]}" did not end')]
        self._updated, self._recorded = False, []
        if self._parallel.pp_size == 1:
            self._perform(request)
            return self._replies
        self._thread = threading.Thread(target=self._perform, args=(dict(request),), daemon=True)
        self._thread.start()
        return None

    def ends_update(self, version: Optional[str]) -> bool:
        """Whether the replies are those of an update that succeeded on all ranks, and has not ended with another version."""
        return self._updated and not any(reply["error"] for reply in self._replies) and self._recorded in ([], [version])

    def update_ended(self, version: Optional[str]) -> None:
        self._recorded = [version]

    def moves_tower(self) -> bool:
        return self.executor is not None and bool(workers.moved_towers(TOWERS, self.executor))

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _perform(self, request: Mapping[str, Any]) -> None:
        error, facts, timeout = "", None, TIMEOUT_SECONDS
        try:
            timeout = float(request.get("timeout", TIMEOUT_SECONDS))
            if self._thread is not None and self._device().startswith("cuda"):
                importlib.import_module("torch").cuda.set_device(self._device())
            if request["op"] == "init":
                self._init(request, timeout)
            elif request["op"] == "bind":
                workers.make_whole(self._joined(), timeout)
                self._bind(timeout)
            elif request["op"] == "update":
                workers.run(self._joined(), refusal_before_bind(self._runner.model), timeout=timeout,
                            check=bool(request.get("check", False)), dense=bool(request.get("dense", False)), version=request.get("version"))
                self._version = request.get("version")
            elif request["op"] == "close":
                if self.executor is not None:
                    self.executor.close()
            elif request["op"] == "facts":
                facts = self.facts()
            else:
                raise InvalidArgument(f'the request has op "{request["op"]}"; wanted init, bind, update, facts, close or wait')
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        reply = workers.reply_of(self.executor, self._version, error)
        if facts is not None:
            reply["facts"] = facts
        try:
            self._replies = self._gather(reply, timeout + GRACE_SECONDS)
            self._updated = request["op"] == "update"
        except Exception as failure:
            lost = f"no replies of the engine's other ranks: {type(failure).__name__}: {failure}"
            self._replies = [{**reply, "error": f"{error}; {lost}" if error else lost}]

    def facts(self) -> dict[str, Any]:
        """What SGLang chose here: release, mesh, quantization, backend of the experts."""
        return facts_of(self._runner, self._parallel, self._chosen())

    def _init(self, request: Mapping[str, Any], timeout: float) -> None:
        if self.executor is not None:
            self.executor.close()
            self.executor = None
        place, engine = place_of(self._parallel), int(request.get("engine", 0))
        meeting = request["meeting"]
        with workers.ending_the_meeting(meeting):
            plan = auto.load(request["plan"])
        parameters, buffers = tensors_of(self._runner.model)
        rank = workers.place_in_plan(
            plan, lambda: rank_in_plan(plan, place, engine),
            ranks=place.tensor_parallel * place.pipeline_parallel * place.data_parallel,
            parameters=parameters, buffers=buffers, towers=TOWERS, meeting=meeting, job_side=lambda: job_side(self.facts()),
            without_lora="start SGLang without --enable-lora and --lora-paths")
        executor = meet(plan, rank, meeting, device=self._device(), counts=self._counts)
        self._check_backends = bool(request.get("check_backends", True))
        self.executor = executor
        try:
            self._bind(timeout)
        except BaseException:
            self.executor = None
            executor.close()
            raise

    def _bind(self, timeout: float) -> None:
        executor = self._joined()
        model = self._runner.model
        with workers.before_bind(executor, timeout):
            facts = self.facts()
            requirements = executor.plan.requirements(executor.rank)
            refusal = refusal_of(facts, requirements, self._check_backends)
            if not refusal and requirements.get("expert_placement") == "table":
                refusal = refusal_of_table(contract.experts_of(executor.plan, executor.rank), self._experts())
            parameters, buffers = tensors_of(model)
            side = job_side(facts, workers.holds_moved_tower(parameters, TOWERS, executor))
            hooks, load_format = hooks_of(model), self._runner.load_config.load_format
        workers.bind(executor, parameters, buffers, hooks, refusal=refusal, job_side=side, towers=TOWERS, load_format=load_format, persistent=model.state_dict, module=model, timeout=timeout)
        weight_memory.bound(model)

    def _joined(self) -> Executor:
        if self.executor is None:
            raise FailedPrecondition("init was not called, or failed")
        return self.executor

    def _device(self) -> str:
        device = str(self._runner.device)
        return f"cuda:{self._runner.gpu_id}" if device == "cuda" else device


_worker: Optional[Worker] = None  # of this scheduler process


def _update_weights_from_tensor(original: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
    """Around SGLang's handler of the request in a scheduler. `manager` is its SchedulerWeightUpdaterManager."""
    global _worker
    if request.load_format != LOAD_FORMAT:
        return original(manager, request)
    io_struct = importlib.import_module("sglang.srt.managers.io_struct")
    context = importlib.import_module("sglang.srt.runtime_context")
    if _worker is None:
        parallel = context.get_parallel()

        def chosen() -> dict[str, Any]:
            moe = context.get_exec().moe
            return {"mm_encoder_tp_mode": "data" if context.get_mm().mm_enable_dp_encoder else "weights",
                    "expert_location": str(moe.init_expert_location), "expert_rebalancing": bool(moe.enable_eplb)}

        def experts() -> Optional[list[list[int]]]:
            # Older releases keep it elsewhere.
            location = context.get_resources().expert_location_metadata if hasattr(context, "get_resources") else None
            return None if location is None else experts_of(location, parallel.moe_ep_rank)

        _worker = Worker(manager.tp_worker.model_runner, parallel, _Gather(parallel), chosen, experts)
    replies: Optional[list[Reply]] = []
    try:
        replies, error = _answer(_worker, manager, request, _fields_of(request))
    except InvalidArgument as mistake:  # anything that is raised ends SGLang's scheduler
        error = str(mistake)
    failed = bool(error) or any(reply["error"] for reply in replies or ())
    return io_struct.UpdateWeightsFromTensorReqOutput(success=not failed,
                                                      message=json.dumps({"replies": replies, "error": error}))


def _release_memory_occupation(original: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
    """Around SGLang's handler of that request: it leaves no trace in the tensors, whose addresses stay."""
    if not request.tags or "weights" in request.tags:
        weight_memory.release(manager.tp_worker.model_runner.model)
    return original(manager, request)


def _fields_of(request: Any) -> Mapping[str, Any]:
    """What a driver asks for. Raises InvalidArgument where the body is none of ours."""
    wanted = 'wanted a JSON object with an "op"'
    try:
        fields = json.loads(request.serialized_named_tensors[0])
    except (IndexError, TypeError, ValueError) as error:
        raise InvalidArgument(f"the request's serialized_named_tensors: {error}; {wanted}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("op"), str):
        raise InvalidArgument(f"the request is {json.dumps(fields)[:80]}; {wanted}")
    return fields


def _answer(worker: Worker, manager: Any, request: Any, fields: Mapping[str, Any]) -> tuple[Optional[list[Reply]], str]:
    """The replies to a request, or None where it has only begun, and what else failed."""
    if fields["op"] != "wait" and request.weight_version is not None:
        # SGLang records the version of any request that succeeds, also of one that only began.
        return [], f'weight_version came with op "{fields["op"]}"; wanted with {{"op": "wait"}}, which ends an update'
    if fields["op"] == "init" and (refusal := _refusal_of_release(manager)):
        return [], refusal
    replies = worker.handle(fields)
    if fields["op"] == "wait" and worker.ends_update(request.weight_version):
        if worker.moves_tower() and (error := _forget_images()):
            return replies, error
        manager.record_weight_version_after_update(request.weight_version)
        flushed, error = manager.flush_cache_after_weight_update(request, True, "")
        if flushed:
            # The same request may come again: one of the other schedulers may have refused to flush.
            worker.update_ended(request.weight_version)
        return replies, "" if flushed else error
    if request.weight_version is not None and not any(reply["error"] for reply in replies or ()):
        return replies, f'weight_version "{request.weight_version}" came, but no update is there to end'
    return replies, ""


def _refusal_of_release(manager: Any) -> str:
    """Why an update could not end in this SGLang, or "". What is raised there would end the scheduler."""
    for name, wanted in _ENDS:
        method = getattr(manager, name, None)
        found = None if method is None else tuple(inspect.signature(method).parameters)
        if found != wanted:
            has = f"no {_MANAGER}.{name}" if found is None else f"another {_MANAGER}.{name}({', '.join(found)})"
            return f"SGLang {importlib.import_module('sglang').__version__} has {has}; wanted ({', '.join(wanted)}), as of SGLang 0.5.22"
    return ""


def _forget_images() -> str:
    """Empties this scheduler's cache of what the vision tower made of images, which SGLang's flush leaves alone. Returns why not, or
    ""."""
    for name in ("mm_schedule", "mm_utils"):  # the latter in older releases
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"sglang.srt.managers.{name}")
            if hasattr(module, "embedding_cache"):
                if module.embedding_cache is not None:
                    module.embedding_cache.clear()
                return ""
    if os.environ.get("SGLANG_VLM_CACHE_SIZE_MB") == "0":
        return ""
    return ("the weights are in place, but not found is where this SGLang caches what its old vision tower made of images: set "
            "SGLANG_VLM_CACHE_SIZE_MB=0 for the server")


class _Gather:
    """Gives each rank of the engine the replies of all. By a group of its own: SGLang's are its main threads'."""

    def __init__(self, parallel: Any):
        self._parallel = parallel

    def __call__(self, reply: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        dist = importlib.import_module("torch.distributed")
        ranks = self._parallel.tp_size * self._parallel.pp_size
        if ranks == 1:
            return [reply]
        # A group keeps the timeout that it was made with, so each request has one.
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))
        try:
            replies: list[Any] = [None] * ranks
            dist.all_gather_object(replies, reply, group=group)
            return replies
        finally:
            dist.destroy_process_group(group)


# The driver's side.


class Server:
    """A server that is reached by HTTP: `Server("http://host:30000", api_key)`. A URL as text means the same without a key."""

    def __init__(self, url: str, api_key: Optional[str] = None):
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def update_weights(self, payload: bytes, version: Optional[str], flush_cache: bool, timeout: float) -> tuple[bool, str]:
        reply = await self._post("update_weights_from_tensor", {
            "serialized_named_tensors": [base64.b64encode(payload).decode()], "load_format": LOAD_FORMAT,
            "flush_cache": flush_cache, "weight_version": version}, timeout)
        if not isinstance(reply, dict) or not {"success", "message"} <= reply.keys():
            raise WorkerError(f"{self.url}/update_weights_from_tensor answers {str(reply)[:200]}; wanted SGLang's success and message")
        return reply["success"], reply["message"]

    async def pause(self, mode: str, timeout: float) -> None:
        await self._post("pause_generation", {"mode": mode}, timeout)

    async def resume(self, timeout: float) -> None:
        await self._post("continue_generation", {}, timeout)

    async def _post(self, path: str, body: Mapping[str, Any], timeout: float) -> Any:
        return await asyncio.to_thread(self._send, path, json.dumps(body).encode(), timeout)

    def _send(self, path: str, body: bytes, timeout: float) -> Any:
        where = f"{self.url}/{path}"
        request = urllib.request.Request(where, body, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            text = error.read()  # a failed update is status 400, with a reply
            if not text.startswith(b'{"success":'):
                raise WorkerError(f"{where}: {error}: {text[:1000].decode(errors='replace')}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise WorkerError(f"{where}: no answer within {timeout:g} s" if isinstance(reason, TimeoutError) else
                              f"{where}: {type(reason).__name__}: {reason}") from None
        try:
            return json.loads(text)
        except ValueError:
            return text.decode(errors="replace")  # these are words


class _Engine:
    """An sglang.Engine of this process."""

    def __init__(self, engine: Any):
        self._manager = engine.tokenizer_manager
        self._io_struct = importlib.import_module("sglang.srt.managers.io_struct")

    async def update_weights(self, payload: bytes, version: Optional[str], flush_cache: bool, timeout: float) -> tuple[bool, str]:
        request = self._io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload], load_format=LOAD_FORMAT, flush_cache=flush_cache, weight_version=version)
        success, message = await self._answer("update_weights_from_tensor", timeout, request, None)
        return success, message

    async def pause(self, mode: str, timeout: float) -> None:
        await self._answer("pause_generation", timeout, self._io_struct.PauseGenerationReqInput(mode=mode))

    async def resume(self, timeout: float) -> None:
        await self._answer("continue_generation", timeout, self._io_struct.ContinueGenerationReqInput())

    async def _answer(self, method: str, timeout: float, *arguments: Any) -> Any:
        """The engine's ranks keep deadlines of their own, unless a scheduler hangs or was killed."""
        asked = asyncio.ensure_future(getattr(self._manager, method)(*arguments))
        done, _ = await asyncio.wait([asked], timeout=timeout)
        if not done:  # SGLang would be left with a request that nobody may answer, so it is not cancelled
            raise WorkerError(f"the engine's {method}: no answer within {timeout:g} s: a scheduler hangs, or is gone")
        return asked.result()


Replies = list[Reply]


def _client(llm: Any) -> Any:
    if isinstance(llm, str):
        return Server(llm)
    if not isinstance(llm, Server) and not hasattr(llm, "tokenizer_manager"):
        raise InvalidArgument(f"llm is a {type(llm).__name__}; wanted an sglang.Engine, a refit.sglang.Server or a server's URL")
    return llm if isinstance(llm, Server) else _Engine(llm)


def _run(work: Coroutine[Any, Any, Any], llm: Any) -> Any:
    loop = getattr(llm, "loop", None)
    return asyncio.run(work) if loop is None else loop.run_until_complete(work)


async def _ask(client: Any, op: str, timeout: float, **fields: Any) -> Replies:
    """A request, and a second one that waits for it if it has only begun."""
    answer = await _send(client, {"op": op, "timeout": timeout, **fields}, timeout)
    if answer["replies"] is None:
        answer = await _send(client, {"op": "wait"}, timeout)
    return checked(answer["replies"], answer["error"])


async def _send(client: Any, fields: Mapping[str, Any], timeout: float, version: Optional[str] = None,
                flush_cache: bool = False) -> Mapping[str, Any]:
    success, message = await client.update_weights(json.dumps(fields).encode(), version, flush_cache, deadline(timeout))
    try:
        # SGLang joins the replies of several schedulers, which are alike, and adds words of its own.
        answer: Mapping[str, Any] = json.JSONDecoder().raw_decode(message)[0]
        replies, error = answer["replies"], answer["error"]
        if not success and not error and not any(reply["error"] for reply in replies or ()):
            error = message  # one of the later schedulers failed, as where each flushes its own cache
        return {"replies": replies, "error": error}
    except (ValueError, TypeError, KeyError):
        raise WorkerError(f"SGLang answers: {message}\nthis is not refit.sglang's answer: refit has to be installed in "
                          "SGLang's environment, and SGLANG_PLUGINS, where it is set, has to list it") from None


async def init_async(llm: Any, plan: Any, meeting: Union[bytes, str], engine: int = 0, *, check_backends: bool = True,
                     timeout: float = TIMEOUT_SECONDS) -> Replies:
    """Has the ranks of an engine join, while the trainers do, and returns what each says.

    `llm`: an sglang.Engine, a Server, or a server's URL. `plan`: a path that its schedulers can read, or a `Plan`. `meeting`: the unique
    id. `engine`: this engine's number among several. `check_backends`: refuse experts in a backend of another order than the
    plan's. Each driver function has a twin: `init` for callers without an event loop, `init_async` inside a running one.
    """
    async with workers.ending_the_meeting_async(meeting):
        return await _ask(_client(llm), "init", timeout, plan=auto.told(plan),
                          meeting=meeting if isinstance(meeting, str) else meeting.hex(), engine=engine,
                          check_backends=check_backends)


async def bind_async(llm: Any, *, timeout: float = TIMEOUT_SECONDS) -> Replies:
    """Has them bind anew, while the trainers bind: whenever the memory of weights changed, as resume_memory_occupation does.
    After a refit that failed they connect first, which all ranks then must do."""
    return await _ask(_client(llm), "bind", timeout)


async def facts_async(llm: Any, *, timeout: float = TIMEOUT_SECONDS) -> Replies:
    """What each rank's SGLang chose, under "facts"."""
    return await _ask(_client(llm), "facts", timeout)


async def close_async(llm: Any, *, timeout: float = TIMEOUT_SECONDS) -> Replies:
    """Frees what the ranks hold. Close the trainers' executors alike."""
    return await _ask(_client(llm), "close", timeout)


async def update_async(llm: Any, *, version: Optional[str] = None, pause: Optional[str] = "retract",
                       flush_cache: bool = True, resume: bool = True, check: bool = False, dense: bool = False,
                       timeout: float = TIMEOUT_SECONDS) -> Replies:
    """One refit of an engine, while the trainers run theirs.

    `version` becomes the engine's weight version once all ranks have the new weights. `pause`: what becomes of requests under
    way, as SGLang's pause_generation has it: "retract" (they go on with the new weights, their cache made anew), "abort",
    "in_place" (they keep what the old weights cached; with `flush_cache=False` alone), or None if the engine is paused
    already. `flush_cache`: the caches hold what the old weights computed. `check`: ranks and trainers compare what they hold,
    as `Executor.run(check=True)` does; the trainers must give it too. `dense`: a refit of a plan with options.delta that
    sends all, whatever the trainers ask for: after something else than a refit wrote the ranks' tensors. After an error the engine
    stays paused: its weights are torn. If the error says that the caches were not flushed, they are in place: `finish` flushes again.
    """
    if pause not in (None, *PAUSES):
        raise InvalidArgument(f'pause is {pause!r}; wanted one of {", ".join(PAUSES)}, or None')
    if pause == "in_place" and flush_cache:
        raise InvalidArgument('pause="in_place" keeps requests under way, and SGLang flushes no cache meanwhile: pass '
                              'flush_cache=False, or pause="retract"')
    client = _client(llm)
    if pause is not None:
        await client.pause(pause, deadline(timeout))
    answer = await _send(client, {"op": "update", "timeout": timeout, "version": version, "check": check,
                                   "dense": dense}, timeout)
    if answer["replies"] is not None:
        checked(answer["replies"], answer["error"])
    replies = await _finish(client, version, flush_cache, resume and pause is not None, timeout)
    workers.log_update("SGLang", version, replies)
    return replies


async def finish_async(llm: Any, *, version: Optional[str] = None, resume: bool = True,
                       timeout: float = TIMEOUT_SECONDS) -> Replies:
    """Ends an update whose weights are in place, but whose caches some scheduler did not flush: it flushes them on all, and
    moves no weights. `version` is that of the update, `resume` and `timeout` as `update` has them."""
    return await _finish(_client(llm), version, True, resume, timeout)


async def _finish(client: Any, version: Optional[str], flush_cache: bool, resume: bool, timeout: float) -> Replies:
    answer = await _send(client, {"op": "wait"}, timeout, version, flush_cache)
    replies = checked(answer["replies"], answer["error"])
    if resume:
        await client.resume(deadline(timeout))
    return replies


init, bind, update = (workers.twin_of(init_async, _run), workers.twin_of(bind_async, _run), workers.twin_of(update_async, _run))
finish, facts, close = (workers.twin_of(finish_async, _run), workers.twin_of(facts_async, _run), workers.twin_of(close_async, _run))


def destination(llm: Any) -> dict[str, Any]:
    """The destination of a job for this engine, from what its ranks chose."""
    found = facts(llm)[0]["facts"]
    if found["expert_location"] != "trivial":
        raise InvalidArgument(f'the engine places experts by a map, which "auto" does not read: {auto.WRITE_A_JOB}')
    return auto.destination_of(side_of(found), found)
