"""Refit inside vLLM: what its workers do, and what drives them.

As a worker extension, with any release that has them:

    llm = LLM(model, worker_extension_cls="refit.vllm.WorkerExtension", load_format="dummy", …)
    refit.vllm.init(llm, "plan.refit", unique_id)      # while the trainers join
    refit.vllm.update(llm, version="42")               # while the trainers run theirs
    refit.vllm.compare(llm, "checkpoint/")             # now and then: proof that the workers hold what the plan says

As a weight-transfer backend, from vLLM 0.27 on (refit.vllm_weight_transfer):

    LLM(model, weight_transfer_config={"backend": "refit"}, …)

vLLM finds `register` by its plugin entry point. docs/integrations/vllm.md goes from `pip install` to a refit of a live engine.
"""
from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any, Callable, Mapping, Optional, Sequence, Union

from refit import auto, vllm_cores, vllm_driver, vllm_worker, weight_memory, workers
from refit.check import Report
from refit.errors import FailedPrecondition, InvalidArgument
from refit.executor import TIMEOUT_SECONDS, Executor, closing_if_it_fails, meet
from refit.loading import Loaded
from refit.names import shown
from refit.plan import Plan
from refit.vllm_draft import WithDraft
from refit.workers import Reply, WorkerError, checked

__all__ = [
    "BACKEND", "DERIVED", "MOE_BACKENDS", "WorkerError", "WorkerExtension", "bind", "bind_async", "bind_worker", "checked", "close",
    "close_async", "compare", "compare_async", "destination", "destination_of", "facts", "facts_async", "facts_of", "hooks_of", "init", "init_async", "join_worker",
    "load", "load_async", "load_plan", "load_worker", "rank_in_plan", "refusal_after_sleep", "refusal_before_bind", "refusal_of", "register", "run_worker", "server_facts", "tensors_of", "towers_of", "update",
    "update_async",
]

# Where ranks meet: the bytes of a unique id, or these as hex, or what threads of one process share.
Meeting = Any

BACKEND = "refit"

# What vLLM derives from loaded weights and keeps as parameters of its own, beside those of the checkpoint: by the last
# part of the name, the post-hook that makes it again.
DERIVED = {name: "derive-latent-projections" for name in
           ("W_UV", "W_UK_T", "W_UK_T_dcp_qrep", "W_K", "W_K_scale", "W_V", "W_V_scale")}

load_plan = auto.load

# Buffers of vLLM's attention. They are saved with a model, and vLLM sets them after it loaded one, in whatever way.
SCALES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")

# Backends of experts, and the job's "moe_backend" that has their order of w13 and w2. Others reorder these as no plan does, or their
# scales, behind the same shapes.
MOE_BACKENDS = {"TRITON": "triton", "BATCHED_TRITON": "triton", "VLLM_CUTLASS": "triton", "BATCHED_VLLM_CUTLASS": "triton",
                "FLASHINFER_CUTLASS": "flashinfer_cutlass"}


def register() -> None:
    """Makes "refit" a weight-transfer backend of this process. vLLM calls it in each of its own; call it in trainers.
    Safe to call again. Does nothing in a vLLM that has no weight transfer."""
    try:
        factory = importlib.import_module("vllm.distributed.weight_transfer.factory")
    except ImportError:
        return
    for registry, name in (("WeightTransferEngineFactory", "RefitWeightTransferEngine"),
                           ("WeightTransferTrainerFactory", "RefitTrainerWeightTransferEngine")):
        known = getattr(factory, registry, None)
        if known is not None and BACKEND not in known._registry:
            known.register_engine(BACKEND, "refit.vllm_weight_transfer", name)


# The worker's side.


