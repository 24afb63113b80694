"""Refit inside TRL: training processes send their own shards straight into the workers of TRL's vLLM server.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "refit"}' …

    refit.trl.install("plan.refit")              # in each training process, before the trainer is made
    trainer = GRPOTrainer(…)                     # use_vllm=True, vllm_mode="server"

Training processes are the plan's source ranks, the server's workers its destination ranks. TRL lets nobody choose how a trainer's
weights reach vLLM, so `install` replaces the two methods of TRL that do it. docs/integrations/trl.md is the guide.
"""
from __future__ import annotations

import importlib.metadata
import inspect
from typing import Any, Callable, Optional

from accelerate import PartialState
from accelerate.utils import gather_object, is_peft_model
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from refit import auto, trainers
from refit.errors import FailedPrecondition, InvalidArgument, Unimplemented
from refit.plan import Plan
from refit.rendezvous import unique_id
from refit.vllm import BACKEND
from refit.vllm_client import ExtensionHTTPClient, HTTPClient, update_by

# What `install` replaces or calls, with its parameters.
_METHODS = ((VLLMGeneration, "sync_weights", ("self",)), (VLLMClient, "init_communicator", ("self", "device")),
            (VLLMClient, "get_server_info", ("self",)), (VLLMClient, "get_world_size", ("self",)))


EXTENSION = "refit.vllm.WorkerExtension"

# Refit refuses what is configured by these, a job that does not compile among them. Other errors, as of a server that does not
# answer, do not say that Refit cannot move the weights.
REFUSALS = (InvalidArgument, FailedPrecondition, Unimplemented)

# TRL's own methods that `install` replaces.
ORIGINALS: dict[str, Any] = {}


