"""Refit inside SGLang: what its schedulers do, and what drives them.

    engine = sglang.Engine(model_path=…, load_format="dummy", …)     # or the URL of a server
    refit.sglang.init(engine, "plan.refit", unique_id)               # while the trainers join
    refit.sglang.update(engine, version="42")                        # while the trainers run theirs

SGLang finds `register` by its plugin entry point. docs/integrations/sglang.md goes from `pip install` to a refit of a live engine.

A request of ours is SGLang's own update_weights_from_tensor, of load format "refit", with JSON in place of tensors. Every
scheduler process gets it: there is one for each rank of tensor and pipeline parallelism. Pipeline stages get it one after the
other, each when the one before it is done; but a refit needs all ranks at once. So there a request begins the work on a thread,
and a second request waits for it.
"""
from __future__ import annotations

import asyncio
import base64
import datetime
import importlib
import json
import os
import threading
import urllib.error
import urllib.request
from typing import Any, Awaitable, Callable, Mapping, NamedTuple, Optional, Sequence, Union

from refit.errors import BindError, Error, FailedPrecondition, InvalidArgument
from refit.executor import TIMEOUT_SECONDS, Executor
from refit.moe_backends import moe_backend_refusal
from refit.plan import Plan
from refit.rendezvous import from_unique_id

LOAD_FORMAT = "refit"

# Backends of unquantized experts, and the job's "moe_backend" that has their order of w13 and w2. Others reorder these as no
# plan does, behind the same shapes.
MOE_BACKENDS = {"triton": "triton", "deep_gemm": "triton", "triton_kernel": "triton_kernel",
                "flashinfer_cutlass": "flashinfer_cutlass"}

# How long the ranks of an engine wait for each other's replies, beyond what their work may take.
GRACE_SECONDS = 60.0

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_tensor"
_registered = False


def register() -> None:
    """Makes "refit" a load format of this process's update_weights_from_tensor. SGLang calls it in each of its own. Safe to
    call again. Does nothing where SGLang has no plugins."""
    global _registered
    try:
        plugins = importlib.import_module("sglang.srt.plugins.hook_registry")
    except ImportError:
        return
    if not _registered:
        plugins.HookRegistry.register(_UPDATER, _update_weights_from_tensor, plugins.HookType.AROUND)
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
    ranks = world * place.data_parallel
    found = engine * ranks + place.data_rank * world + place.pipeline_rank * place.tensor_parallel + place.tensor_rank
    if found >= plan.destination_ranks or plan.destination_ranks % ranks != 0:
        raise InvalidArgument(
            f"the plan has {plan.destination_ranks} destination ranks; engine {engine} of tensor_parallel "
            f"{place.tensor_parallel}, pipeline_parallel {place.pipeline_parallel}, data_parallel {place.data_parallel} is "
            f"its ranks {engine * ranks} to {(engine + 1) * ranks - 1}")
    return plan.source_ranks + found


def tensors_of(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters that a refit may write, and the buffers. Not among them: scales of the cache, which no layout has."""
    parameters = {name: tensor for name, tensor in model.named_parameters()
                  if name.rpartition(".")[2] not in ("k_scale", "v_scale")}
    return parameters, dict(model.named_buffers())


def hooks_of(model: Any) -> dict[str, Callable[[str, Any], None]]:
    """The post-hooks that SGLang's own code performs, for `Executor.bind`. What they make stays where it is, so that captured
    CUDA graphs hold."""
    modules = dict(model.named_modules())

    def negative_exp(_: str, tensor: Any) -> None:
        """As SGLang's loader of Mamba's A computes it: the same bits as a fresh load."""
        torch = importlib.import_module("torch")
        with torch.no_grad():
            tensor.copy_(-torch.exp(tensor.float()))

    def derive_latent(name: str, _: Any) -> None:
        """w_kc and w_vc of the attention that holds kv_b_proj. SGLang copies them into the tensors it has."""
        torch = importlib.import_module("torch")
        if not hasattr(model, "post_load_weights"):
            raise LookupError(f'SGLang\'s {type(model).__name__} has no post_load_weights, which would derive from "{name}"')
        with torch.no_grad():
            model.post_load_weights(weight_names=[name])

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

    return {"negative-exp": negative_exp, "derive-latent-projections": derive_latent, "drop-router-copy": refresh_router_copy}


def facts_of(runner: Any, parallel: Any, expert_location: str = "trivial", expert_rebalancing: bool = False) -> dict[str, Any]:
    """What the worker's SGLang chose that a job has to say, or that no job can."""
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
            "moe_backends": sorted(backends),
            "swiglu_interleaved": any(getattr(method, "w13_swiglu_interleaved", False) for method in methods),
            "expert_location": expert_location,
            "expert_rebalancing": expert_rebalancing}


