"""What refit.sglang does by itself. tests/engines/sglang.sh tests it inside a real SGLang."""
import asyncio
import concurrent.futures
import http.server
import itertools
import json
import multiprocessing
import socket
import sys
import threading
import types

import numpy as np
import pytest

import refit
import refit.contract
import refit.sglang
from refit.sglang import Place

CONFIG = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
          "head_dim": 16, "intermediate_size": 64, "vocab_size": 64, "tie_word_embeddings": False, "torch_dtype": "float32"}


def test_every_scheduler_of_every_engine_has_a_rank_of_its_own():
    plan = refit.compile({"model": CONFIG, "source": {"layout": "fsdp"},
                          "destination": {"layout": "sglang", "tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2,
                                          "replicas": 2}})
    ranks = [refit.sglang.rank_in_plan(plan, Place(tensor, 2, stage, 2, data, 2), engine)
             for engine, data, stage, tensor in itertools.product(range(2), repeat=4)]
    assert ranks == list(range(plan.source_ranks, plan.source_ranks + 16))


def test_a_rank_of_the_plan_holds_the_layers_of_its_stage():
    plan = refit.compile({"model": CONFIG, "source": {"layout": "fsdp"},
                          "destination": {"layout": "sglang", "tensor_parallel": 2, "pipeline_parallel": 2}})
    for stage, tensor in itertools.product(range(2), repeat=2):
        names = plan.tensors(refit.sglang.rank_in_plan(plan, Place(tensor, 2, stage, 2)))
        assert ("model.embed_tokens.weight" in names, "model.norm.weight" in names) == (stage == 0, stage == 1)


def test_a_mesh_that_the_plan_does_not_have_is_refused(tiny_job):
    plan = refit.compile(tiny_job)
    with pytest.raises(refit.InvalidArgument, match="the plan has 2 destination ranks; engine 1 of tensor_parallel 2, "
                                                    "pipeline_parallel 1, data_parallel 1 is its ranks 2 to 3"):
        refit.sglang.rank_in_plan(plan, Place(0, 2), engine=1)
    with pytest.raises(refit.InvalidArgument, match="engine 0 of tensor_parallel 1, pipeline_parallel 4"):
        refit.sglang.rank_in_plan(plan, Place(pipeline_parallel=4))


FACTS = {"sglang": "0.5.23", "tensor_parallel": 2, "pipeline_parallel": 1, "data_parallel": 1, "dp_attention": 2,
         "expert_parallel": 2, "dp_lm_head": True, "dtype": "bfloat16", "quantization": None, "moe_backends": ["triton"], "holds_experts": True,
         "swiglu_interleaved": False, "mm_encoder_tp_mode": "weights", "expert_location": "trivial", "expert_rebalancing": False}


@pytest.mark.parametrize("facts, requirements, refusal", [
    ({}, {}, ""),
    ({"moe_backends": ["deep_gemm"]}, {"moe_backend": "triton"}, ""),
    ({"moe_backends": ["flashinfer_trtllm"]}, {}, "reorders w13_weight and w2_weight after loading as no plan does: start SGLang "
                                                  "with --moe-runner-backend triton"),
    ({"moe_backends": ["triton_kernel"]}, {"moe_backend": "triton"}, 'put "moe_backend": "triton_kernel" into the job'),
    ({"moe_backends": []}, {"moe_backend": "triton"}, "no layer of this engine tells the backend of its experts"),
    ({"moe_backends": [], "holds_experts": False}, {"moe_backend": "triton"}, ""),
    ({"swiglu_interleaved": True}, {}, "start SGLang with SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED=0"),
    ({"expert_rebalancing": True}, {"expert_placement": "linear"}, "start SGLang without --enable-eplb"),
    ({"expert_rebalancing": True}, {}, ""),
    ({"expert_location": "map.json"}, {"expert_placement": "linear"}, "--init-expert-location map.json"),
    ({"expert_location": "map.json"}, {"expert_placement": "table"}, ""),
    ({}, {"expert_placement": "table"}, "start SGLang with --init-expert-location and that map"),
    ({}, {"expert_placement": "round_robin"}, 'the plan places experts "round_robin", as SGLang never does'),
    ({}, {"expert_rotation": "left"}, 'the plan requires expert_rotation "left"'),
])
def test_what_shapes_do_not_show_is_refused_with_a_way_out(facts, requirements, refusal):
    found = refit.sglang.refusal_of({**FACTS, **facts}, requirements)
    assert refusal in found and bool(found) == bool(refusal), found