class Updates(trainers.Adapter):
    """A training process's part of the updates; the main process also tells the server's workers theirs."""

    keep_them_there = "keep parameters on the GPU (FSDP without cpu_offload)"

    def __init__(self, plan: auto.Given, *, on_refusal: str = "raise", version: Optional[Callable[[], str]] = None, **options: Any):
        self._falls_back, self._version = trainers.falls_back(on_refusal), version
        super().__init__(plan, **options)
        self._trainer: Any = None  # whose logs have the metrics
        self._client: Callable[[str], HTTPClient] = HTTPClient
        self._init_communicator: Optional[Callable[[], None]] = None  # TRL's own, of the main process
        self._generation: Any = None  # of the trainer that sent last
        self._by_framework: Optional[bool] = None  # since that trainer's first update
        self._meeting: Optional[bytes] = None
        self._engine_joined: Optional[bytes] = None
        self._refused: Optional[Exception] = None  # by `check_server`, of the main process

    def check_server(self, client: Any, init_communicator: Optional[Callable[[], None]] = None) -> None:
        """Refuses a server whose workers are not those of the plan. Nothing is connected before the first update. The main process alone
        has a client, so beside others it keeps the error for the first update, where all hear of it. `init_communicator`: TRL's own."""
        self._init_communicator, self._refused = init_communicator, None
        try:
            self._check_server(client)
        except Exception as error:
            if PartialState().num_processes == 1 and not self._falls_back:
                raise
            self._refused = error

    def _check_server(self, client: Any) -> None:
        info = client.get_server_info()
        found = info.get("weight_transfer_config")
        is_ours = (found or {}).get("backend") == BACKEND
        extension = (info.get("parallel_config") or {}).get("worker_extension_cls")
        self._client = ExtensionHTTPClient if not is_ours and extension == EXTENSION else HTTPClient
        if not is_ours and extension != EXTENSION:
            raise FailedPrecondition(f"the weight transfer of the vLLM server at {client.base_url} is {found}; start it with "
                                     f"""--weight-transfer-config '{{"backend": "{BACKEND}"}}'""")
        if self._plan is not None and not auto.is_made(self._given):
            trainers.refuse_ranks(self._plan, f"the vLLM server at {client.base_url}", workers=(client.get_world_size(), "workers"))

    def send(self, generation: Any) -> None:
        """One refit from the live shards of this process's model. Collective over the training processes, and if it fails on one it fails
        on all. With on_refusal="framework" TRL's own update, if Refit was refused before the first."""
        if generation is not self._generation:
            self._begin(generation)
        if self._by_framework is None and (self._falls_back or self._plan is None):
            self._settle(generation)
        if self._by_framework:
            ORIGINALS["sync_weights"](generation)
            return
        rank = generation.accelerator.process_index
        mine: list[Any] = []

        def prepare() -> tuple[Optional[bytes], bool, Optional[str]]:
            mine.extend(self._prepared(generation))
            # Rank 0 makes the id that all ranks meet by, and keeps it while updates succeed.
            meeting = unique_id() if rank == 0 and not self._sender.joined else self._meeting
            return meeting, self._checks.due, self._version() if rank == 0 and self._version is not None else None

        def update() -> None:
            tensors, device, stream = mine

            def own_part() -> None:
                self._sender.send(rank, told, tensors, device, stream, version=version, check=check)

            if rank == 0:
                trainers.together(lambda: self._tell(generation.vllm_client.base_url, told, check, version), own_part, self._timeout,
                                  self._sender.give_up)
            else:
                own_part()

        try:
            told, check, version = _agreed(prepare)[0]
            self._meeting = told
            _agreed(update)
            self._checks.passed()
        except BaseException:
            self._sender.close()  # on all, so that they meet anew
            raise
        if self._trainer is not None:
            for name, value in self._sender.metrics.items():
                if not name.endswith("_total"):  # TRL logs the mean of what came since its last line
                    self._trainer._metrics["train"][name].append(value)

    def log_with(self, trainer: Any) -> None:
        """Puts the metrics of each update into the logs of a TRL trainer, beside its own."""
        if not isinstance(getattr(trainer, "_metrics", None), dict) or "train" not in trainer._metrics:
            raise InvalidArgument(f"the trainer is a {type(trainer).__name__}; wanted one of TRL that keeps metrics, as GRPOTrainer")
        self._trainer = trainer

    def _begin(self, generation: Any) -> None:
        """On all processes: another trainer has other tensors, and maybe another server. What the last one settled does not hold for it."""
        self._generation, self._by_framework = generation, None
        if self._sender is not None:
            self._sender.close()
        if auto.is_made(self._given):
            self._plan = self._sender = None

    def _settle(self, generation: Any) -> None:
        """Makes the plan of "auto", and decides who moves the weights. Collective, before the first update."""
        is_main = generation.accelerator.process_index == 0

        def settle() -> tuple[Optional[str], Optional[bytes]]:
            try:
                self._refuse(generation)
                plan = self._made(generation) if is_main and self._plan is None else self._plan
                if plan is not None:
                    self._refuse_ranks(plan, generation.accelerator)
                return None, plan.to_bytes() if is_main and plan is not None else None
            except REFUSALS as error:
                if not self._falls_back:
                    raise
                return f"{type(error).__name__}: {error}", None

        told = _agreed(settle)
        refusals = [refusal for refusal, _ in told if refusal is not None]
        if refusals:
            def fall_back() -> None:
                if is_main:
                    trainers.log_fallback("TRL", refusals)
                    if self._init_communicator is not None:
                        self._init_communicator()

            _agreed(fall_back)
        elif self._plan is None:
            self._take_plan(Plan.from_bytes(told[0][1] or b""))
        self._by_framework = bool(refusals)

    def _made(self, generation: Any) -> Plan:
        model, client = generation.model, self._client(generation.vllm_client.base_url)
        plan = auto.made(self._given, lambda: {
            "model": auto.config_of(model), "source": auto.source_of(model, generation.accelerator.num_processes),
            "destination": client.destination()}, self._save_to)
        return plan

    def _refuse(self, generation: Any) -> None:
        if self._refused is not None:
            raise self._refused
        _refuse_unfit(generation)

    def _refuse_ranks(self, plan: Plan, accelerator: Any) -> None:
        trainers.refuse_ranks(plan, "TRL", (accelerator.num_processes, "training processes"))

    def _prepared(self, generation: Any) -> tuple[Any, Any, Any]:
        """This process's tensors, its device and the stream there."""
        self._refuse(generation)
        accelerator = generation.accelerator
        assert self._plan is not None
        self._refuse_ranks(self._plan, accelerator)
        return trainers.live_shards_of(self, generation.model).take(), *trainers.here(str(accelerator.device))

    def _tell(self, url: str, meeting: bytes, check: bool, version: Optional[str]) -> None:
        # Not by TRL's client: that posts again after an error.
        client = self._client(url)
        if self._engine_joined != meeting:
            client.init_weight_transfer_engine({"plan": self._told, "meeting": meeting.hex(), "timeout": self._timeout})
            self._engine_joined = meeting
        update_by(client, {"timeout": self._timeout, "check": check}, version)