def refusal_of(facts: Mapping[str, Any], requirements: Mapping[str, str]) -> str:
    """Why a plan of these `requirements` does not fit this worker although names and shapes may; "" if it does."""
    wanted = requirements.get("moe_backend", "triton")
    restart = f"start SGLang with --moe-runner-backend {wanted}"
    if refusal := moe_backend_refusal(facts["moe_backends"], MOE_BACKENDS, wanted, restart):
        return refusal
    if facts["swiglu_interleaved"]:
        return ("the experts' gate and up rows are interleaved, which no plan does: start SGLang with "
                "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED=0")
    if "expert_placement" not in requirements:
        return ""
    if facts["expert_rebalancing"]:
        return "the engine moves experts while it serves, which no plan follows: start SGLang without --enable-eplb"
    location = facts["expert_location"]
    if requirements["expert_placement"] == "linear" and location != "trivial":
        return (f"the engine places experts by --init-expert-location {location[:80]}; the plan has them in their order: put "
                "the map as \"experts\" into the job's destination, or start SGLang without the option")
    return ""


def _job_side(facts: Mapping[str, Any]) -> str:
    """The destination of a job for this worker."""
    keys = [f'"layout": "sglang", "version": "{facts["sglang"]}"']
    keys += [f'"{key}": {facts[key]}'
             for key in ("tensor_parallel", "pipeline_parallel", "data_parallel", "dp_attention", "expert_parallel")
             if facts[key] != 1]
    keys += ['"dp_lm_head": true'] if facts["dp_lm_head"] else []
    backends = {order for name in facts["moe_backends"] if (order := MOE_BACKENDS.get(name, "triton")) != "triton"}
    keys += [f'"moe_backend": "{order}"' for order in backends]
    quantized = f', quantization {facts["quantization"]}' if facts["quantization"] else ""
    return f'this worker is "destination": {{{", ".join(keys)}}}, dtype {facts["dtype"]}{quantized}'


