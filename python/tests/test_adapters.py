"""What adapters of frameworks do by themselves, on stand-ins for what they import. tests/frameworks runs them in the real packages."""
import asyncio
import collections
import concurrent.futures
import dataclasses
import importlib
import json
import sys
import threading
import types

import numpy as np
import pytest

import refit
import refit.trainers
import refit.workers


def module(monkeypatch, path, **names):
    """A stand-in for a module and for the packages that it is in."""
    for i in range(1, path.count(".") + 2):
        name = ".".join(path.split(".")[:i])
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    vars(sys.modules[path]).update(names)
    parent, _, last = path.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, sys.modules[path])
    return sys.modules[path]


def adapter(monkeypatch, name):
    monkeypatch.delitem(sys.modules, f"refit.{name}", raising=False)
    found = importlib.import_module(f"refit.{name}")
    monkeypatch.setitem(sys.modules, f"refit.{name}", found)  # is gone afterwards
    monkeypatch.delattr(refit, name)
    return found


class Sent:
    """A trainer's sender that notes what it is asked for."""

    joined, metrics, stats, delta_report = True, {"refit/seconds": 0.5}, None, None

    def __init__(self):
        self.asked, self.closed = [], 0

    def take(self, weights, rank, meeting):
        return {}

    def send(self, rank, meeting, tensors, device, stream, bind=False, version=None, check=None):
        self.asked.append((version, check))

    def give_up(self, error):
        pass

    def close(self):
        self.closed += 1


@pytest.fixture
def plan_path(tiny_job, tmp_path):
    refit.compile(tiny_job).save(tmp_path / "plan.refit")
    return tmp_path / "plan.refit"


@pytest.fixture
def verl(monkeypatch):
    module(monkeypatch, "verl.checkpoint_engine.base", CheckpointEngine=object,
           CheckpointEngineRegistry=types.SimpleNamespace(register=lambda backend: lambda engine: engine))
    module(monkeypatch, "verl.workers.rollout.base", _ROLLOUT_REGISTRY={})
    return adapter(monkeypatch, "verl")


@pytest.mark.parametrize("fails", ["start_weight_update", "update_weights", None])
def test_an_update_of_verl_that_some_workers_began_is_ended_on_all(verl, fails):
    called = []

    class Adapter(verl.ServerAdapterMixin):
        config, replica_rank, _has_server = types.SimpleNamespace(free_cache_engine=False), 0, False

        async def _execute_method(self, method, kwargs=None):
            called.append(method)
            if method == fails:
                raise RuntimeError("one of the workers is gone")

    async def weights():
        for item in (("init", {"meeting": "00"}), ("update", {"bind": False}), ("engine_sleeps", lambda sleeps: None)):
            yield item

    update = Adapter().update_weights(weights(), wire_format=verl.WIRE_FORMAT)
    if fails is None:
        asyncio.run(update)
    else:
        with pytest.raises(RuntimeError, match="one of the workers is gone"):
            asyncio.run(update)
    assert called[0] == "init_weight_transfer_engine" and called.count("finish_weight_update") == 1 and called[-1] == "finish_weight_update"


def test_verl_has_trainer_0_say_which_updates_are_checked_and_passes_on_steps(verl, plan_path):
    engines = [verl.RefitCheckpointEngine(1 << 20, plan=str(plan_path), is_master=rank == 0, device="cpu", check_every=2) for rank in range(4)]
    for engine in engines:
        engine._sender = Sent()

    async def updated(engine, step):
        return [item async for item in engine.receive_weights(step)]

    wanted = [True, False, True]
    for step, checked in enumerate(wanted):
        metadata = [engine.prepare() for engine in engines]
        metadata[0]["meeting"] = metadata[0]["meeting"] or "00"
        trainers, rollout = engines[0].build_topology(2, 2, metadata)
        for engine, side, i in ((engines[0], trainers, 0), (engines[1], trainers, 1), (engines[2], rollout, 0), (engines[3], rollout, 1)):
            engine.init_process_group(**{name: values[i] for name, values in side.items()})
        for engine in engines[:2]:
            asyncio.run(engine.send_weights(refit.trainers.LiveShards([]), global_steps=step))
        told = dict(asyncio.run(updated(engines[2], step)))["update"]
        assert (told["check"], told["version"]) == (checked, str(step))
    assert engines[0]._sender.asked == engines[1]._sender.asked == [(str(step), checked) for step, checked in enumerate(wanted)]