def data_parallel_of(plan: Plan, parallel: Any, engines: Optional[int] = None) -> int:
    """How many engine cores the worker's engine has. Each core of a dense model computes by itself, and vLLM sets data_parallel_size
    to 1 there. Then the plan tells, if it is known how many `engines` join."""
    cores: int = parallel.data_parallel_size
    # vLLM keeps the core's number, and chose ports for the cores to meet by.
    is_one_of_several = parallel.data_parallel_index > 0 or bool(getattr(parallel, "_data_parallel_master_port_list", ()))
    if cores > 1 or engines is None or not is_one_of_several:
        return cores
    world: int = parallel.world_size
    return max(1, plan.destination_ranks // (engines * world))


def rank_in_plan(plan: Plan, parallel: Any, rank: int, engine: int = 0, data_parallel: Optional[int] = None) -> int:
    """The plan's rank of a vLLM worker. vLLM's order: tensor-parallel fastest, then pipeline (these two are `rank`),
    then data-parallel, then engines. `data_parallel`: how many cores the engine has, if the worker's vLLM does not know."""
    within = parallel.data_parallel_index * parallel.world_size + rank
    cores = data_parallel or parallel.data_parallel_size
    return workers.rank_in_plan(
        plan, within, engine, tensor_parallel=parallel.tensor_parallel_size, pipeline_parallel=parallel.pipeline_parallel_size,
        data_parallel=cores, ranks=parallel.world_size * cores)


def tensors_of(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters that a refit may write, and the buffers. Not among them: what vLLM derives from others or sets itself."""
    parameters = {name: tensor for name, tensor in model.named_parameters()
                  if name.rpartition(".")[2] not in DERIVED}
    return parameters, {name: tensor for name, tensor in model.named_buffers() if name.rpartition(".")[2] not in SCALES}


def towers_of(model: Any) -> list[str]:
    """What vLLM built beside the language model."""
    return list(getattr(model, "_tower_model_names", ()))


def hooks_of(model: Any, act_dtype: Any = None) -> dict[str, Callable[[str, Any], None]]:
    """The post-hooks that vLLM's own code performs, for `Executor.bind`. What they make stays where it is, so that
    captured CUDA graphs hold. `act_dtype`: the dtype that the model computes in; default: that of each tensor."""
    modules = list(model.named_modules())  # a draft model beside it has modules of the same names

    def attention_of(name: str) -> list[Any]:
        """That in the tensor's module, as of sinks, or beside it, as of projections."""
        owner = name.rpartition(".")[0]
        for holder in (owner, owner.rpartition(".")[0]):
            found = [module for path, module in modules if (path == holder or path.startswith(holder + "."))
                     and hasattr(module, "impl") and hasattr(module, "process_weights_after_loading")]
            if found:
                return found
        return []

    def derive(name: str, tensor: Any) -> None:
        """Calls process_weights_after_loading of the attention that computes with the tensor."""
        found = attention_of(name)
        if not found:
            raise LookupError(f"no attention beside \"{name}\" derives anything in this vLLM")
        for module in found:
            _derive_in_place(module, tensor.dtype if act_dtype is None else act_dtype)

    def broadcast(name: str, tensor: Any) -> None:
        """Has the model of deepseek_v4 sum the streams of its first layer's tensor again, in place."""
        of_models = [module for _, module in modules if hasattr(module, "finalize_mhc_broadcast_weights")]
        if not of_models:
            raise LookupError(f"no model of this vLLM derives anything from \"{name}\"")
        for module in of_models:
            module.finalize_mhc_broadcast_weights()

    return {"negative-exp": workers.negative_exp, "derive-latent-projections": derive, "derive-attention-sinks": derive,
            "derive-hyper-broadcast": broadcast}


def _derive_in_place(module: Any, act_dtype: Any) -> None:
    """Releases that make new tensors would leave captured graphs with the old ones."""
    torch = importlib.import_module("torch")

    def derived() -> dict[tuple[Any, str], Any]:
        return {(owner, name): tensor for owner in (module, module.impl) for name, tensor in
                [*vars(owner).items(), *getattr(owner, "_parameters", {}).items()]
                if (name in DERIVED or name == "sinks") and isinstance(tensor, torch.Tensor)}

    before = derived()
    with torch.no_grad():
        module.process_weights_after_loading(act_dtype)
        for (owner, name), new in derived().items():
            old = before.get((owner, name))
            if old is None or old is new or old.data_ptr() == new.data_ptr():
                continue
            if old.shape == new.shape and old.dtype == new.dtype:
                old.copy_(new)
                setattr(owner, name, old)


def facts_of(vllm_config: Any, model: Any) -> dict[str, Any]:
    """What the worker's vLLM chose that a job has to say, or that no job can."""
    parallel = vllm_config.parallel_config
    backends = {getattr(getattr(module, "quant_method", None), attribute, None)
                for _, module in model.named_modules() for attribute in ("unquantized_backend", "fp8_backend", "mxfp8_backend")}
    placements = {placement for _, module in model.named_modules() if (placement := _placement_of(module))}
    return {"vllm": importlib.import_module("vllm").__version__,
            "tensor_parallel": parallel.tensor_parallel_size,
            "pipeline_parallel": parallel.pipeline_parallel_size,
            "data_parallel": parallel.data_parallel_size,
            "expert_parallel": bool(getattr(parallel, "enable_expert_parallel", False)),
            "expert_placements": sorted(placements),
            "moves_experts": bool(getattr(parallel, "enable_eplb", False)),
            "mm_encoder_tp_mode": getattr(getattr(vllm_config.model_config, "multimodal_config", None), "mm_encoder_tp_mode", None),
            "dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
            "quantization": vllm_config.model_config.quantization,
            "holds_experts": workers.holds_experts(name for name, _ in model.named_parameters()),
            "moe_backends": sorted(backend.name for backend in backends if backend is not None)}


def _placement_of(module: Any) -> str:
    """Which experts of a layer stand on this rank, by the map that vLLM loads them and computes by: "linear", "round_robin", "linear or
    round_robin" if both place them so, "unknown" if neither does. "" if the module has no experts, or all. What vLLM was asked for
    may differ: it falls back to linear where a model has no groups of experts."""
    owner = getattr(module, "expert_map_manager", module)  # in older releases the layer has the map itself
    if not hasattr(owner, "expert_map"):  # others know the size of the expert-parallel group, too
        return ""
    experts, ranks = owner.expert_map, int(getattr(owner, "ep_size", 1))
    if ranks == 1:
        return ""
    if experts is None:
        return "unknown"
    rank = int(owner.ep_rank)
    slots = {slot: expert for expert, slot in enumerate(experts.tolist()) if slot >= 0}
    here = [slots[slot] for slot in sorted(slots)]
    count, more = divmod(len(experts), ranks)
    begin = rank * count + min(rank, more)
    ways = {"linear": range(begin, begin + count + (rank < more)), "round_robin": range(rank, len(experts), ranks)}
    return " or ".join(way for way, expected in ways.items() if here == list(expected)) or "unknown"


def refusal_of(facts: Mapping[str, Any], requirements: Mapping[str, str], check_backends: bool = True) -> str:
    """Why a plan of these `requirements` does not fit this worker although names and shapes may; "" if it does. Without
    `check_backends` the experts' backend is not compared, where they stand is."""
    def moe_backend(wanted: str) -> str:
        restart = f"start vLLM with moe_backend \"{wanted}\" (kernel_config)"
        return workers.moe_backend_refusal(facts["moe_backends"], MOE_BACKENDS, wanted, restart, facts["holds_experts"])

    def expert_placement(wanted: str) -> str:
        if facts["moves_experts"]:
            return "the engine moves experts while it serves (EPLB), which no plan follows: start vLLM without enable_eplb"
        if facts["moe_backends"] and facts["expert_parallel"] and not facts["expert_placements"]:
            return (f"no layer of vLLM {facts['vllm']} tells which experts stand on this rank, and the plan has them in the order {wanted}: "
                    "install a release of Refit that knows this vLLM, or start it without enable_expert_parallel")
        for found in facts["expert_placements"]:
            if wanted in found.split(" or "):
                continue
            remedy = "no plan of this release has that order"
            if found != "unknown":
                remedy = f'put "experts": {{"placement": "{found.split(" or ")[0]}"}} into the job\'s destination'
                if wanted == "linear":
                    remedy += ', or start vLLM with expert_placement_strategy="linear"'
            return f"the engine's ranks hold experts in the order {found}; the plan has them in the order {wanted}: {remedy}"
        return ""

    return workers.refusal_of(requirements, moe_backend, expert_placement, check_backends)


def refusal_of_packed(executor: Any, parameters: Mapping[str, Any]) -> str:
    """Why a plan does not fit a worker whose kernels keep weights elsewhere; "" if they do not."""
    planned = executor.plan.tensors(executor.rank)
    packed = [name for name, tensor in parameters.items() if name in planned and 0 in tensor.shape and 0 not in planned[name].shape]
    return "" if not packed else (
        f"vLLM emptied {shown(packed)} after loading: its kernels for CPUs keep weights packed, in an order that no plan "
        "has. Serve on GPUs")


def side_of(facts: Mapping[str, Any], vision: bool = False) -> dict[str, Any]:
    """The destination of a job for this worker; with `vision` of one that moves the vision tower."""
    return workers.side_of("vllm", ".".join(str(facts["vllm"]).split(".")[:2]), facts, (
        "tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel"), MOE_BACKENDS, vision)


def job_side(facts: Mapping[str, Any], vision: bool = False) -> str:
    """The same in words."""
    return workers.job_side(side_of(facts, vision), facts)


def join_worker(plan: Union[Plan, str], meeting: Meeting, vllm_config: Any, model: Any, *, rank: int, device: Any,
                engine: int = 0, engines: Optional[int] = None, data_parallel: Optional[int] = None, check_backends: bool = True,
                counts: Optional[dict[str, float]] = None, timeout: float = TIMEOUT_SECONDS) -> Executor:
    """An executor that is bound to a vLLM worker's live model. `engines`: of how many that join, and `data_parallel`: how many cores
    each has, if that is known."""
    with workers.ending_the_meeting(meeting):
        plan = auto.load(plan)
    place = _place_of(plan, meeting, vllm_config, model, rank, engine, engines, data_parallel)
    with workers.ending_the_meeting(meeting):
        executor = meet(plan, place, meeting, device=device, counts=counts)
    with closing_if_it_fails(executor):
        bind_worker(executor, vllm_config, model, check_backends=check_backends, timeout=timeout)
    return executor


def _place_of(plan: Plan, meeting: Meeting, vllm_config: Any, model: Any, rank: int, engine: int, engines: Optional[int],
              data_parallel: Optional[int]) -> int:
    """The plan's rank of a worker. A plan for another mesh, or another model, is refused."""
    parameters, buffers = tensors_of(model)
    parallel = vllm_config.parallel_config
    cores = data_parallel or data_parallel_of(plan, parallel, engines)
    return workers.place_in_plan(
        plan, lambda: rank_in_plan(plan, parallel, rank, engine, cores), ranks=parallel.world_size * cores,
        parameters=parameters, buffers=buffers, towers=towers_of(model), meeting=meeting,
        job_side=lambda: job_side({**facts_of(vllm_config, model), "data_parallel": cores}),
        without_lora="start vLLM without enable_lora", engines=engines, is_inferred=cores != parallel.data_parallel_size)


def bind_worker(executor: Executor, vllm_config: Any, model: Any, *, check_backends: bool = True,
                timeout: float = TIMEOUT_SECONDS) -> None:
    """Binds a vLLM worker's live model, also anew."""
    with workers.before_bind(executor, timeout):
        options = _holding(executor, vllm_config, model, check_backends)
        options["refusal"] = options["refusal"] or refusal_after_sleep(executor, model)
    workers.bind(executor, **options, module=model, timeout=timeout)
    weight_memory.bound(model)


def _holding(place: Any, vllm_config: Any, model: Any, check_backends: bool) -> dict[str, Any]:
    """What a worker at this `place`, a plan and a rank, has for `workers.bind` and `workers.load`."""
    facts, towers = facts_of(vllm_config, model), towers_of(model)
    parameters, buffers = tensors_of(model)
    return {"parameters": parameters, "buffers": buffers, "hooks": hooks_of(model, vllm_config.model_config.dtype), "towers": towers,
            "refusal": refusal_of(facts, place.plan.requirements(place.rank), check_backends) or refusal_of_packed(place, parameters),
            "job_side": job_side(facts, workers.holds_moved_tower(parameters, towers, place)),
            "load_format": vllm_config.load_config.load_format, "persistent": model.state_dict}


def load_worker(plan: Union[Plan, str], checkpoint: str, vllm_config: Any, model: Any, *, rank: int, engine: int = 0,
                engines: Optional[int] = None, data_parallel: Optional[int] = None, check_backends: bool = True) -> Loaded:
    """Writes a vLLM worker's live model from a checkpoint (`refit.load`)."""
    plan = auto.load(plan)
    place = workers.Place(plan, _place_of(plan, None, vllm_config, model, rank, engine, engines, data_parallel))
    loaded = workers.load(place, checkpoint, **_holding(place, vllm_config, model, check_backends))
    weight_memory.restore(model, but=weight_memory.lost(model) - plan.tensors(place.rank).keys())
    return loaded


def run_worker(executor: Executor, model: Any, *, timeout: float, check: bool, dense: bool, version: Optional[str] = None) -> None:
    """One refit of a worker."""
    try:
        workers.run(executor, refusal_after_sleep(executor, model) or refusal_before_bind(model), timeout=timeout, check=check, dense=dense,
                    version=version)
    except FailedPrecondition as error:
        if "Connect makes it whole" not in str(error):
            raise
        raise FailedPrecondition(f"{error}: bind anew on all ranks before the update, by refit.vllm.bind or send_weights(bind=True), "
                                 "which connect too") from error


def refusal_before_bind(model: Any) -> str:
    """Why the worker has to bind before its next refit, or ""."""
    return "" if not weight_memory.released(model) else (
        "vLLM slept since this worker bound, and its weights woke up in other memory: bind anew on all ranks before the update, by "
        "refit.vllm.bind or send_weights(bind=True); refit.verl does so with rollout.free_cache_engine=True")


def refusal_after_sleep(executor: Executor, model: Any) -> str:
    """Why the worker may not serve what the plan's refits make of it, or ""."""
    discarded = weight_memory.lost(model)
    if not discarded:  # asked at every update: listing the tensors of a large model takes milliseconds
        return ""
    lost = workers.left_alone([name for name in tensors_of(model)[0] if name in discarded], towers_of(model), executor)
    drafts = sorted(name for name in discarded if name.startswith(vllm_worker.DRAFT))
    if drafts and not lost and not isinstance(model, WithDraft):
        return (f"vLLM slept at level 2, which discarded the draft model's {shown(drafts)}, and the plan moves no draft model: sleep at level "
                '1, keep them by sleep_preserve_parameter_names=["draft.*"], or refit both by a plan with "mtp" and the weight-transfer backend')
    return "" if not lost else (
        f"vLLM slept at level 2 (or at an unknown level, before refit_init), which discarded {shown(lost)}, and no refit writes "
        "all of that: sleep at level 1, or keep these by sleep_preserve_parameter_names; under verl set rollout.free_cache_engine=False. "
        "reload_weights loads them again")


def _replies(action: Callable[..., Any]) -> Callable[..., Reply]:
    """Has a worker's method return a reply, which tells an error instead of raising it, and what else the method returned."""
    @functools.wraps(action)
    def method(self: Any, *args: Any, **named: Any) -> Reply:
        found, error = None, ""
        with self._driver_lock:
            try:
                found = action(self, *args, **named)
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
            return {**workers.reply_of(self._refit, self._refit_version, error), **(found or {})}
    return method


class WorkerExtension(vllm_driver.LeavesWithDriver):
    """vLLM mixes these methods into its worker (`worker_extension_cls`), for `collective_rpc`.

    Each returns {"rank", "state", "refits", "version", "delta", "metrics", "error"}: vLLM's executor raises at the first reply that failed
    and leaves the others in their queues, so the next call would be given them. `checked` raises what they tell. The
    functions below call these methods and check.
    """

    _refit: Optional[Executor] = None
    _refit_version: Optional[str] = None
    _refit_check_backends = True

    @_replies
    def refit_init(self: Any, plan: Union[Plan, str], meeting: Meeting, engine: int = 0, check_backends: bool = True,
                   timeout: float = TIMEOUT_SECONDS, engines: Optional[int] = None, data_parallel: Optional[int] = None) -> None:
        """Meets trainers and workers, and binds this worker's tensors. Of several engines `engine` is this one's
        number; `engines` is how many they are, and `data_parallel` how many cores each has, for who knows. An executor of an earlier
        meeting is closed."""
        vllm_worker.watch(self)
        self.leave_with_driver(meeting, lambda: self._refit)
        if self._refit is not None:
            self._refit.close()
            self._refit = None
        self._refit_check_backends = check_backends
        self._refit = join_worker(plan, meeting, self.vllm_config, self.model_runner.model, rank=self.rank, device=self.device,
                                  engine=engine, engines=engines, data_parallel=data_parallel, check_backends=check_backends,
                                  counts=self.__dict__.setdefault("_refit_counts", {}), timeout=timeout)

    @_replies
    def refit_update(self: Any, version: Optional[str] = None, timeout: float = TIMEOUT_SECONDS, check: bool = False,
                     dense: bool = False) -> None:
        """One refit, post-hooks included. `check` and `dense`: as `Executor.run` has them."""
        run_worker(self._refit_executor(), self.model_runner.model, timeout=timeout, check=check, dense=dense, version=version)
        self._refit_version = version

    @_replies
    def refit_bind(self: Any, timeout: float = TIMEOUT_SECONDS) -> None:
        """Binds anew, on all ranks of the plan at once: whenever the memory of weights changed, as sleep mode does. After
        a refit that failed it connects first, which all ranks then must do."""
        executor = self._refit_executor()
        workers.make_whole(executor, timeout)
        bind_worker(executor, self.vllm_config, self.model_runner.model, check_backends=self._refit_check_backends, timeout=timeout)

    @_replies
    def refit_check(self: Any, reference: str, perturb: bool = True, refit: bool = True, timeout: float = TIMEOUT_SECONDS) -> dict[str, Any]:
        """Overwrites the weights, refits, and compares each element with the checkpoint in the directory `reference`
        (`refit.check`). The reply also has "report", `Report.to_dict()`; a difference is no error."""
        from refit.check import check as check_rank

        return {"report": check_rank(self._refit_executor(), reference, live=self.model_runner.model, perturb=perturb, refit=refit,
                                     derived=DERIVED, timeout=timeout).to_dict()}

    @_replies
    def refit_load(self: Any, plan: Union[Plan, str], checkpoint: str, engine: int = 0, check_backends: bool = True,
                   engines: Optional[int] = None, data_parallel: Optional[int] = None) -> dict[str, Any]:
        """Writes the weights from the directory `checkpoint` (`refit.load`). The reply also has "loaded", a `Loaded` as a dict."""
        return {"loaded": load_worker(plan, checkpoint, self.vllm_config, self.model_runner.model, rank=self.rank, engine=engine,
                                      engines=engines, data_parallel=data_parallel, check_backends=check_backends)._asdict()}

    @_replies
    def refit_close(self: Any) -> None:
        if self._refit is not None:
            self._refit.close()

    def refit_metrics(self) -> dict[str, float]:
        """What this worker's last refit took, as `Executor.metrics` tells it; empty before it joined."""
        return {} if self._refit is None else self._refit.metrics()

    def refit_facts(self: Any) -> dict[str, Any]:
        """What the worker's vLLM chose: release, mesh, quantization, backend of the experts."""
        return facts_of(self.vllm_config, self.model_runner.model)

    def refit_describe(self: Any, placements: Any = None, mesh: Any = None, names: Any = None) -> Any:
        """What this worker holds, for `refit.merge`, where no layout of the compiler fits."""
        from refit.description import describe_state_dict

        return describe_state_dict(tensors_of(self.model_runner.model)[0], "destination", rank=self.rank, mesh=mesh,
                                   placements=placements, names=names)

    def _refit_executor(self) -> Executor:
        if self._refit is None:
            raise InvalidArgument("refit_init was not called, or failed")
        return self._refit


# The driver's side. Each function is for the `AsyncLLM` of a running event loop, and has a twin for an `LLM`, which blocks.


def init(llm: Any, plan: Union[Plan, str], meeting: Meeting, engine: int = 0, *, check_backends: bool = True,
         timeout: float = TIMEOUT_SECONDS) -> list[Reply]:
    """Has the workers of an `LLM` join, while the trainers do. `plan` is a path that the workers can read, or what
    `refit.auto.inline` made of a plan. Of several engines `engine` is this one's number."""
    with workers.ending_the_meeting(meeting):
        return workers.at_once(_init(llm, plan, meeting, engine, check_backends, timeout))


async def init_async(llm: Any, plan: Union[Plan, str], meeting: Meeting, engine: int = 0, *, check_backends: bool = True,
                     timeout: float = TIMEOUT_SECONDS) -> list[Reply]:
    async with workers.ending_the_meeting_async(meeting):
        return await _init(llm, plan, meeting, engine, check_backends, timeout)


async def _init(llm: Any, plan: Any, meeting: Meeting, engine: int, check_backends: bool, timeout: float) -> list[Reply]:
    told = (plan, meeting, engine, check_backends, timeout, None, vllm_cores.engine_cores(llm))
    try:
        return checked(await vllm_cores.call(llm, "refit_init", told, timeout=timeout))
    except Exception as error:
        if "refit_init'" not in str(error):  # vLLM says no more than that its worker has no such method
            raise
        raise FailedPrecondition(f'{error}: start vLLM with worker_extension_cls="refit.vllm.WorkerExtension"') from error


async def bind_async(llm: Any, *, timeout: float = TIMEOUT_SECONDS) -> list[Reply]:
    """Has them bind anew, while the trainers bind (and connect before, if the last refit failed)."""
    return checked(await vllm_cores.call(llm, "refit_bind", (timeout,), timeout=timeout))


async def update_async(llm: Any, *, version: Optional[str] = None, pause: Optional[str] = "keep", reset_caches: bool = True,
                       resume: bool = True, check: bool = False, dense: bool = False,
                       timeout: float = TIMEOUT_SECONDS) -> list[Reply]:
    """One refit of an engine, while the trainers run theirs.

    `pause`: what becomes of an `AsyncLLM`'s requests under way ("abort", "wait", "keep"; vLLM's pause_generation), None if the engine is
    paused already. After an error it stays paused: its weights are torn. No request of an `LLM` may be under way.

    `version` becomes the engine's weight version, in releases that have one. `reset_caches`: the prefix cache and the
    encoder cache hold what the old weights computed. `check`: workers and trainers compare what they hold, as
    `Executor.run(check=True)` does; the trainers must give it too. `dense`: a refit of a plan with options.delta that sends
    all, whatever the trainers ask for: after something else than a refit wrote the workers' tensors.
    """
    pauses = pause is not None and hasattr(llm, "pause_generation")
    if pauses:
        await vllm_cores.within(timeout, llm.pause_generation(mode=pause, clear_cache=False))
    replies = checked(await vllm_cores.call(llm, "refit_update", (version, timeout, check, dense), timeout=timeout))
    engine = getattr(llm, "llm_engine", llm)  # an `LLM` has one that has the rest
    if reset_caches:
        if _caches_prefixes(engine):
            _check_reset(await vllm_cores.reset_prefix_cache(llm, **_running_too(llm)), replies)
        if hasattr(engine, "reset_encoder_cache"):
            await vllm_cores.within(timeout, engine.reset_encoder_cache())
    set_version = getattr(engine, "update_weight_version", None) or getattr(engine, "set_weight_version", None)
    if version is not None and set_version is not None:
        await vllm_cores.within(timeout, set_version(version))
    if resume and pauses:
        await vllm_cores.within(timeout, llm.resume_generation())
    workers.log_update("vLLM", version, replies)
    return replies


def _caches_prefixes(engine: Any) -> bool:
    """vLLM resets a prefix cache block by block in Python, 8 ms for 200,000 blocks, also where it caches nothing."""
    cache = getattr(getattr(engine, "vllm_config", None), "cache_config", None)
    return getattr(cache, "enable_prefix_caching", None) is not False


def _running_too(llm: Any) -> dict[str, bool]:
    """Requests that are kept hold blocks of the cache, and vLLM then resets none of it unless it may compute theirs anew."""
    option = "reset_running_requests"
    return {option: True} if option in inspect.signature(llm.reset_prefix_cache).parameters else {}


def _check_reset(done: Optional[bool], replies: Sequence[Reply]) -> None:
    if done is False:  # None: a release that does not tell
        raise WorkerError("vLLM did not reset its prefix cache, which holds what the old weights computed: requests hold blocks of "
                          "it. The workers have the new weights; end the requests and update again", replies)


async def compare_async(llm: Any, reference: str, *, perturb: bool = True, refit: bool = True,
                        timeout: float = TIMEOUT_SECONDS) -> list[Report]:
    """`refit.check` on each worker, while the trainers run their refit: what each holds, against the checkpoint in a directory
    that the workers can read. The trainers must hold that checkpoint. No request may be under way.

    `refit=False` compares what the last refit left; then the trainers do nothing.
    """
    replies = await vllm_cores.call(llm, "refit_check", (str(reference), perturb, refit, timeout),
                                    timeout=max(timeout, TIMEOUT_SECONDS))  # it also reads the checkpoint
    return [Report.from_dict(reply["report"]) for reply in checked(replies)]


async def load_async(llm: Any, plan: Union[Plan, str], checkpoint: str, engine: int = 0, *, check_backends: bool = True,
                     timeout: float = TIMEOUT_SECONDS) -> list[Loaded]:
    """Has the workers write their weights from a checkpoint's directory that they can read, by the destination of a plan: each reads its
    own ranges of the files. `plan` and `engine`: as `init` has them. Nobody meets: trainers take no part, and the plan's source may be
    theirs. No request may be under way."""
    told = (plan, str(checkpoint), engine, check_backends, None, vllm_cores.engine_cores(llm))
    return [Loaded(**reply["loaded"]) for reply in checked(await vllm_cores.call(llm, "refit_load", told, timeout=timeout))]


async def facts_async(llm: Any) -> list[dict[str, Any]]:
    """What each worker's vLLM chose (`facts_of`)."""
    return await vllm_cores.call(llm, "refit_facts")


async def close_async(llm: Any) -> list[Reply]:
    """Frees what the workers hold. Close the trainers' executors alike."""
    return checked(await vllm_cores.call(llm, "refit_close"))


bind, update, compare = workers.twin_of(bind_async), workers.twin_of(update_async), workers.twin_of(compare_async)
load, facts, close = workers.twin_of(load_async), workers.twin_of(facts_async), workers.twin_of(close_async)


def destination(llm: Any) -> dict[str, Any]:
    """The destination of a job for this engine, from what its workers chose."""
    return destination_of(facts(llm)[0])


def destination_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The same of `facts_of` a worker, or of what a server tells (`server_facts`)."""
    experts = {"experts": {"placement": "round_robin"}} if facts["expert_placements"] == ["round_robin"] else {}
    return auto.destination_of(side_of(facts), facts) | experts


def server_facts(config: Mapping[str, Any], version: str) -> dict[str, Any]:
    """What a vLLM server tells of its VllmConfig in /server_info. It does not tell the backend of the experts, nor where they stand: the
    placement is the one that the server was asked for."""
    parallel, model = config["parallel_config"], config["model_config"]
    spreads = bool(parallel.get("enable_expert_parallel"))
    return {"vllm": version, "expert_parallel": spreads, "moe_backends": [], "dtype": str(model["dtype"]).removeprefix("torch."),
            "quantization": model.get("quantization"),
            "expert_placements": [parallel.get("expert_placement_strategy") or "linear"] if spreads else [],
            **{key: int(parallel.get(f"{key}_size") or 1) for key in ("tensor_parallel", "pipeline_parallel", "data_parallel")}}