def test_a_table_of_experts_is_compared_with_the_engines_map():
    config = {**CONFIG, "model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
              "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    table = [[0, 1, 2, 3, 0, 1], [3, 1, 0, 2, 0, 3]]
    plan = refit.compile({"model": config, "source": {"layout": "fsdp"},
                          "destination": {"layout": "sglang", "tensor_parallel": 2, "expert_parallel": 2,
                                          "experts": {"physical_to_logical": table}}})
    planned = [refit.contract.experts_of(plan, rank) for rank in (1, 2)]
    assert planned == [{0: [0, 1, 2], 1: [3, 1, 0]}, {0: [3, 0, 1], 1: [2, 0, 3]}]
    location = types.SimpleNamespace(physical_to_logical_map_cpu=np.array(table), ep_size=2)
    for rank in range(2):
        assert refit.sglang.refusal_of_table(planned[rank], refit.sglang.experts_of(location, rank)) == ""
        assert "in layer 0 this rank of the engine holds experts [" in refit.sglang.refusal_of_table(
            planned[rank], refit.sglang.experts_of(location, 1 - rank))
    assert "this SGLang does not tell its map" in refit.sglang.refusal_of_table(planned[0], None)


def test_where_experts_stand_is_compared_also_if_their_backend_is_not():
    facts = {**FACTS, "moe_backends": ["flashinfer_trtllm"], "expert_rebalancing": True}
    assert refit.sglang.refusal_of(facts, {"moe_backend": "triton"}, check_backends=False) == ""
    assert "--enable-eplb" in refit.sglang.refusal_of(facts, {"expert_placement": "linear"}, check_backends=False)


def test_an_engine_with_lora_is_refused_by_that_name(tiny_job, tmp_path, monkeypatch):
    plan = refit.compile({"model": CONFIG, "source": {"layout": "fsdp"}, "destination": {"layout": "sglang"}})
    plan.save(tmp_path / "plan.refit")
    engine = Engine(plan, 1, 1, monkeypatch)
    engine.tensors[0]["model.layers.0.self_attn.qkv_proj.base_layer.weight"] = \
        engine.tensors[0].pop("model.layers.0.self_attn.qkv_proj.weight")
    (reply,) = engine.ask(op="init", plan=str(tmp_path / "plan.refit"), meeting=refit.rendezvous.unique_id().hex(), timeout=20)
    assert reply["error"].startswith('FailedPrecondition: this engine has LoRA switched on: "model.layers.0.self_attn.qkv_proj.base_layer')
    assert reply["error"].endswith("start SGLang without --enable-lora and --lora-paths")


def test_a_worker_names_the_destination_of_its_job():
    assert refit.sglang.job_side(FACTS) == (
        'this worker is "destination": {"layout": "sglang", "version": "0.5.23", "tensor_parallel": 2, "dp_attention": 2, '
        '"expert_parallel": 2, "dp_lm_head": true}, dtype bfloat16')
    other = {**FACTS, "dp_lm_head": False, "tensor_parallel": 1, "moe_backends": ["triton_kernel"], "quantization": "fp8"}
    assert refit.sglang.job_side(other) == (
        'this worker is "destination": {"layout": "sglang", "version": "0.5.23", "dp_attention": 2, "expert_parallel": 2, '
        '"moe_backend": "triton_kernel"}, dtype bfloat16, quantization fp8')


@pytest.mark.parametrize("mode, wanted", [("weights", '"vision": true}'), ("data", '"vision": true, "mm_encoder_tp_mode": "data"}')])
def test_the_jobs_side_says_how_the_engine_holds_its_tower(tower_job, tmp_path, monkeypatch, mode, wanted):
    plan = refit.compile({**tower_job, "destination": {"layout": "sglang"}})
    plan.save(tmp_path / "plan.refit")
    engine = Engine(plan, 1, 1, monkeypatch, mode)
    weights = {name: np.zeros(info.shape, np.float32) for name, info in plan.tensors(0).items()}

    def refused():
        trainer = refit.Executor(plan, 0, fabric=engine.renewed_fabric())
        with concurrent.futures.ThreadPoolExecutor(1) as trainers:
            bound = trainers.submit(trainer.bind, weights, timeout=20)
            (reply,) = engine.ask(op="init", plan=str(tmp_path / "plan.refit"), meeting="00", timeout=20)
            assert isinstance(bound.exception(), refit.Error)
        return reply["error"]

    engine.tensors[0]["visual.extra.weight"] = np.zeros(4, np.float32)
    error = refused()
    assert 'unexpected: "visual.extra.weight"' in error and wanted in error
    for name in [name for name in engine.tensors[0] if name.startswith("visual.")]:
        del engine.tensors[0][name]  # --language-model-only
    error = refused()
    assert 'missing: "visual.' in error and "vision" not in error.partition("this worker is")[2]


def test_hooks_that_this_sglang_does_not_have_say_so():
    model = types.SimpleNamespace(named_modules=lambda: [("gate", types.SimpleNamespace())])
    hooks = refit.sglang.hooks_of(model)
    with pytest.raises(LookupError, match='put the "version" of this SGLang into the job'):
        hooks["drop-router-copy"]("gate.weight", None)


def test_latent_projections_beside_a_vision_tower_are_derived_by_the_language_model():
    pytest.importorskip("torch")
    asked = []
    decoder = types.SimpleNamespace(post_load_weights=lambda weight_names: asked.append(weight_names))
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    whole = types.SimpleNamespace(named_modules=list, language_model=decoder, post_load_weights=lambda: asked.append("all"))
    refit.sglang.hooks_of(whole)["derive-latent-projections"](f"language_model.{name}", None)
    decoder.named_modules = list
    refit.sglang.hooks_of(decoder)["derive-latent-projections"](name, None)
    assert asked == [[name], [name]]


def test_the_routers_copy_is_written_where_captured_graphs_read_it():
    torch = pytest.importorskip("torch")
    gate = types.SimpleNamespace(_weight_fp32=None)
    hook = refit.sglang.hooks_of(types.SimpleNamespace(named_modules=lambda: [("gate", gate)]))["drop-router-copy"]
    hook("gate.weight", torch.ones(2, dtype=torch.bfloat16))
    assert gate._weight_fp32 is None  # the first forward pass makes it
    copy = gate._weight_fp32 = torch.zeros(2)
    hook("gate.weight", torch.ones(2, dtype=torch.bfloat16))
    assert gate._weight_fp32 is copy and copy.tolist() == [1.0, 1.0]


# An engine without SGLang: its schedulers are Workers, one after the other as SGLang's pipeline stages are.


class Engine:
    """Every rank's Worker; requests reach stage after stage, and what a stage answers first is the reply."""

    def __init__(self, plan, stages, tensor_parallel, monkeypatch, mm_encoder_tp_mode="weights"):
        monkeypatch.setitem(sys.modules, "sglang", types.SimpleNamespace(__version__="0.5.23"))
        self.plan = plan
        self.renewed_fabric()
        monkeypatch.setattr(refit.sglang, "meet", lambda plan, rank, meeting, **_: refit.Executor(plan, rank, fabric=self.fabric))
        self.tensors = []
        self.workers = []
        ranks = stages * tensor_parallel
        gathered, barrier = [None] * ranks, threading.Barrier(ranks)
        for place in range(ranks):
            stage, tensor = divmod(place, tensor_parallel)
            arrays = {name: np.zeros(info.shape, info.dtype.replace("fp", "float"))
                      for name, info in plan.tensors(plan.source_ranks + place).items()}
            self.tensors.append(arrays)
            parallel = types.SimpleNamespace(tp_rank=tensor, tp_size=tensor_parallel, pp_rank=stage, pp_size=stages,
                                             dp_rank=None, dp_size=1, attn_dp_size=1, moe_ep_size=1, enable_dp_lm_head=False)
            model = types.SimpleNamespace(named_parameters=arrays.items, named_buffers=dict().items, named_modules=lambda: [],
                                          state_dict=dict)
            runner = types.SimpleNamespace(model=model, device="cpu", gpu_id=0,
                                           load_config=types.SimpleNamespace(load_format="auto"),
                                           model_config=types.SimpleNamespace(dtype="torch.float32", quantization=None))

            def gather(reply, timeout, place=place):
                gathered[place] = reply
                barrier.wait(timeout)
                replies = list(gathered)
                barrier.wait(timeout)
                return replies

            chosen = {"mm_encoder_tp_mode": mm_encoder_tp_mode, "expert_location": "trivial", "expert_rebalancing": False}
            self.workers.append(refit.sglang.Worker(runner, parallel, gather, lambda: chosen))
        self.stages = [self.workers[i * tensor_parallel:(i + 1) * tensor_parallel] for i in range(stages)]
        self.pool = concurrent.futures.ThreadPoolExecutor(ranks)

    def renewed_fabric(self):
        """Where ranks meet anew."""
        self.fabric = refit.LocalFabric(self.plan.world_size)
        return self.fabric

    def request(self, **fields):
        """Each stage gets it when the one before is done with it, as in SGLang's event_loop_pp."""
        first = None
        for stage in self.stages:
            replies = list(self.pool.map(lambda worker: worker.handle(fields), stage))
            first = replies[0] if first is None else first
        return first

    def ask(self, **fields):
        replies = self.request(**fields)
        return self.request(op="wait") if replies is None else replies


@pytest.fixture
def plan_file(tmp_path):
    def make(options=None, **side):
        refit.compile({"model": CONFIG, "source": {"layout": "fsdp"}, "destination": {"layout": "sglang", **side},
                       "options": options or {}}).save(tmp_path / "plan.refit")
        return tmp_path / "plan.refit"
    return make


@pytest.mark.parametrize("stages, tensor_parallel", [(1, 2), (2, 1), (2, 2)])
def test_stages_that_are_asked_one_after_the_other_refit_together(plan_file, monkeypatch, stages, tensor_parallel):
    path = plan_file(pipeline_parallel=stages, tensor_parallel=tensor_parallel)
    plan = refit.Plan.load(path)
    engine = Engine(plan, stages, tensor_parallel, monkeypatch)
    random = np.random.default_rng(1)
    weights = {name: random.standard_normal(info.shape, np.float32) for name, info in plan.tensors(0).items()}
    trainer = refit.Executor(plan, 0, fabric=engine.fabric)
    with concurrent.futures.ThreadPoolExecutor(1) as trainers:
        bound = trainers.submit(trainer.bind, weights, timeout=20)
        replies = engine.ask(op="init", plan=str(path), meeting="00", timeout=20)
        bound.result()
        assert [(reply["rank"], reply["state"], reply["error"]) for reply in replies] == [
            (1 + place, "bound", "") for place in range(stages * tensor_parallel)]
        checks = []
        run = refit.Executor.run
        monkeypatch.setattr(refit.Executor, "run", lambda self, **options: checks.append(options["check"]) or run(self, **options))
        ran = trainers.submit(trainer.run, check=True, timeout=20)
        replies = engine.ask(op="update", version="7", check=True, timeout=20)
        ran.result()
    assert checks == [True] * plan.world_size
    assert [(reply["refits"], reply["version"], reply["error"]) for reply in replies] == [
        (1, "7", "")] * stages * tensor_parallel
    for tensors in engine.tensors:
        assert all(np.any(tensor) for tensor in tensors.values())
    np.testing.assert_array_equal(
        np.concatenate([tensors["model.embed_tokens.weight"] for tensors in engine.tensors[:tensor_parallel]]),
        weights["model.embed_tokens.weight"])
    facts = engine.ask(op="facts")[0]["facts"]
    assert (facts["tensor_parallel"], facts["pipeline_parallel"]) == (tensor_parallel, stages)
    assert {reply["state"] for reply in engine.ask(op="close")} == {"closed"}


def test_a_rank_asks_for_a_dense_refit_and_tells_how_it_went(plan_file, monkeypatch):
    path = plan_file(pipeline_parallel=2, options={"delta": True, "peer": "staged"})
    plan = refit.Plan.load(path)
    engine = Engine(plan, 2, 1, monkeypatch)
    weights = {name: np.ones(info.shape, np.float32) for name, info in plan.tensors(0).items()}
    trainer = refit.Executor(plan, 0, fabric=engine.fabric)
    with concurrent.futures.ThreadPoolExecutor(1) as trainers:
        bound = trainers.submit(trainer.bind, weights, timeout=20)
        engine.ask(op="init", plan=str(path), meeting="00", timeout=20)
        bound.result()
        told = []
        for options in ({}, {}, {"dense": True}):
            ran = trainers.submit(trainer.run, timeout=20)
            told.append([json.loads(json.dumps(reply["delta"])) for reply in engine.ask(op="update", timeout=20, **options)])
            ran.result()
    assert [[delta["why_dense"] for delta in deltas] for deltas in told] == [
        ["rank 0 bound since its last refit"] * 2, [""] * 2, ["rank 1 asked for it"] * 2]
    assert [delta["is_delta"] for delta in told[1]] == [True] * 2


@pytest.mark.parametrize("tags, releases", [(None, True), ([], True), (["kv_cache", "weights"], True), (["kv_cache"], False)])
def test_an_update_after_weights_were_released_needs_a_bind(plan_file, monkeypatch, tags, releases):
    path = plan_file(options={"delta": True, "peer": "staged"})
    plan = refit.Plan.load(path)
    engine = Engine(plan, 1, 1, monkeypatch)
    weights = {name: np.ones(info.shape, np.float32) for name, info in plan.tensors(0).items()}
    trainer = refit.Executor(plan, 0, fabric=engine.fabric)
    manager = types.SimpleNamespace(tp_worker=types.SimpleNamespace(model_runner=engine.workers[0]._runner))
    with concurrent.futures.ThreadPoolExecutor(1) as trainers:
        def together(theirs, **ours):
            ran = trainers.submit(theirs, timeout=20)
            replies = engine.ask(timeout=20, **ours)
            ran.result()
            return replies[0]["error"]

        assert together(lambda timeout: trainer.bind(weights, timeout=timeout), op="init", plan=str(path), meeting="00") == ""
        assert together(trainer.run, op="update") == ""
        request = types.SimpleNamespace(tags=tags)
        assert refit.sglang._release_memory_occupation(lambda *given: given, manager, request) == (manager, request)
        error = together(trainer.run, op="update")
        assert ("refit.sglang.bind and executor.bind" in error) == releases, error
        assert together(lambda timeout: trainer.bind(weights, timeout=timeout), op="bind") == ""
        assert together(trainer.run, op="update") == ""


def test_a_worker_that_is_refused_is_named_and_the_trainer_hears_of_it(plan_file, monkeypatch):
    path = plan_file(tensor_parallel=2)
    plan = refit.Plan.load(path)
    engine = Engine(plan, 1, 2, monkeypatch)
    del engine.tensors[1]["model.norm.weight"]
    trainer = refit.Executor(plan, 0, fabric=engine.fabric)
    weights = {name: np.zeros(info.shape, np.float32) for name, info in plan.tensors(0).items()}
    with concurrent.futures.ThreadPoolExecutor(1) as trainers:
        bound = trainers.submit(trainer.bind, weights, timeout=20)
        replies = engine.ask(op="init", plan=str(path), meeting="00", timeout=20)
        assert isinstance(bound.exception(), refit.Error)
    assert "model.norm.weight" in replies[1]["error"]
    assert 'this worker is "destination": {"layout": "sglang"' in replies[1]["error"]
    assert replies[0]["error"].startswith("Aborted")
    with pytest.raises(refit.sglang.WorkerError, match="2 of 2 workers failed"):
        refit.sglang.checked(replies)
    assert engine.ask(op="update", timeout=20)[0]["error"] == "FailedPrecondition: init was not called, or failed"
    assert "wanted init, bind, update, facts, close or wait" in engine.ask(op="upgrade")[0]["error"]


class Manager:
    """Of SGLang's SchedulerWeightUpdaterManager what an update's end needs."""

    def __init__(self):
        self.done = []

    def record_weight_version_after_update(self, weight_version):
        self.done.append(weight_version)

    def flush_cache_after_weight_update(self, recv_req, success, message):
        self.done.append("flushed")
        return success, message


@pytest.mark.parametrize("body", [[], [b"no JSON"], [b"[1]"], [b'{"operation": "init"}'], [b'{"op": 3}']])
def test_a_body_that_is_none_of_ours_is_refused(body):
    with pytest.raises(refit.InvalidArgument, match='wanted a JSON object with an "op"'):
        refit.sglang._fields_of(types.SimpleNamespace(serialized_named_tensors=body))


class ManagerOf0519(Manager):
    def flush_cache_after_weight_update(self, recv_req):
        assert not recv_req.flush_cache


class ManagerOf0518(Manager):
    record_weight_version_after_update = None


@pytest.mark.parametrize(["manager", "found"], [
    (ManagerOf0519, "another SchedulerWeightUpdaterManager.flush_cache_after_weight_update(recv_req); wanted (recv_req, success, message)"),
    (ManagerOf0518, "no SchedulerWeightUpdaterManager.record_weight_version_after_update; wanted (weight_version)")])
def test_a_release_whose_updates_end_otherwise_is_refused_before_ranks_meet(monkeypatch, manager, found):
    monkeypatch.setitem(sys.modules, "sglang", types.SimpleNamespace(__version__="0.5.19"))
    replies, error = refit.sglang._answer(None, manager(), types.SimpleNamespace(weight_version=None), {"op": "init"})
    assert (replies, error) == ([], f"SGLang 0.5.19 has {found}, as of SGLang 0.5.22")


@pytest.mark.parametrize("stages", [1, 2])
def test_a_version_is_recorded_when_all_stages_have_ended(plan_file, monkeypatch, stages):
    path = plan_file(pipeline_parallel=stages)
    plan = refit.Plan.load(path)
    engine = Engine(plan, stages, 1, monkeypatch)
    manager = Manager()

    def post(op, version=None, **fields):
        request = types.SimpleNamespace(weight_version=version)
        return [refit.sglang._answer(worker, manager, request, {"op": op, "timeout": 20, **fields}) for worker in engine.workers]

    trainer = refit.Executor(plan, 0, fabric=engine.fabric)
    weights = {name: np.ones(info.shape, np.float32) for name, info in plan.tensors(0).items()}
    with concurrent.futures.ThreadPoolExecutor(1) as trainers:
        bound = trainers.submit(trainer.bind, weights, timeout=20)
        post("init", plan=str(path), meeting="00")
        nothing = 'weight_version "not an update\'s" came, but no update is there to end'
        assert [error for _, error in post("wait", "not an update's")] == [nothing] * stages
        bound.result()
        assert manager.done == []
        for replies, error in post("update", "7"):  # SGLang's own manager would record it at once
            assert replies == [] and error == 'weight_version came with op "update"; wanted with {"op": "wait"}, which ends an update'
        ran = trainers.submit(trainer.run, timeout=20)
        post("update", version=None)
        assert manager.done == []
        assert [error for _, error in post("wait", "7")] == [""] * stages
        ran.result()
        assert manager.done == ["7", "flushed"] * stages
        assert [error for _, error in post("wait", "8")] == [nothing.replace("not an update's", "8")] * stages
        assert manager.done == ["7", "flushed"] * stages
        del manager.done[:]
        assert [error for _, error in post("wait", "7")] == [""] * stages  # one of many schedulers had not flushed
        assert manager.done == ["7", "flushed"] * stages
        post("update", version=None, timeout=0.2)  # without the trainer
        assert "DeadlineExceeded" in post("wait", "9")[0][0][0]["error"]
        assert manager.done == ["7", "flushed"] * stages


class Embeddings(dict):
    """SGLang's MultiModalStaticCache."""


@pytest.mark.parametrize("module", ["mm_schedule", "mm_utils"])  # the latter in releases before 0.5.23
@pytest.mark.parametrize("vision", [True, False])
def test_embeddings_of_images_go_with_the_tower_that_made_them(tower_job, tmp_path, monkeypatch, module, vision):
    side = {"vision": True} if vision else {}
    plan = refit.compile({**tower_job, "source": {"layout": "fsdp", "vision": vision}, "destination": {"layout": "sglang", **side}})
    plan.save(tmp_path / "plan.refit")
    engine = Engine(plan, 1, 1, monkeypatch)
    cache = Embeddings({7: "of the old weights"})
    monkeypatch.setitem(sys.modules, "sglang", types.ModuleType("sglang"))
    for name in ("sglang.srt", "sglang.srt.managers", "sglang.srt.managers.mm_schedule", "sglang.srt.managers.mm_utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["sglang"].__version__ = "0.5.23"
    sys.modules[f"sglang.srt.managers.{module}"].embedding_cache = cache
    manager, trainer = Manager(), refit.Executor(plan, 0, fabric=engine.fabric)
    weights = {name: np.zeros(info.shape, np.float32) for name, info in plan.tensors(0).items()}

    def ask(op, version=None, **fields):
        request = types.SimpleNamespace(weight_version=version)
        return refit.sglang._answer(engine.workers[0], manager, request, {"op": op, "timeout": 20, **fields})

    with concurrent.futures.ThreadPoolExecutor(1) as trainers:
        bound = trainers.submit(trainer.bind, weights, timeout=20)
        ask("init", plan=str(tmp_path / "plan.refit"), meeting="00")
        bound.result()
        ask("wait")
        ran = trainers.submit(trainer.run, timeout=20)
        ask("update")
        ran.result()
    assert cache  # until all ranks have the new weights
    assert ask("wait", "7")[1] == "" and manager.done == ["7", "flushed"]
    assert len(cache) == (0 if vision else 1)
    if vision:  # in a release that has it elsewhere
        del sys.modules[f"sglang.srt.managers.{module}"].embedding_cache
        assert "set SGLANG_VLM_CACHE_SIZE_MB=0" in ask("wait", "7")[1]
        monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", "0")
        assert ask("wait", "7")[1] == ""


def test_work_that_ends_without_a_reply_is_not_told_as_the_one_before(plan_file, monkeypatch):
    path = plan_file(pipeline_parallel=2)
    engine = Engine(refit.Plan.load(path), 2, 1, monkeypatch)
    assert engine.ask(op="close")[0]["error"] == ""

    def die(self):
        raise SystemExit

    monkeypatch.setattr(refit.sglang.Worker, "facts", die)
    assert engine.ask(op="facts")[0]["error"] == 'the request "facts" did not end'


def test_a_gpu_that_cannot_be_taken_is_told(plan_file, monkeypatch):
    engine = Engine(refit.Plan.load(plan_file(pipeline_parallel=2)), 2, 1, monkeypatch)

    def refuse(device):
        raise RuntimeError(f"no {device}")

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=types.SimpleNamespace(set_device=refuse)))
    for worker in engine.workers:
        worker._runner.device = "cuda"
    assert [reply["error"] for reply in engine.ask(op="close")] == ["RuntimeError: no cuda:0"] * 2