def test_nemo_rl_counts_updates_on_both_sides_and_checks_since_ranks_met(plan_path, monkeypatch):
    module(monkeypatch, "nemo_rl.utils.checkpoint_engines.base", CheckpointEngine=object)
    nemo_rl = adapter(monkeypatch, "nemo_rl")
    policy, rollout = [nemo_rl.CheckpointEngine(1 << 20, str(plan_path), check_every=2, device="cpu") for _ in range(2)]
    policy._sender, told = Sent(), []
    done = {"state": "bound", "error": ""}
    worker = types.SimpleNamespace(
        refit_init=lambda *_, **__: done, refit_update=lambda version, timeout, check: told.append((version, check)) or done,
        refit_metrics=lambda: {"seconds": 0.25},
        rank=0, vllm_config=types.SimpleNamespace(parallel_config=types.SimpleNamespace(world_size=2, data_parallel_size=1, data_parallel_index=0)))

    async def received():
        return [batch async for batch in rollout.receive_weight_batches()]

    for _ in range(2):
        metadata = [{"plan": policy._plan.digest, "meeting": "00", "updates": policy._updates}]
        policy.init_policy_process_group(worker_rank=0, train_world_size=2, rollout_world_size=2, metadata=metadata)
        nemo_rl._vllm_worker = worker
        rollout.init_rollout_process_group(rollout_rank=0, train_world_size=2, rollout_world_size=2, metadata=metadata)
        for _ in range(3):
            asyncio.run(policy.send_weights(refit.trainers.LiveShards([])))
            assert asyncio.run(received()) == []
    checked = [True, False, True] * 2
    assert told == policy._sender.asked == [(str(update), check) for update, check in enumerate(checked, 1)]
    assert rollout.metrics() == {"refit/seconds": 0.25}
    nemo_rl._vllm_worker = None
    assert policy.metrics() == {"refit/seconds": 0.5}


@pytest.fixture
def backend(monkeypatch):
    """vLLM's weight-transfer backend."""
    pytest.importorskip("torch")

    class Engine:
        __class_getitem__ = classmethod(lambda cls, _: cls)

        def __init__(self, client, source, is_sender):
            self.client, self.source, self.is_sender = client, source, is_sender

    Info = dataclasses.make_dataclass("TrainerInitInfo", [("rank", int, 0), ("is_sender", bool, True)], kw_only=True)
    module(monkeypatch, "vllm.distributed.weight_transfer.base", TrainerInitInfo=Info, TrainerWeightTransferEngine=Engine,
           WeightTransferEngine=Engine, **{name: dataclasses.make_dataclass(name, []) for name in
                                           ("WeightTransferInitInfo", "WeightTransferUpdateInfo")})
    return adapter(monkeypatch, "vllm_weight_transfer")


class Told:
    """A client that notes what it is told."""

    def __init__(self):
        self.told = []

    def init_weight_transfer_engine(self, info):
        self.told.append(refit.auto.load(info["plan"]).digest)

    def start_weight_update(self):
        pass

    def update_weights(self, info):
        self.told.append(info["check"])

    def finish_weight_update(self, weight_version=None):
        self.told.append(weight_version)


def test_vllms_backend_makes_its_plan_and_checks_each_kth_update(tiny_job, backend, monkeypatch, tmp_path):
    asked, client = [], Told()
    executor = types.SimpleNamespace(run=lambda stream, timeout, check, dense, version: asked.append((version, check)), close=lambda: None)
    monkeypatch.setattr(refit.trainers, "join", lambda *_, **__: executor)
    source = types.SimpleNamespace(iter_local=lambda: iter({}.items()))
    info = backend.RefitTrainerInitInfo(rank=0, plan=tiny_job, meeting="00", device="cpu", check_every=2, save_to=tmp_path)
    trainer = backend.RefitTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)
    for version in "abc":
        trainer.send_weights(version)
    assert client.told == [refit.compile(tiny_job).digest, True, "a", False, "b", True, "c"]
    assert asked == [("a", True), ("b", False), ("c", True)]
    info = dataclasses.replace(info, plan="auto")
    with pytest.raises(refit.InvalidArgument, match='plan="auto" needs a ModuleSource and a refit.vllm_client.HTTPClient; found a SimpleNamespace'):
        backend.RefitTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)
    with pytest.raises(refit.InvalidArgument, match="check_every is -1"):
        backend.RefitTrainerWeightTransferEngine.trainer_init(dataclasses.replace(info, plan=tiny_job, check_every=-1), client=client, source=source)