class Worker:
    """What a scheduler process keeps. Its methods are for that process's main thread.

    `runner` is SGLang's ModelRunner, `parallel` its ParallelContext. `gather` gives each rank of the engine the replies of
    all; collective over them.
    """

    def __init__(self, runner: Any, parallel: Any, gather: Callable[[dict[str, Any], float], list[dict[str, Any]]],
                 experts: Optional[Callable[[], tuple[str, bool]]] = None):
        self._runner = runner
        self._parallel = parallel
        self._gather = gather
        self._experts = experts or (lambda: ("trivial", False))
        self.executor: Optional[Executor] = None
        self._version: Optional[str] = None
        self._check_backends = True
        self._thread: Optional[threading.Thread] = None
        self._replies: list[dict[str, Any]] = []

    def handle(self, request: Mapping[str, Any]) -> Optional[list[dict[str, Any]]]:
        """Performs a request, on all ranks of the engine. Returns the replies of all, or None: then a request {"op": "wait"}
        does so, since the work has only begun."""
        if request["op"] == "wait":
            return self._wait()
        if self._parallel.pp_size == 1:
            self._perform(request)
            return self._replies
        if self._thread is not None:
            self._wait()  # whoever drove us went away in between
        self._thread = threading.Thread(target=self._perform_on_thread, args=(dict(request),), daemon=True)
        self._thread.start()
        return None

    def _wait(self) -> list[dict[str, Any]]:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._replies

    def _perform_on_thread(self, request: Mapping[str, Any]) -> None:
        device = self._device()
        if device.startswith("cuda"):
            importlib.import_module("torch").cuda.set_device(device)
        self._perform(request)

    def _perform(self, request: Mapping[str, Any]) -> None:
        timeout = float(request.get("timeout", TIMEOUT_SECONDS))
        error, facts = "", None
        try:
            if request["op"] == "init":
                self._init(request, timeout)
            elif request["op"] == "bind":
                if self._joined().state == "torn":
                    self._joined().connect(timeout)
                self._bind(timeout)
            elif request["op"] == "update":
                self._joined().run(timeout=timeout)
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
        executor = self.executor
        reply: dict[str, Any] = {
            "rank": None if executor is None else executor.rank, "state": "none" if executor is None else executor.state,
            "refits": 0 if executor is None else executor.refits, "version": self._version, "error": error}
        if facts is not None:
            reply["facts"] = facts
        try:
            self._replies = self._gather(reply, timeout + GRACE_SECONDS)
        except Exception as failure:
            reply["error"] = error or f"no replies of the engine's other ranks: {type(failure).__name__}: {failure}"
            self._replies = [reply]

    def facts(self) -> dict[str, Any]:
        """What SGLang chose here: release, mesh, quantization, backend of the experts."""
        return facts_of(self._runner, self._parallel, *self._experts())

    def _init(self, request: Mapping[str, Any], timeout: float) -> None:
        if self.executor is not None:
            self.executor.close()
            self.executor = None
        plan = Plan.load(request["plan"])
        rank = rank_in_plan(plan, place_of(self._parallel), int(request.get("engine", 0)))
        meeting = bytes.fromhex(request["meeting"])
        executor = Executor(plan, rank, device=self._device(), rendezvous=from_unique_id(meeting, rank, plan.world_size))
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
        facts = self.facts()
        refusal = refusal_of(facts, executor.plan.requirements(executor.rank)) if self._check_backends else ""
        parameters, buffers = tensors_of(model)
        try:
            # Also a worker that is refused binds, nothing: the others would wait for it.
            executor.bind({} if refusal else parameters, buffers, hooks=hooks_of(model), timeout=timeout)
        except BindError as error:
            raise BindError(f"rank {executor.rank}: {refusal}" if refusal else f"{error}\n{_job_side(facts)}") from None

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

        def experts() -> tuple[str, bool]:
            moe = context.get_exec().moe
            return str(moe.init_expert_location), bool(moe.enable_eplb)

        _worker = Worker(manager.tp_worker.model_runner, parallel, _Gather(parallel), experts)
    fields = json.loads(request.serialized_named_tensors[0])
    replies = _worker.handle(fields)
    if replies is None:
        return io_struct.UpdateWeightsFromTensorReqOutput(success=True, message=json.dumps({"replies": None, "error": ""}))
    failed = any(reply["error"] for reply in replies)
    error = ""
    if not failed and fields.get("updates"):
        manager.record_weight_version_after_update(request.weight_version)
        flushed, error = manager.flush_cache_after_weight_update(request, True, "")
        failed = not flushed
    return io_struct.UpdateWeightsFromTensorReqOutput(success=not failed,
                                                      message=json.dumps({"replies": replies, "error": error}))