def test_an_error_is_told_also_where_the_others_replies_are_lost(plan_file, monkeypatch):
    engine = Engine(refit.Plan.load(plan_file()), 1, 1, monkeypatch)

    def lost(reply, timeout):
        raise OSError("gloo")

    engine.workers[0]._gather = lost
    (reply,) = engine.ask(op="update")
    assert reply["error"] == ("FailedPrecondition: init was not called, or failed; no replies of the engine's other ranks: "
                              "OSError: gloo")


# The driver's side.


class Client:
    """An engine's side of a request, without an engine."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.calls = []

    async def update_weights(self, payload, version, flush_cache, timeout):
        self.calls.append((json.loads(payload), version, flush_cache))
        return self.answers.pop(0)

    async def pause(self, mode, timeout):
        self.calls.append(mode)

    async def resume(self, timeout):
        self.calls.append("resume")


def answer(replies, error=""):
    return not error, json.dumps({"replies": replies, "error": error})


REPLY = {"rank": 1, "state": "bound", "refits": 1, "version": "7", "error": ""}


def update(client, monkeypatch, **options):
    monkeypatch.setattr(refit.sglang, "_client", lambda engine: client)
    return refit.sglang.update("http://nowhere", **options)


ENDED = {"op": "wait"}, "7", True


def test_an_update_pauses_passes_the_version_on_at_its_end_and_resumes(monkeypatch):
    client = Client(answer([REPLY]), (True, json.dumps({"replies": [REPLY], "error": ""}) + " | {} Weight version updated to 7."))
    assert update(client, monkeypatch, version="7", timeout=5) == [REPLY]
    asked = {"op": "update", "timeout": 5, "version": "7", "check": False, "dense": False}
    assert client.calls == ["retract", (asked, None, False), ENDED, "resume"]
    client = Client(answer([REPLY]), answer([REPLY]))
    update(client, monkeypatch, pause=None, flush_cache=False, check=True, dense=True)
    assert [call[2] for call in client.calls] == [False, False]
    assert (client.calls[0][0]["check"], client.calls[0][0]["dense"]) == (True, True)
    client = Client(answer([REPLY]), answer([REPLY]))
    update(client, monkeypatch, pause="abort", resume=False)
    assert [client.calls[0], len(client.calls)] == ["abort", 3]


def test_stages_are_waited_for_by_a_second_request(monkeypatch):
    client = Client(answer(None), answer([REPLY]))
    assert update(client, monkeypatch, version="7") == [REPLY]
    assert [(call[0]["op"], call[1]) for call in client.calls[1:3]] == [("update", None), ("wait", "7")]
    client = Client(answer(None), answer([REPLY]))
    monkeypatch.setattr(refit.sglang, "_client", lambda engine: client)
    assert refit.sglang.bind("http://nowhere") == [REPLY]
    assert [call[0]["op"] for call in client.calls] == ["bind", "wait"]


def test_requests_that_stay_keep_the_engine_from_flushing(monkeypatch):
    client = Client()
    with pytest.raises(refit.InvalidArgument, match='pause="in_place" keeps requests under way.*flush_cache=False'):
        update(client, monkeypatch, pause="in_place")
    with pytest.raises(refit.InvalidArgument, match="pause is 'keep'; wanted one of retract, abort, in_place, or None"):
        update(client, monkeypatch, pause="keep")
    assert client.calls == []
    client = Client(answer([REPLY]), answer([REPLY]))
    update(client, monkeypatch, pause="in_place", flush_cache=False)
    assert client.calls[0] == "in_place"


def test_every_driver_function_has_a_twin_for_a_running_event_loop(monkeypatch):
    client = Client(*[answer([REPLY])] * 7)
    monkeypatch.setattr(refit.sglang, "_client", lambda engine: client)

    async def drive():
        return [await refit.sglang.init_async("", "plan.refit", "00", 1), await refit.sglang.bind_async(""),
                await refit.sglang.facts_async(""), await refit.sglang.update_async("", pause=None),
                await refit.sglang.finish_async("", resume=False), await refit.sglang.close_async("")]

    assert asyncio.run(drive()) == [[REPLY]] * 6
    assert [call[0]["op"] for call in client.calls] == ["init", "bind", "facts", "update", "wait", "wait", "close"]
    assert client.calls[0][0]["engine"] == 1


def test_an_engine_tells_the_destination_of_a_job(monkeypatch):
    found = {**FACTS, "sglang": "0.5.19", "tensor_parallel": 2, "dp_attention": 1, "expert_parallel": 1, "dp_lm_head": False,
             "dtype": "bfloat16", "quantization": None, "moe_backends": [], "expert_location": "trivial"}
    monkeypatch.setattr(refit.sglang, "facts", lambda llm: [{**REPLY, "facts": found}])
    assert refit.sglang.destination("") == {"layout": "sglang", "version": "0.5.19", "tensor_parallel": 2, "dtype": "bf16"}
    for wrong, wanted in (({"quantization": "fp8"}, "the engine quantizes"), ({"expert_location": "a map"}, "places experts by a map")):
        monkeypatch.setattr(refit.sglang, "facts", lambda llm, wrong=wrong: [{**REPLY, "facts": {**found, **wrong}}])
        with pytest.raises(refit.InvalidArgument, match=f"{wanted}.*write a job"):
            refit.sglang.destination("")


def test_a_twin_for_no_event_loop_has_the_drivers_words():
    assert refit.sglang.update.__name__ == "update" and refit.sglang.update.__doc__ == refit.sglang.update_async.__doc__


def test_what_is_no_engine_is_refused():
    with pytest.raises(refit.InvalidArgument, match="llm is a int; wanted an sglang.Engine, a refit.sglang.Server or a"):
        refit.sglang.facts(7)


def test_an_engine_whose_refit_failed_stays_paused(monkeypatch):
    client = Client((False, json.dumps({"replies": [{**REPLY, "state": "torn", "error": "Aborted: rank 0 is gone"}], "error": ""})))
    with pytest.raises(refit.sglang.WorkerError, match=r"worker 0 \(torn\): Aborted: rank 0 is gone"):
        update(client, monkeypatch)
    assert client.calls[-1] != "resume"
    client = Client(answer([REPLY]), answer([REPLY], "the cache was not flushed"), answer([REPLY]))
    with pytest.raises(refit.sglang.WorkerError, match="the cache was not flushed"):
        update(client, monkeypatch, version="7")
    assert client.calls[-1] != "resume"
    assert refit.sglang.finish("http://nowhere", version="7") == [REPLY]
    assert client.calls[-2:] == [ENDED, "resume"]


def test_an_engine_that_does_not_know_the_request_says_what_is_missing(monkeypatch):
    client = Client((False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"))
    with pytest.raises(refit.sglang.WorkerError, match="refit has to be installed in SGLang's environment"):
        update(client, monkeypatch)


def test_a_server_is_asked_by_http():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.path, self.headers["Authorization"], json.loads(body)))
            status, text = {"/update_weights_from_tensor": (400, json.dumps(
                {"success": False, "message": json.dumps({"replies": [{**REPLY, "error": "BindError: no"}], "error": ""})})),
                "/pause_generation": (200, '{"status": "ok"}')}.get(self.path, (404, "not here"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    seen = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(refit.sglang.WorkerError, match="BindError: no"):
            refit.sglang.update(refit.sglang.Server(url + "/", "key"), version="7")
        with pytest.raises(refit.sglang.WorkerError, match="continue_generation: .*404.*not here"):
            asyncio.run(refit.sglang.Server(url).resume(5))
        server.shutdown()
    assert [path for path, _, _ in seen] == ["/pause_generation", "/update_weights_from_tensor", "/continue_generation"]
    assert [key for _, key, _ in seen] == ["Bearer key", "Bearer key", None]
    body = seen[1][2]
    assert (body["load_format"], body["flush_cache"], body["weight_version"]) == ("refit", False, None)


def test_a_server_that_does_not_answer_is_an_error(monkeypatch):
    monkeypatch.setattr(refit.workers, "GRACE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = "http://127.0.0.1:%d" % silent.getsockname()[1]
        with pytest.raises(refit.sglang.WorkerError, match=f"{url}/update_weights_from_tensor: no answer within 0.5 s"):
            refit.sglang.facts(url, timeout=0.1)
    with pytest.raises(refit.sglang.WorkerError, match=f"{url}/update_weights_from_tensor: ConnectionRefusedError"):
        refit.sglang.facts(url, timeout=0.1)


@pytest.mark.parametrize("asked, method", [("facts", "update_weights_from_tensor"), ("update", "pause_generation")])
def test_an_engine_that_does_not_answer_is_an_error(monkeypatch, asked, method):
    monkeypatch.setattr(refit.workers, "GRACE_SECONDS", 0.1)

    async def never(*_):
        await asyncio.Event().wait()

    request = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", types.SimpleNamespace(
        UpdateWeightsFromTensorReqInput=request, PauseGenerationReqInput=request, ContinueGenerationReqInput=request))
    engine = types.SimpleNamespace(tokenizer_manager=types.SimpleNamespace(update_weights_from_tensor=never, pause_generation=never))
    with pytest.raises(refit.sglang.WorkerError, match=f"^the engine's {method}: no answer within 0.5 s: a scheduler hangs, or is gone$"):
        getattr(refit.sglang, asked)(engine, timeout=0.1)


def test_other_load_formats_are_sglangs_own():
    request = types.SimpleNamespace(load_format="flattened_bucket")
    assert refit.sglang._update_weights_from_tensor(lambda manager, asked: (manager, asked), "manager", request) == (
        "manager", request)


def test_without_sglang_registering_does_nothing():
    refit.sglang.register()
    assert not refit.sglang._registered


def test_scales_of_the_cache_are_left_alone():
    tensors = {"model.layers.0.self_attn.attn.k_scale": 1, "model.layers.0.self_attn.k_proj.weight_scale_inv": 2}
    model = types.SimpleNamespace(named_parameters=tensors.items, named_buffers=dict().items)
    assert list(refit.sglang.tensors_of(model)[0]) == ["model.layers.0.self_attn.k_proj.weight_scale_inv"]


def test_a_later_schedulers_refusal_to_flush_is_told(monkeypatch):
    refused = json.dumps({"replies": [REPLY], "error": "the cache was not flushed"})
    client = Client(answer([REPLY]), (False, json.dumps({"replies": [REPLY], "error": ""}) + " | " + refused))
    with pytest.raises(refit.sglang.WorkerError, match="the cache was not flushed"):
        update(client, monkeypatch)
    assert client.calls[-1] != "resume"


def gather_thrice(rank, directory, pipe):
    """A long timeout, then a short one for which rank 1 comes too late, then a long one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=2)
    gather = refit.sglang._Gather(types.SimpleNamespace(tp_size=2, pp_size=1))
    pipe.send(gather({"rank": rank}, 300))
    pipe.recv()
    try:
        gather({"rank": rank}, 1)
    except Exception as error:
        pipe.send(type(error).__name__)
    pipe.recv()
    pipe.send(gather({"rank": rank}, 300))


def test_each_gather_has_its_own_timeout(tmp_path):
    pytest.importorskip("torch.distributed")
    fresh = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(2):
        pipe, theirs = fresh.Pipe()
        pipes.append(pipe)
        processes.append(fresh.Process(target=gather_thrice, args=(rank, tmp_path, theirs), daemon=True))
        processes[-1].start()

    def told(pipe):
        assert pipe.poll(600), "no answer"
        return pipe.recv()

    try:
        assert [told(pipe) for pipe in pipes] == [[{"rank": 0}, {"rank": 1}]] * 2
        for pipe in pipes:  # rank 1 when rank 0's wait is over
            pipe.send("go")
            assert isinstance(told(pipe), str)
        for pipe in pipes:
            pipe.send("go")
        assert [told(pipe) for pipe in pipes] == [[{"rank": 0}, {"rank": 1}]] * 2
    finally:
        for process in processes:
            process.kill()