def test_a_worker_of_vllms_backend_is_told_the_version(backend, monkeypatch):
    ran = []
    monkeypatch.setattr(backend, "run_worker", lambda executor, model, **told: ran.append(told["version"]))
    engine = object.__new__(backend.RefitWeightTransferEngine)
    engine.executor = object()
    for told in ({"version": "7"}, {}):
        engine.receive_weights(backend.RefitUpdateInfo(**told))
    assert ran == ["7", None]


def test_trainers_of_vllms_backend_that_meet_anew_count_the_same_updates(plan_path, backend, monkeypatch):
    asked = {0: [], 1: []}
    monkeypatch.setattr(refit.trainers, "join", lambda plan, rank, *_, **__: types.SimpleNamespace(
        run=lambda stream, timeout, check, dense, version: asked[rank].append(check), close=lambda: None))
    trainers = []
    for rank in range(2):
        info = backend.RefitTrainerInitInfo(rank=rank, is_sender=False, plan=str(plan_path), meeting="00", device="cpu", check_every=3)
        source = types.SimpleNamespace(iter_local=lambda: iter({}.items()))
        trainers.append(backend.RefitTrainerWeightTransferEngine.trainer_init(info, client=None, source=source))
    trainers[0].send_weights()
    trainers[1].shutdown()  # it failed before it counted this update
    for _ in range(2):
        for trainer in trainers:  # as SkyRL's do after an update that failed
            trainer.shutdown()
            trainer._meet()
        for _ in range(4):
            for trainer in trainers:
                trainer.send_weights()
    assert asked[0][1:] == asked[1] == [True, False, False, True] * 2


@pytest.mark.parametrize("bind", [False, True])
def test_a_trainer_of_vllms_backend_without_its_tensors_leaves_nobody_waiting(plan_path, backend, monkeypatch, bind):
    closed = []
    monkeypatch.setattr(refit.trainers, "join", lambda *_, **__: types.SimpleNamespace(close=lambda: closed.append(True)))
    shards = {}
    source = types.SimpleNamespace(iter_local=lambda: iter(shards.items()))
    info = backend.RefitTrainerInitInfo(rank=1, is_sender=False, plan=str(plan_path), meeting="00", device="cpu")
    trainer = backend.RefitTrainerWeightTransferEngine.trainer_init(info, client=None, source=source)

    def fails():
        raise KeyError("only here")

    source.iter_local = fails
    with pytest.raises(KeyError, match="only here"):
        trainer.send_weights(bind=bind)
    assert closed == [True] and trainer.executor is None
    with pytest.raises(refit.FailedPrecondition, match="this trainer did not join, or was shut down"):
        trainer.send_weights()


def test_a_trainer_that_nobody_hands_the_plan_is_refused(tiny_job, backend):
    source = types.SimpleNamespace(iter_local=lambda: iter({}.items()))
    for plan in ("auto", tiny_job):
        info = backend.RefitTrainerInitInfo(rank=1, is_sender=False, plan=plan, meeting="00", device="cpu")
        with pytest.raises(refit.InvalidArgument, match="trainer 1 .*torch.distributed is not initialized: call .*or pass the path"):
            backend.RefitTrainerWeightTransferEngine.trainer_init(info, client=None, source=source)