class _Gather:
    """Gives each rank of the engine the replies of all. By a group of its own: SGLang's are its main threads'."""

    def __init__(self, parallel: Any):
        self._parallel = parallel
        self._group: Any = None

    def __call__(self, reply: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        dist = importlib.import_module("torch.distributed")
        ranks = self._parallel.tp_size * self._parallel.pp_size
        if ranks == 1:
            return [reply]
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=max(timeout, 2 * TIMEOUT_SECONDS)))
        replies: list[Any] = [None] * ranks
        dist.all_gather_object(replies, reply, group=self._group)
        return replies


# The driver's side.


class WorkerError(Error):
    """Ranks of an engine failed: `replies` are those of all, in SGLang's order."""

    code = "ABORTED"

    def __init__(self, message: str, replies: Sequence[Mapping[str, Any]] = ()):
        super().__init__(message)
        self.replies = list(replies)


class Server:
    """A server that is reached by HTTP: `Server("http://host:30000", api_key)`. A URL as text means the same without a key."""

    def __init__(self, url: str, api_key: Optional[str] = None):
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def update_weights(self, payload: bytes, version: Optional[str], flush_cache: bool) -> tuple[bool, str]:
        reply = await self._post("update_weights_from_tensor", {
            "serialized_named_tensors": [base64.b64encode(payload).decode()], "load_format": LOAD_FORMAT,
            "flush_cache": flush_cache, "weight_version": version})
        return reply["success"], reply["message"]

    async def pause(self, mode: str) -> None:
        await self._post("pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._post("continue_generation", {})

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return await asyncio.to_thread(self._send, path, json.dumps(body).encode())

    def _send(self, path: str, body: bytes) -> Any:
        request = urllib.request.Request(f"{self.url}/{path}", body, self._headers)
        try:
            with urllib.request.urlopen(request) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            text = error.read()  # a failed update is status 400, with a reply
            if not text.startswith(b'{"success":'):
                raise WorkerError(f"{self.url}/{path}: {error}: {text[:1000].decode(errors='replace')}") from None
        return json.loads(text) if text.startswith(b"{") else None


class _Engine:
    """An sglang.Engine of this process."""

    def __init__(self, engine: Any):
        self._manager = engine.tokenizer_manager
        self._io_struct = importlib.import_module("sglang.srt.managers.io_struct")

    async def update_weights(self, payload: bytes, version: Optional[str], flush_cache: bool) -> tuple[bool, str]:
        request = self._io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload], load_format=LOAD_FORMAT, flush_cache=flush_cache, weight_version=version)
        success, message = await self._manager.update_weights_from_tensor(request, None)
        return success, message

    async def pause(self, mode: str) -> None:
        await self._manager.pause_generation(self._io_struct.PauseGenerationReqInput(mode=mode))

    async def resume(self) -> None:
        await self._manager.continue_generation(self._io_struct.ContinueGenerationReqInput())


Replies = list[dict[str, Any]]


def _client(engine: Any) -> Any:
    if isinstance(engine, str):
        return Server(engine)
    return engine if isinstance(engine, Server) else _Engine(engine)


def _run(engine: Any, work: Awaitable[Replies]) -> Replies:
    loop = getattr(engine, "loop", None)
    if loop is not None:
        replies: Replies = loop.run_until_complete(work)
        return replies
    return asyncio.run(work)  # type: ignore[arg-type]


def check(replies: Sequence[Mapping[str, Any]], error: str = "") -> Replies:
    """The replies of an engine's ranks; WorkerError if any of them tells of an error."""
    lines = [f"worker {i} ({reply['state']}): {reply['error']}" for i, reply in enumerate(replies) if reply["error"]]
    if lines:
        raise WorkerError(f"{len(lines)} of {len(replies)} workers failed\n  " + "\n  ".join(lines), replies)
    if error:
        raise WorkerError(error, replies)
    return [dict(reply) for reply in replies]