def _agreed(action: Callable[[], Any]) -> list[Any]:
    return trainers.agreed(action, lambda said: list(gather_object([said])))


def _refuse_unfit(generation: Any) -> None:
    if reasons := refusals(generation):
        raise FailedPrecondition("\n".join(reasons))


def refusals(generation: Any) -> list[str]:
    """Every reason why Refit does not do what a trainer is set to do with weights. `generation` is its VLLMGeneration."""
    reasons = []
    if generation.mode != "server":
        reasons.append(f'vllm_mode is "{generation.mode}": vLLM is then in the training processes; refit.trl refits a '
                       'server: set vllm_mode="server"')
    if is_peft_model(generation.model):
        reasons.append("TRL merges LoRA adapters in place while it sends; Refit moves whole weights: train without "
                       "peft_config")
    state = generation.accelerator.state
    if getattr(getattr(state, "fsdp_plugin", None), "fsdp_version", None) == 1:
        reasons.append("FSDP 1 has flat parameters, which are no shards of a plan: set fsdp_version: 2")
    if state.deepspeed_plugin is not None and state.deepspeed_plugin.zero_stage == 3:
        reasons.append("ZeRO 3 has flat parameters, which are no shards of a plan: take FSDP 2")
    return reasons


def install(plan: auto.Given, *, on_refusal: str = "raise", version: Optional[Callable[[], str]] = None, **options: Any) -> Updates:
    """Makes the trainers of this process that generate by TRL's VLLMGeneration refit their vLLM server. `options` are
    those of `trainers.Adapter`, `plan` among them. `on_refusal`: "framework" has TRL move the weights if Refit is refused before the first
    update; then `check`, `check_every` and `version` do nothing. `version`: the main process calls it at each update, and vLLM's weight
    version becomes what it returns. Call `install` again to replace the plan."""
    release = importlib.metadata.version("trl")
    for owner, name, wanted in _METHODS:
        method = getattr(owner, name, None)
        ORIGINALS.setdefault(name, method)
        found = None if method is None else tuple(inspect.signature(method).parameters)
        if found != wanted:
            raise FailedPrecondition(f"TRL {release} has {'no' if found is None else 'another'} {owner.__name__}.{name}"
                                     f"({'' if found is None else ', '.join(found)}); wanted ({', '.join(wanted)}), as of TRL 1.16")
    updates = Updates(plan, on_refusal=on_refusal, version=version, **options)

    def init_communicator(self: Any, device: Any = 0) -> None:
        updates.check_server(self, lambda: ORIGINALS["init_communicator"](self, device))

    def sync_weights(self: Any) -> None:
        updates.send(self)

    setattr(VLLMClient, "init_communicator", init_communicator)
    setattr(VLLMGeneration, "sync_weights", sync_weights)
    return updates