@pytest.fixture
def trl(monkeypatch):
    pytest.importorskip("accelerate")
    pytest.importorskip("torch")

    class VLLMGeneration:
        def sync_weights(self):
            pass

    class VLLMClient:
        def init_communicator(self, device=0):
            pass

        def get_server_info(self):
            pass

        def get_world_size(self):
            pass

    module(monkeypatch, "trl.generation.vllm_generation", VLLMGeneration=VLLMGeneration)
    module(monkeypatch, "trl.generation.vllm_client", VLLMClient=VLLMClient)
    found = adapter(monkeypatch, "trl")
    vars(found)["refusals_of_trl"] = found.refusals
    monkeypatch.setattr(found, "refusals", lambda generation: [])
    barrier, told, local = threading.Barrier(2), [None, None], threading.local()

    def gather_object(said):
        told[local.rank] = said
        barrier.wait(20)
        both = [one for said in told for one in said]
        barrier.wait(20)
        return both

    monkeypatch.setattr(found, "gather_object", gather_object)

    generations = {}

    def on_both(updates, model=None):
        """What an update of each training process raises, of two."""
        def update(rank):
            local.rank = rank
            key = id(updates[rank]), id(model)
            if key not in generations:  # a trainer of its own
                generations[key] = updates[rank], types.SimpleNamespace(
                    model=model, vllm_client=types.SimpleNamespace(base_url="http://server"),
                    accelerator=types.SimpleNamespace(process_index=rank, num_processes=2, device="cpu"))
            updates[rank].send(generations[key][1])

        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            return [part.exception() for part in [threads.submit(update, rank) for rank in range(2)]]

    monkeypatch.setattr(refit.trainers, "live_shards_of", lambda owner, model: types.SimpleNamespace(take=lambda: {}))
    return found, on_both


def test_trl_passes_on_versions_and_has_each_kth_update_checked(trl, plan_path, monkeypatch):
    trl, on_both = trl
    told = []
    monkeypatch.setattr(trl.Updates, "_tell", lambda self, url, meeting, check, version: told.append((version, check)))
    updates = [trl.Updates(plan_path, check_every=2, version=lambda: f"step {len(told)}") for _ in range(2)]
    for one in updates:
        one._sender = Sent()
    trainer = types.SimpleNamespace(_metrics={"train": collections.defaultdict(list)})
    updates[0]._sender.metrics = {"refit/seconds": 0.5, "refit/updates_total": 7.0}  # TRL would average the count
    updates[0].log_with(trainer)
    for _ in range(3):
        assert on_both(updates) == [None, None]
    assert told == updates[0]._sender.asked == updates[1]._sender.asked == [("step 0", True), ("step 1", False), ("step 2", True)]
    assert trainer._metrics["train"] == {"refit/seconds": [0.5] * 3}
    assert updates[0].metrics == {"refit/seconds": 0.5, "refit/updates_total": 7.0}
    with pytest.raises(refit.InvalidArgument, match="wanted one of TRL that keeps metrics"):
        updates[0].log_with(object())


MODEL = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "vocab_size": 64, "tie_word_embeddings": False,
         "torch_dtype": "bfloat16"}


class Module:
    """A trained module of one parameter, with a config."""

    config = types.SimpleNamespace(to_dict=lambda: dict(MODEL))

    def named_parameters(self):
        return {"norm.weight": types.SimpleNamespace(dtype=np.dtype("float32"))}.items()


@pytest.fixture
def two_trainers(monkeypatch):
    """torch as the trainers and the rollout of two processes each have it."""
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(
        distributed=types.SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 2)))
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.32.0"))


WANTED = {"source": {"layout": "fsdp", "data_parallel": 1, "dtype": "fp32", "replicas": 2},
          "destination": {"layout": "vllm", "version": "0.32", "dtype": "bf16", "replicas": 2}}