async def _ask(client: Any, op: str, version: Optional[str] = None, flush_cache: bool = False, **fields: Any) -> Replies:
    async def send(op: str, **fields: Any) -> Mapping[str, Any]:
        # What marks the end of an update goes with whichever request has the replies.
        payload = json.dumps({"op": op, "updates": updates, "version": version, **fields}).encode()
        success, message = await client.update_weights(payload, version, flush_cache)
        try:
            # SGLang joins the replies of several schedulers, which are alike, and adds words of its own.
            answer: Mapping[str, Any] = json.JSONDecoder().raw_decode(message)[0]
            return {"replies": answer["replies"], "error": answer["error"]}
        except (ValueError, TypeError, KeyError):
            raise WorkerError(f"SGLang answers: {message}\nthis is not refit.sglang's answer: refit has to be installed in "
                              "SGLang's environment, and SGLANG_PLUGINS, where it is set, has to list it") from None

    updates = op == "update"
    answer = await send(op, **fields)
    if answer["replies"] is None:
        answer = await send("wait")
    return check(answer["replies"], answer["error"])


def init(engine: Any, plan: Union[str, "os.PathLike[str]"], meeting: Union[bytes, str], number: int = 0, *,
         check_backends: bool = True, timeout: float = TIMEOUT_SECONDS) -> Replies:
    """Has the ranks of an engine join, while the trainers do, and returns what each says.

    `engine`: an sglang.Engine, a Server, or a server's URL. `plan`: a path that its schedulers can read. `meeting`: the unique
    id. `number`: this engine's among several. `check_backends`: refuse experts in a backend of another order than the plan's.
    """
    return _run(engine, init_async(engine, plan, meeting, number, check_backends=check_backends, timeout=timeout))


async def init_async(engine: Any, plan: Union[str, "os.PathLike[str]"], meeting: Union[bytes, str], number: int = 0, *,
                     check_backends: bool = True, timeout: float = TIMEOUT_SECONDS) -> Replies:
    """`init` inside a running event loop."""
    return await _ask(_client(engine), "init", plan=os.fspath(plan),
                      meeting=meeting if isinstance(meeting, str) else meeting.hex(), engine=number,
                      check_backends=check_backends, timeout=timeout)


def bind(engine: Any, *, timeout: float = TIMEOUT_SECONDS) -> Replies:
    """Has them bind anew, while the trainers bind: whenever the memory of weights changed, as resume_memory_occupation does.
    After a refit that failed they connect first, which all ranks then must do."""
    return _run(engine, _ask(_client(engine), "bind", timeout=timeout))


def facts(engine: Any) -> Replies:
    """What each rank's SGLang chose, under "facts"."""
    return _run(engine, _ask(_client(engine), "facts"))


def close(engine: Any) -> Replies:
    """Frees what the ranks hold. Close the trainers' executors alike."""
    return _run(engine, _ask(_client(engine), "close"))


def update(engine: Any, *, version: Optional[str] = None, pause: Optional[str] = "retract", flush_cache: bool = True,
           resume: bool = True, timeout: float = TIMEOUT_SECONDS) -> Replies:
    """One refit of an engine, while the trainers run theirs.

    `version` becomes the engine's weight version. `pause`: what becomes of requests under way, as SGLang's pause_generation
    has it: "retract" (they go on with the new weights, their cache made anew), "abort", "in_place" (they keep what the old
    weights cached; with `flush_cache=False` alone), or None if the engine is paused already. `flush_cache`: the caches hold
    what the old weights computed. After an error the engine stays paused: its weights are torn.
    """
    return _run(engine, update_async(engine, version=version, pause=pause, flush_cache=flush_cache, resume=resume,
                                     timeout=timeout))


async def update_async(engine: Any, *, version: Optional[str] = None, pause: Optional[str] = "retract",
                       flush_cache: bool = True, resume: bool = True, timeout: float = TIMEOUT_SECONDS) -> Replies:
    """`update` inside a running event loop."""
    client = _client(engine)
    if pause is not None:
        await client.pause(pause)
    replies = await _ask(client, "update", version, flush_cache, timeout=timeout)
    if resume and pause is not None:
        await client.resume()
    return replies