def test_verl_makes_its_plan_of_what_both_sides_say(verl, two_trainers, monkeypatch, tmp_path):
    master = verl.RefitCheckpointEngine(1 << 20, plan="auto", is_master=True, device="cpu", save_to=tmp_path / "auto")
    others = [verl.RefitCheckpointEngine(1 << 20, plan="auto", device="cpu", save_to=tmp_path / "other") for _ in range(3)]
    assert (master.metrics, master.stats, master.delta_report) == ({}, None, None)
    master.close()
    Base = type("Base", (), {"initialize": lambda self: setattr(self, "module", Module())})
    actor = type("Engine", (verl.LiveShards, Base), {})()
    actor.engine_config = types.SimpleNamespace(forward_only=True)
    actor.initialize()
    assert verl._actor is None  # a reference model
    actor.engine_config.forward_only = False
    actor.initialize()
    monkeypatch.setattr(verl, "ray_unique_id", lambda: b"id")
    metadata = [master.prepare(), others[0].prepare()]
    config = types.SimpleNamespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, data_parallel_size=1, expert_parallel_size=1,
                                   dtype="bfloat16", quantization=None)
    type("Server", (verl.ServerAdapterMixin, type("Theirs", (), {"__init__": lambda self, config: setattr(self, "config", config)})), {})(config)
    metadata += [other.prepare() for other in others[1:]]
    trainers, rollout = master.build_topology(2, 2, metadata)
    for engine, side, i in ((master, trainers, 0), (others[0], trainers, 1), (others[1], rollout, 0), (others[2], rollout, 1)):
        engine.init_process_group(**{name: values[i] for name, values in side.items()})
    plan = refit.Plan.load(tmp_path / "auto" / "plan.refit")
    assert [engine._plan for engine in (master, *others)] == [plan] * 4 and not (tmp_path / "other").exists()
    job = json.loads((tmp_path / "auto" / "job.json").read_text())
    assert {side: job[side] for side in WANTED} == WANTED

    async def told():
        return [item async for item in others[1].receive_weights()]

    assert refit.auto.load(dict(asyncio.run(told()))["init"]["plan"]) == plan
    # From then on nobody says it again.
    assert [engine.prepare()["side"] for engine in (master, *others)] == [None] * 4
    with pytest.raises(refit.InvalidArgument, match='plan="auto": no rank knows the model and the source: write a job'):
        master.build_topology(2, 2, [{**said, "side": {"destination": WANTED["destination"]}} for said in metadata])
    with pytest.raises(refit.InvalidArgument, match="engines of 4 workers each have 2 workers together"):
        config.tensor_model_parallel_size = 4
        refit.trainers.job_of([{"side": {"destination": verl.destination_of(config), "model": MODEL, "source": WANTED["source"]}}], 2)


def test_a_job_that_verl_is_given_wins(verl, two_trainers, tiny_job, monkeypatch):
    monkeypatch.setattr(verl, "ray_unique_id", lambda: b"id")
    monkeypatch.setattr(verl, "_actor", types.SimpleNamespace(module=[Module()]))  # Megatron's chunks, of which nobody makes a job
    engines = [verl.RefitCheckpointEngine(1 << 20, plan=tiny_job, is_master=rank == 0, device="cpu") for rank in range(4)]
    trainers, rollout = engines[0].build_topology(2, 2, [engine.prepare() for engine in engines])
    for engine, side, i in zip(engines, (trainers, trainers, rollout, rollout), (0, 1, 0, 1)):
        engine.init_process_group(**{name: values[i] for name, values in side.items()})
    assert [engine._plan for engine in engines] == [refit.compile(tiny_job)] * 4
    monkeypatch.setattr(verl, "_actor", None)


def test_nemo_rl_makes_its_plan_of_what_both_sides_say(two_trainers, monkeypatch, tmp_path):
    module(monkeypatch, "nemo_rl.utils.checkpoint_engines.base", CheckpointEngine=object)
    nemo_rl = adapter(monkeypatch, "nemo_rl")
    monkeypatch.setattr(nemo_rl, "ray_unique_id", lambda: b"id")
    policy, rollout = [nemo_rl.CheckpointEngine(1 << 20, "auto", device="cpu", save_to=tmp_path / name) for name in ("auto", "other")]

    async def theirs(self, method, more=None):
        return method

    worker = type("Worker", (nemo_rl.LiveShards, type("Theirs", (), {"checkpoint_engine_rpc": theirs})), {})()
    worker.cfg, worker.model = {}, Module()
    asyncio.run(worker.checkpoint_engine_rpc("init_checkpoint_engine"))
    metadata = [policy.prepare(), {"plan": None, "side": {}, "meeting": None, "updates": 0}]
    parallel = types.SimpleNamespace(world_size=1, data_parallel_size=1, data_parallel_index=0)
    monkeypatch.setattr(nemo_rl, "_vllm_worker", types.SimpleNamespace(
        rank=0, vllm_config=types.SimpleNamespace(parallel_config=parallel), refit_facts=lambda: {
            "vllm": "0.32.0", "dtype": "bfloat16", "quantization": None, "tensor_parallel": 1, "pipeline_parallel": 1, "data_parallel": 1,
            "expert_parallel": False, "expert_placements": [], "moe_backends": []}))
    metadata += [rollout.prepare()] * 2
    policy.init_policy_process_group(worker_rank=0, train_world_size=2, rollout_world_size=2, metadata=metadata)
    rollout.init_rollout_process_group(rollout_rank=1, train_world_size=2, rollout_world_size=2, metadata=metadata)
    assert policy._plan == rollout._plan == refit.Plan.load(tmp_path / "auto" / "plan.refit") and rollout._engine == 1
    assert {side: json.loads((tmp_path / "auto" / "job.json").read_text())[side] for side in WANTED} == WANTED


@pytest.fixture
def trained(trl, monkeypatch, tmp_path):
    """A TRL whose trainers' module has a config, whose server is a vLLM of one worker; and what its own methods and Refit's are told."""
    found, on_both = trl
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(4, 4)
    model.config = types.SimpleNamespace(to_dict=MODEL.copy)
    told = []
    monkeypatch.setattr(found.Updates, "_tell", lambda self, url, meeting, check, version: told.append("refit"))
    monkeypatch.setattr(found.HTTPClient, "destination", lambda self: {"layout": "vllm", "version": "0.32", "dtype": "bf16"})
    monkeypatch.setattr(refit.trainers, "Sender", lambda plan, **_: vars(sent := Sent()).update(plan=plan) or sent)
    monkeypatch.setattr(found, "PartialState", lambda: types.SimpleNamespace(num_processes=2))
    monkeypatch.setitem(found.ORIGINALS, "sync_weights", lambda generation: told.append(generation.accelerator.process_index))

    def answer(info):
        if isinstance(info, Exception):
            raise info
        return info

    def update(info, model=model, **options):
        told.clear()
        updates = [found.Updates("auto", save_to=tmp_path / "auto", **options) for _ in range(2)]
        updates[0].check_server(types.SimpleNamespace(base_url="http://server", get_server_info=lambda: answer(info)),
                                lambda: told.append("communicator"))
        return updates, [on_both(updates, model) for _ in range(2)]

    return update, told, tmp_path / "auto"


REFITS, NCCL = {"weight_transfer_config": {"backend": "refit"}}, {"weight_transfer_config": {"backend": "nccl"}}


def test_trl_compiles_the_job_of_what_runs(trained, caplog):
    caplog.set_level("INFO", "refit")
    update, told, folder = trained
    updates, errors = update(REFITS)
    assert errors == [[None, None]] * 2 and told == ["refit"] * 2
    job = json.loads((folder / "job.json").read_text())
    assert job == {"model": "config.json", "source": {"layout": "fsdp", "data_parallel": 1, "dtype": "fp32", "replicas": 2},
                   "destination": {"layout": "vllm", "version": "0.32", "dtype": "bf16"}}
    plan = refit.Plan.load(folder / "plan.refit")
    assert updates[0]._plan == updates[1]._plan == plan == refit.compile(folder / "job.json")
    assert sum("the job, also in" in record.getMessage() for record in caplog.records) == 1
    # A job that is given wins.
    updates[0]._given = {**job, "model": str(folder / "config.json")}
    assert updates[0]._made(types.SimpleNamespace(model=None, vllm_client=types.SimpleNamespace(base_url=""))) == plan


def test_trl_moves_the_weights_where_refit_is_refused(trained, caplog):
    update, told, _ = trained
    _, errors = update(NCCL, on_refusal="framework")
    assert errors == [[None, None]] * 2
    assert told[0] == "communicator" and sorted(told[1:]) == [0, 0, 1, 1]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("Refit does not move these weights, and TRL does, so that no update is checked and none has a version: "
                              "FailedPrecondition: the weight transfer of the vLLM server")
    # Of a server with both ways Refit takes the worker extension; a job that does not compile is the framework's.
    both = {**NCCL, "parallel_config": {"worker_extension_cls": "refit.vllm.WorkerExtension"}}
    updates, errors = update(both, on_refusal="framework")
    assert errors == [[None, None]] * 2 and told == ["refit"] * 2
    assert updates[0]._client.__name__ == "ExtensionHTTPClient"
    _, errors = update(both, object(), on_refusal="framework")
    assert errors == [[None, None]] * 2 and told[0] == "communicator"
    # Without being asked, nobody falls back.
    _, errors = update(NCCL)
    assert all("the weight transfer of the vLLM server" in str(error) for pair in errors for error in pair) and told == []
    with pytest.raises(refit.InvalidArgument, match='on_refusal is "?.nccl.*; wanted "raise" or "framework"'):
        update(NCCL, on_refusal="nccl")


def test_what_is_no_refusal_is_no_reason_to_fall_back(trained, monkeypatch):
    update, told, _ = trained

    def destination(self):
        raise refit.workers.WorkerError("http://server/server_info: connection refused")

    both = {**NCCL, "parallel_config": {"worker_extension_cls": "refit.vllm.WorkerExtension"}}
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["refit.vllm_client"].HTTPClient, "destination", destination)
        updates, errors = update(both, on_refusal="framework")
    assert all("connection refused" in str(error) for pair in errors for error in pair) and told == []
    assert [one._by_framework for one in updates] == [None, None]
    _, errors = update(OSError("no route to host"), on_refusal="framework")
    assert all("no route to host" in str(error) for pair in errors for error in pair) and told == []


def test_each_trainer_of_trl_is_settled_by_itself(trained, trl):
    import torch

    update, told, _ = trained
    updates, errors = update(NCCL, on_refusal="framework")
    assert errors == [[None, None]] * 2 and sorted(told[1:]) == [0, 0, 1, 1]
    told.clear()
    # A second trainer, whose server has Refit.
    second = torch.nn.Linear(4, 4)
    second.config = types.SimpleNamespace(to_dict=MODEL.copy)
    server = types.SimpleNamespace(base_url="http://server", get_server_info=lambda: REFITS)
    updates[0].check_server(server, lambda: told.append("communicator"))
    assert trl[1](updates, second) == [None, None] and told == ["refit"]
    assert [one._by_framework for one in updates] == [False, False]


def test_every_reason_against_a_trainer_of_trl_is_told(trl):
    import torch

    found, _ = trl
    state = types.SimpleNamespace(fsdp_plugin=types.SimpleNamespace(fsdp_version=1), deepspeed_plugin=types.SimpleNamespace(zero_stage=3))
    generation = types.SimpleNamespace(mode="colocate", model=torch.nn.Linear(1, 1), accelerator=types.SimpleNamespace(state=state))
    reasons = found.refusals_of_trl(generation)
    assert len(reasons) == 3 and all(word in text for word, text in zip(("vllm_mode", "FSDP 1", "ZeRO 3"), reasons)), reasons
    found.refusals = found.refusals_of_trl
    with pytest.raises(refit.FailedPrecondition, match="vllm_mode.*\n.*FSDP 1.*\n.*ZeRO 3"):
        found._refuse_unfit(generation)


def test_what_one_process_of_trl_fails_at_ends_on_both(trl, plan_path, monkeypatch):
    trl, on_both = trl
    monkeypatch.setattr(trl.Updates, "_tell", lambda *_: None)
    updates = [trl.Updates(plan_path) for _ in range(2)]
    for one in updates:
        one._sender = Sent()

    def fails(*_, **__):
        raise KeyError("only here")

    for rank, owner, name in ((0, trl, "unique_id"), (1, updates[1], "_prepared"), (0, updates[0], "_tell"), (1, updates[1]._sender, "send")):
        for one in updates:
            one._sender.joined, one._sender.closed = False, 0
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails)
            errors = on_both(updates)
        assert isinstance(errors[rank], KeyError), errors
        assert f"trainer {rank} failed: KeyError: 'only here'" in str(errors[1 - rank]), errors
        assert all(one._sender.closed for one in updates)  # both meet anew
        assert on_both(updates) == [None, None]


def test_a_server_that_trl_is_refused_by_is_told_to_all_processes(trl, plan_path, monkeypatch):
    trl, on_both = trl
    updates = [trl.Updates(plan_path) for _ in range(2)]
    client = types.SimpleNamespace(base_url="http://server", get_server_info=lambda: {})
    monkeypatch.setattr(trl, "PartialState", lambda: types.SimpleNamespace(num_processes=1))
    with pytest.raises(refit.FailedPrecondition, match="the weight transfer of the vLLM server"):
        updates[0].check_server(client)
    monkeypatch.setattr(trl, "PartialState", lambda: types.SimpleNamespace(num_processes=2))
    updates[0].check_server(client)  # others would wait in their next collective
    errors = on_both(updates)
    assert all("the weight transfer of the vLLM server" in str(error) for error in errors), errors

