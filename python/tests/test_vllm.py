"""What refit.vllm does by itself. tests/engines/run.sh tests it inside a real vLLM."""
import asyncio
import concurrent.futures
import enum
import http.server
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest

import refit
import refit.vllm
from refit import lora, requirements, vllm_worker, weight_memory
from refit.vllm_client import Clients, ExtensionHTTPClient, HTTPClient, update_by
from refit.vllm_draft import WithDraft


def parallel(**sizes):
    facts = dict(tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1, data_parallel_index=0,
                 world_size=2)
    return types.SimpleNamespace(**{**facts, **sizes})


def test_ranks_count_tensor_parallel_then_data_parallel_then_engines(tiny_job):
    config = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "vocab_size": 64,
              "tie_word_embeddings": False}
    plan = refit.compile({"model": config, "source": {"layout": "fsdp"},
                          "destination": {"layout": "vllm", "tensor_parallel": 2, "replicas": 4}})
    assert plan.destination_ranks == 8
    ranks = [refit.vllm.rank_in_plan(plan, parallel(data_parallel_size=2, data_parallel_index=index), rank, engine)
             for engine in range(2) for index in range(2) for rank in range(2)]
    assert ranks == list(range(plan.source_ranks, plan.source_ranks + 8))


def test_a_mesh_that_the_plan_does_not_have_is_refused(tiny_job):
    plan = refit.compile(tiny_job)
    with pytest.raises(refit.InvalidArgument, match="the plan has 2 destination ranks; engine 1 of tensor_parallel 2, "
                                                    "pipeline_parallel 1, data_parallel 1 is its ranks 2 to 3"):
        refit.vllm.rank_in_plan(plan, parallel(), 0, engine=1)
    with pytest.raises(refit.InvalidArgument, match="engine 0 of tensor_parallel 4"):
        refit.vllm.rank_in_plan(plan, parallel(tensor_parallel_size=4, world_size=4), 0)


def test_all_workers_errors_are_raised_together():
    replies = [{"state": "bound", "error": ""}, {"state": "torn", "error": "Aborted: rank 0 is gone"},
               {"state": "none", "error": "InvalidArgument: refit_init was not called, or failed"}]
    assert refit.vllm.checked(replies[:1]) == replies[:1]
    with pytest.raises(refit.vllm.WorkerError) as failed:
        refit.vllm.checked(replies)
    assert str(failed.value) == ("2 of 3 workers failed\n  worker 1 (torn): Aborted: rank 0 is gone\n"
                                 "  worker 2 (none): InvalidArgument: refit_init was not called, or failed")
    assert failed.value.replies == replies


@pytest.mark.parametrize("method", ["refit_update", "refit_bind"])
def test_a_worker_that_did_not_join_says_so_as_a_value(method):
    reply = getattr(refit.vllm.WorkerExtension(), method)()
    assert reply == {"rank": None, "state": "none", "refits": 0, "version": None, "delta": None, "metrics": {},
                     "error": "InvalidArgument: refit_init was not called, or failed"}


def test_a_backend_that_the_plan_is_not_for_is_refused():
    def refusal(backends, wanted, holds_experts=True):
        return refit.vllm.refusal_of({"moe_backends": backends, "holds_experts": holds_experts}, {} if wanted is None else {"moe_backend": wanted})

    # A stage without experts has no backend of them. A release may tell it under another name.
    assert refusal([], "triton", False) == refusal([], None, False) == ""
    assert refusal([], "triton").startswith("no layer of this engine tells the backend of its experts, and the plan is for moe_backend \"triton\"")
    assert "the experts' backend is DEEPGEMM, which reorders" in refusal(["DEEPGEMM"], "triton")
    assert refusal(["VLLM_CUTLASS"], "triton") == refusal(["TRITON"], None) == refusal(["BATCHED_TRITON"], "triton") == ""
    assert refusal(["FLASHINFER_CUTLASS"], "flashinfer_cutlass") == ""
    assert refusal(["FLASHINFER_TRTLLM", "TRITON"], "flashinfer_cutlass") == (
        "the experts' backend is FLASHINFER_TRTLLM, which reorders w13_weight and w2_weight after loading as no plan does: "
        "start vLLM with moe_backend \"flashinfer_cutlass\" (kernel_config)")
    assert refusal(["FLASHINFER_CUTLASS"], "triton") == (
        "the experts' backend is FLASHINFER_CUTLASS; the plan is for moe_backend \"triton\", which has w13_weight in another "
        "order: put \"moe_backend\": \"flashinfer_cutlass\" into the job's destination, or start vLLM with moe_backend "
        "\"triton\" (kernel_config)")
    assert "put \"moe_backend\": \"triton\" into" in refusal(["BATCHED_TRITON"], "flashinfer_cutlass")


def test_what_is_derived_is_of_the_attention_beside_the_tensor_whatever_its_name(monkeypatch):
    derived = []
    monkeypatch.setattr(refit.vllm, "_derive_in_place", lambda module, dtype: derived.append(module.path))
    attention = {path: types.SimpleNamespace(path=path, impl=None, process_weights_after_loading=None) for path in
                 ("layers.0.mixer.mla_attn", "layers.0.attn.attn", "layers.1.mixer.mla_attn", "layers.10.mixer.mla_attn")}
    other = {path: types.SimpleNamespace() for path in ("", "layers", "layers.0.mixer", "layers.0.mixer.kv_b", "layers.1.mlp.up")}
    hooks = refit.vllm.hooks_of(types.SimpleNamespace(named_modules=lambda: [*other.items(), *attention.items()]))
    tensor = types.SimpleNamespace(dtype="bf16")
    hooks["derive-latent-projections"]("layers.0.mixer.kv_b.weight", tensor)
    hooks["derive-latent-projections"]("layers.1.mixer.kv_b.weight", tensor)
    hooks["derive-attention-sinks"]("layers.0.attn.sinks", tensor)
    assert derived == ["layers.0.mixer.mla_attn", "layers.1.mixer.mla_attn", "layers.0.attn.attn"]
    with pytest.raises(LookupError, match='no attention beside "layers.1.mlp.up.weight" derives anything in this vLLM'):
        hooks["derive-latent-projections"]("layers.1.mlp.up.weight", tensor)


def placed(rank, ranks, experts, local, whole=False):
    """A layer's experts as vLLM 0.32 has them; with `whole` as older releases have them."""
    slots = [local.index(expert) if expert in local else -1 for expert in range(experts)]
    layer = types.SimpleNamespace(ep_rank=rank, ep_size=ranks, expert_map=None if ranks == 1 else np.array(slots))
    return layer if whole else types.SimpleNamespace(expert_map_manager=layer)


def test_where_experts_stand_is_read_from_the_map_that_the_engine_computes_by():
    def placement(*given, **named):
        return refit.vllm._placement_of(placed(*given, **named))

    assert placement(0, 1, 4, [0, 1, 2, 3]) == refit.vllm._placement_of(types.SimpleNamespace()) == ""
    assert placement(1, 2, 8, [4, 5, 6, 7]) == placement(1, 2, 8, [4, 5, 6, 7], whole=True) == "linear"
    assert placement(1, 2, 8, [1, 3, 5, 7]) == placement(1, 2, 8, [1, 3, 5, 7], whole=True) == "round_robin"
    assert placement(2, 4, 4, [2]) == "linear or round_robin"
    assert placement(2, 3, 8, [6, 7]) == "linear"  # the first ranks have one more
    assert placement(0, 2, 8, [0, 1, 2, 7]) == placement(1, 2, 8, [0, 1, 2, 3]) == placement(1, 2, 8, [5, 4, 6, 7]) == "unknown"
    assert refit.vllm._placement_of(types.SimpleNamespace(ep_rank=1, ep_size=2, expert_map=None)) == "unknown"
    # A model's block around the layer, as llama4's, knows the group alone.
    assert refit.vllm._placement_of(types.SimpleNamespace(ep_rank=1, ep_size=2)) == ""


def placement_refusal(wanted, *found, moves_experts=False, **options):
    facts = {"moe_backends": [], "holds_experts": False, "expert_placements": list(found), "moves_experts": moves_experts}
    return refit.vllm.refusal_of(facts, {} if wanted is None else {"expert_placement": wanted}, **options)


def test_experts_that_stand_elsewhere_than_in_the_plan_are_refused():
    for wanted, found in (("linear", ["linear"]), ("round_robin", ["round_robin"]), ("round_robin", ["linear or round_robin"]),
                          ("linear", ["linear", "linear or round_robin"]), ("linear", []), (None, ["round_robin"])):
        assert placement_refusal(wanted, *found) == ""
    assert placement_refusal("linear", "round_robin") == (
        "the engine's ranks hold experts in the order round_robin; the plan has them in the order linear: put \"experts\": "
        "{\"placement\": \"round_robin\"} into the job's destination, or start vLLM with expert_placement_strategy=\"linear\"")
    assert placement_refusal("round_robin", "linear").endswith(
        "the plan has them in the order round_robin: put \"experts\": {\"placement\": \"linear\"} into the job's destination")
    assert placement_refusal("table", "linear").endswith("put \"experts\": {\"placement\": \"linear\"} into the job's destination")
    assert placement_refusal("linear", "linear", "unknown").endswith("no plan of this release has that order")
    # Whatever is not asked of the backends is asked of the places.
    assert placement_refusal("linear", "round_robin", check_backends=False) != ""
    assert placement_refusal("linear", "linear", moves_experts=True) == (
        "the engine moves experts while it serves (EPLB), which no plan follows: start vLLM without enable_eplb")
    assert placement_refusal(None, moves_experts=True) == ""
    # A release whose layers have the map under another name. A stage without experts has no backend of them.
    facts = {"vllm": "9.0", "moe_backends": ["TRITON"], "holds_experts": True, "expert_parallel": True, "expert_placements": [], "moves_experts": False}
    refused = refit.vllm.refusal_of(facts, {"expert_placement": "linear"})
    assert refused.startswith("no layer of vLLM 9.0 tells which experts stand on this rank, and the plan has them in the order linear")
    assert refit.vllm.refusal_of({**facts, "moe_backends": [], "holds_experts": False}, {"expert_placement": "linear"}) == ""


def test_a_requirement_that_nobody_can_compare_is_refused():
    assert "the plan requires expert_rotation \"left\", and this release of Refit does not know" in refit.vllm.refusal_of(
        {"moe_backends": [], "holds_experts": False}, {"expert_rotation": "left"})
    compared = []
    assert requirements.refusal_of({"a": "1", "b": "2"}, {"a": lambda wanted: compared.append(wanted) or "", "b": lambda wanted: "no",
                                                          "c": compared.append}) == "no"
    assert compared == ["1"]


def test_a_worker_whose_experts_stand_elsewhere_is_refused(trainer_and_worker, monkeypatch):
    plan, trainer, worker, _, _ = trainer_and_worker("triton", "TRITON")
    monkeypatch.setattr(refit.Plan, "requirements", lambda plan, rank: {"expert_placement": "linear", "moe_backend": "triton"})

    def error(experts, **options):
        worker.experts.expert_map_manager = placed(0, 2, 4, experts).expert_map_manager
        worker.vllm_config.parallel_config.__dict__.update(options)
        return together(lambda: trainer.bind(arrays_of(plan, 0), timeout=20), lambda: worker.refit_bind(timeout=20))[1]["error"]

    assert error([0, 1]) == ""
    assert error([0, 2]).startswith("BindError: rank 1: the engine's ranks hold experts in the order round_robin")
    assert "start vLLM without enable_eplb" in error([0, 1], enable_eplb=True)


def test_an_engine_with_lora_is_refused_by_that_name(trainer_and_worker):
    plan, trainer, worker, _, _ = trainer_and_worker("triton", "TRITON")
    live = {name.replace("_proj.weight", "_proj.base_layer.weight"): tensor for name, tensor in arrays_of(plan, 1).items()}
    worker.model_runner.model.named_parameters = live.items
    meeting = refit.rendezvous.unique_id()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        joined = pool.submit(refit.join, plan, 0, arrays_of(plan, 0), unique_id=meeting, device="cpu", timeout=60)
        error = worker.refit_init(plan, meeting)["error"]
        with pytest.raises(refit.Aborted, match="the meeting was ended: this engine has LoRA switched on"):
            joined.result()
    assert error == (
        'FailedPrecondition: this engine has LoRA switched on: "model.layers.0.self_attn.qkv_proj.base_layer.weight" and 1 more tensor '
        "are of adapted modules. Refit moves whole weights, into which a trainer has merged its adapters: start vLLM without "
        "enable_lora")
    for name in ("base_model.model.layers.0.q_proj.lora_A.default.weight", "q_proj.lora_B.weight"):
        assert lora.refusal_of([name], "the trainer", "do not") != ""
    assert lora.refusal_of(["model.lora.weight", "base_layers.0.weight"], "the trainer", "do not") == ""


def test_an_update_lists_no_tensors_if_nothing_slept(trainer_and_worker, monkeypatch):
    plan, trainer, worker, _, _ = trainer_and_worker("triton", "TRITON")
    listed, tensors_of = [], refit.vllm.tensors_of
    monkeypatch.setattr(refit.vllm, "tensors_of", lambda model: listed.append(model) or tensors_of(model))
    reply = together(lambda: trainer.run(timeout=20), lambda: worker.refit_update(timeout=20))[1]
    assert (reply["error"], reply["refits"], listed) == ("", 1, [])


class Cores:
    """Of vLLM's AsyncLLM with data parallelism what Refit calls. Its own methods answer for the first core alone."""

    def __init__(self, *workers, world_size=1):
        self.workers, self.resets, self.calls = workers, [True] * len(workers), []
        self.vllm_config = types.SimpleNamespace(parallel_config=parallel(
            tensor_parallel_size=1, world_size=world_size, data_parallel_size=len(workers)))
        self.engine_core = types.SimpleNamespace(core_engines=[bytes([i]) for i in range(len(workers))], _call_utility_async=self.utility)

    async def utility(self, name, *args, engine):
        (core,) = engine
        if name == "reset_prefix_cache":
            return self.resets[core]
        method, limit, arguments, _ = args
        self.calls.append((name, method, limit))
        return await asyncio.to_thread(lambda: [getattr(self.workers[core], method)(*arguments)])

    async def collective_rpc(self, method, timeout=None, args=()):
        return (await asyncio.gather(*[self.utility("collective_rpc", method, timeout, args, None, engine=engine)
                                       for engine in self.engine_core.core_engines]))[0]

    async def reset_prefix_cache(self, reset_running_requests=False):
        return self.resets[0]

    async def pause_generation(self, mode, clear_cache):
        self.calls.append("pause")

    async def resume_generation(self):
        self.calls.append("resume")

    async def update_weight_version(self, version):
        self.calls.append(version)


def core_worker(plan, core):
    """A worker of one of two cores of a dense model, where vLLM keeps the core's number alone."""
    worker = Worker(plan, "TRITON")
    worker.vllm_config.parallel_config = parallel(tensor_parallel_size=1, world_size=1, data_parallel_index=core,
                                                  _data_parallel_master_port_list=[29501])
    return worker


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.32.0"))
    plan = refit.compile({**_dense_job(), "destination": {"layout": "vllm", "data_parallel": 2}})
    llm = Cores(core_worker(plan, 0), core_worker(plan, 1))
    fabric = refit.LocalFabric(3)
    trainer = refit.Executor(plan, 0, fabric=fabric)

    def beside(work, own):
        """What the coroutine returns or raises while the trainer does its own part."""
        async def both():
            own_part = asyncio.ensure_future(asyncio.to_thread(own))
            try:
                return await work
            finally:
                await own_part
        return asyncio.run(both())

    weights = {name: array + 1 for name, array in arrays_of(plan, 0).items()}
    replies = beside(refit.vllm.init_async(llm, plan, fabric, timeout=20), lambda: trainer.bind(weights, timeout=20))
    assert [(reply["rank"], reply["state"]) for reply in replies] == [(1, "bound"), (2, "bound")]
    return plan, trainer, llm, beside, weights


def test_all_engine_cores_are_heard(two_cores, tmp_path):
    plan, trainer, llm, beside, weights = two_cores
    replies = beside(refit.vllm.update_async(llm, version="1", timeout=20), lambda: trainer.run(timeout=20))
    assert [(reply["rank"], reply["version"]) for reply in replies] == [(1, "1"), (2, "1")]
    assert llm.calls == [("collective_rpc", "refit_init", 180)] * 2 + ["pause"] + [("collective_rpc", "refit_update", 180)] * 2 + [
        "1", "resume"]
    write_checkpoint(tmp_path, weights)
    dict(llm.workers[1].model_runner.model.named_parameters())["model.norm.weight"][:] = 0
    assert [report.ok for report in asyncio.run(refit.vllm.compare_async(llm, tmp_path, refit=False))] == [True, False]
    assert len(asyncio.run(refit.vllm.facts_async(llm))) == 2


def test_an_update_that_one_engine_core_refuses_fails_and_leaves_the_engine_paused(two_cores):
    plan, trainer, llm, beside, _ = two_cores
    weight_memory.release(llm.workers[1].model_runner.model)
    llm.calls.clear()
    with pytest.raises(refit.vllm.WorkerError, match="1 of 2 workers failed\n  worker 1 .*vLLM slept") as failed:
        beside(refit.vllm.update_async(llm, version="1", timeout=20), lambda: trainer.run(timeout=20))
    assert len(failed.value.replies) == 2 and "1" not in llm.calls and "resume" not in llm.calls
    # Of an engine that did not start with the extension, or died.
    llm.workers = (llm.workers[0], None)
    with pytest.raises(refit.vllm.WorkerError, match="1 of 2 engine cores failed\n  engine core 1: AttributeError"):
        asyncio.run(refit.vllm.facts_async(llm))


def test_a_cache_that_one_engine_core_did_not_reset_fails_the_update(two_cores):
    plan, trainer, llm, beside, _ = two_cores
    llm.resets[1] = False
    with pytest.raises(refit.vllm.WorkerError, match="did not reset its prefix cache"):
        beside(refit.vllm.update_async(llm, timeout=20), lambda: trainer.run(timeout=20))


def test_workers_that_do_not_reply_are_missed(two_cores):
    llm = two_cores[2]
    llm.vllm_config.parallel_config.world_size = 2
    with pytest.raises(refit.vllm.WorkerError, match="2 of 4 workers replied"):
        asyncio.run(refit.vllm.facts_async(llm))
    alone = Llm(llm.workers[0])
    alone.llm_engine.vllm_config = llm.vllm_config
    with pytest.raises(refit.vllm.WorkerError, match="1 of 2 workers replied"):
        refit.vllm.facts(alone)
    # Each process under torchrun has an LLM with one worker, whatever the engine's mesh.
    alone.llm_engine.vllm_config.parallel_config.distributed_executor_backend = "external_launcher"
    assert len(refit.vllm.facts(alone)) == 1


def test_a_release_that_cannot_call_each_engine_core_is_refused(two_cores):
    llm = two_cores[2]
    del llm.engine_core._call_utility_async
    with pytest.raises(refit.FailedPrecondition, match="cannot call each of its 2 engine cores"):
        asyncio.run(refit.vllm.facts_async(llm))


def test_an_engine_core_that_hangs_is_not_waited_for_for_ever(two_cores, monkeypatch):
    llm = two_cores[2]
    monkeypatch.setattr(refit.vllm_cores, "GRACE_SECONDS", 0)
    monkeypatch.setattr(refit.vllm_cores, "deadline", lambda timeout: 0.1)

    async def never(*_, **__):
        await asyncio.Event().wait()

    answering, llm.engine_core._call_utility_async = llm.engine_core._call_utility_async, never
    with pytest.raises(refit.DeadlineExceeded, match="the engine has not answered for 0.1 s"):
        asyncio.run(refit.vllm.facts_async(llm))
    # vLLM's own methods call the cores, too.
    llm.engine_core._call_utility_async, llm.pause_generation = answering, never
    with pytest.raises(refit.DeadlineExceeded, match="the engine has not answered for 0.1 s"):
        asyncio.run(asyncio.wait_for(refit.vllm.update_async(llm), 20))


def test_the_plan_tells_how_many_cores_an_engine_of_a_dense_model_has(two_cores):
    plan = two_cores[0]
    core = core_worker(plan, 1).vllm_config.parallel_config
    assert refit.vllm.data_parallel_of(plan, core, 1) == 2
    assert refit.vllm.data_parallel_of(plan, core, 2) == refit.vllm.data_parallel_of(plan, core) == 1
    alone = parallel(tensor_parallel_size=1, world_size=1, _data_parallel_master_port_list=[])
    assert refit.vllm.data_parallel_of(plan, alone, 1) == 1
    assert refit.vllm.data_parallel_of(plan, parallel(data_parallel_size=4), 1) == 4
    # A plan for another mesh is refused before anybody waits.
    wide = refit.compile({**_dense_job(), "destination": {"layout": "vllm", "tensor_parallel": 2}})
    worker = core_worker(plan, 0)
    error = worker.refit_init(wide, refit.LocalFabric(3), engines=1, timeout=20)["error"]
    assert error.startswith('InvalidArgument: the plan is for another mesh: of its rank 1 "')
    four = refit.compile({**_dense_job(), "destination": {"layout": "vllm", "data_parallel": 2, "replicas": 2}})
    assert [refit.vllm.rank_in_plan(four, core_worker(plan, index).vllm_config.parallel_config, 0, engine,
                                    refit.vllm.data_parallel_of(four, core, 2)) for engine in (0, 1) for index in (0, 1)] == [1, 2, 3, 4]


def _dense_job():
    config = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
              "head_dim": 16, "intermediate_size": 64, "vocab_size": 64, "tie_word_embeddings": False, "torch_dtype": "float32"}
    return {"model": config, "source": {"layout": "fsdp"}}


Backend = enum.Enum("Backend", ["TRITON", "FLASHINFER_CUTLASS"])


class Worker(refit.vllm.WorkerExtension):
    """A worker of vLLM as refit.vllm sees it, whose experts run in this backend."""

    def __init__(self, plan, backend):
        self.rank, self.device = 0, "cpu"
        self.vllm_config = types.SimpleNamespace(
            parallel_config=parallel(tensor_parallel_size=1, world_size=1),
            load_config=types.SimpleNamespace(load_format="auto"),
            model_config=types.SimpleNamespace(dtype="torch.float32", quantization=None))
        self.experts = types.SimpleNamespace()
        self.use(backend)
        tensors = arrays_of(plan, 1)
        self.model_runner = types.SimpleNamespace(model=types.SimpleNamespace(
            named_parameters=tensors.items, named_buffers=dict().items, state_dict=lambda: tensors,
            named_modules=lambda: [("model.layers.0.mlp.experts", self.experts)]))

    def use(self, backend):
        self.experts.quant_method = types.SimpleNamespace(unquantized_backend=Backend[backend])


def arrays_of(plan, rank):
    return {name: np.zeros(info.shape, info.dtype.replace("fp", "float")) for name, info in plan.tensors(rank).items()}


def together(*calls):
    """What the calls of all ranks return, or raise, each on a thread."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]


@pytest.fixture
def trainer_and_worker(models, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.32.0"))

    def make(job_backend, backend, **options):
        config = {**json.loads((models / "qwen3-30b-a3b.json").read_text()), "dtype": "float32", "torch_dtype": "float32",
                  "num_hidden_layers": 1, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "vocab_size": 64,
                  "num_experts_per_tok": 2}
        plan = refit.compile({"model": config, "source": {"layout": "fsdp"},
                              "destination": {"layout": "vllm", "moe_backend": job_backend}, "options": options})
        fabric = refit.LocalFabric(2)
        trainer = refit.Executor(plan, 0, fabric=fabric)
        worker = Worker(plan, backend)
        bound, reply = together(lambda: trainer.bind(arrays_of(plan, 0), timeout=20),
                                lambda: worker.refit_init(plan, fabric, timeout=20))
        return plan, trainer, worker, bound, reply
    return make


def test_a_worker_joins_in_the_backend_that_the_job_names(trainer_and_worker, monkeypatch):
    plan, trainer, worker, bound, reply = trainer_and_worker("flashinfer_cutlass", "FLASHINFER_CUTLASS")
    assert (reply["state"], reply["error"]) == ("bound", "")

    def bind_anew():
        return together(lambda: trainer.bind(arrays_of(plan, 0), timeout=20), lambda: worker.refit_bind(timeout=20))[1]

    worker.use("TRITON")
    assert bind_anew()["error"].startswith("BindError: rank 1: the experts' backend is TRITON; the plan is for moe_backend "
                                           "\"flashinfer_cutlass\"")
    worker.use("FLASHINFER_CUTLASS")
    assert bind_anew()["error"] == ""
    checks = []
    run = refit.Executor.run
    monkeypatch.setattr(refit.Executor, "run", lambda self, **options: checks.append(options["check"]) or run(self, **options))
    llm = Llm(worker)
    (reply,) = together(lambda: trainer.run(check=True, timeout=20),
                        lambda: refit.vllm.update(llm, check=True, timeout=20))[1]
    assert (reply["refits"], reply["error"], checks) == (1, "", [True, True])
    assert llm.caches_reset == 1


def test_a_worker_leaves_its_vision_tower_alone(trainer_and_worker):
    plan, trainer, worker, _, _ = trainer_and_worker("triton", "TRITON")
    model = worker.model_runner.model
    live = {**arrays_of(plan, 1), "visual.merger.weight": np.zeros(4, "float32")}
    model.named_parameters = live.items

    def bind_anew():
        return together(lambda: trainer.bind(arrays_of(plan, 0), timeout=20), lambda: worker.refit_bind(timeout=20))[1]["error"]

    assert "unexpected: \"visual.merger.weight\"" in bind_anew()
    model._tower_model_names = ["visual"]
    assert bind_anew() == ""
    worker.vllm_config.load_config.load_format = "dummy"
    assert 'load_format "dummy" filled "visual.merger.weight" with random values' in bind_anew()


def test_a_worker_that_fails_before_it_binds_leaves_nobody_waiting(trainer_and_worker):
    plan, trainer, worker, _, _ = trainer_and_worker("triton", "TRITON")
    del worker.vllm_config.model_config.quantization  # as a release of vLLM that has it elsewhere
    began = time.monotonic()
    bound, reply = together(lambda: trainer.bind(arrays_of(plan, 0), timeout=20), lambda: worker.refit_bind(timeout=20))
    assert reply["error"].startswith("AttributeError: ")
    assert isinstance(bound, refit.Error) and time.monotonic() - began < 10, bound


def test_a_worker_whose_kernels_pack_weights_is_refused(trainer_and_worker):
    plan, trainer, worker, _, _ = trainer_and_worker("triton", "TRITON")
    packed = "model.layers.0.self_attn.o_proj.weight"
    worker.model_runner.model.named_parameters = {**arrays_of(plan, 1), packed: np.zeros(0, "float32")}.items
    reply = together(lambda: trainer.bind(arrays_of(plan, 0), timeout=20), lambda: worker.refit_bind(timeout=20))[1]
    assert reply["error"] == (
        f'BindError: rank 1: vLLM emptied "{packed}" after loading: its kernels for CPUs keep weights packed, in an order that no plan '
        "has. Serve on GPUs")


def test_a_model_of_deepseek_v4_sums_its_streams_again():
    calls = []
    model = types.SimpleNamespace(finalize_mhc_broadcast_weights=lambda: calls.append("model"))
    hook = refit.vllm.hooks_of(types.SimpleNamespace(named_modules=lambda: [("", types.SimpleNamespace()), ("model", model)]))
    hook["derive-hyper-broadcast"]("model.layers.0.hc_attn_fn", None)
    assert calls == ["model"]
    # A draft model, too, has a module of that name.
    model.named_modules, draft = lambda: [("model", model)], types.SimpleNamespace()
    draft.named_modules = lambda: [("model", draft)]
    refit.vllm.hooks_of(WithDraft(model, draft, ()))["derive-hyper-broadcast"]("model.layers.0.hc_attn_fn", None)
    assert calls == ["model"] * 2
    without = refit.vllm.hooks_of(types.SimpleNamespace(named_modules=lambda: [("", types.SimpleNamespace())]))
    with pytest.raises(LookupError, match='no model of this vLLM derives anything from "model.layers.0.hc_attn_fn"'):
        without["derive-hyper-broadcast"]("model.layers.0.hc_attn_fn", None)


def test_a_plan_that_excludes_parameters_needs_a_loaded_engine(trainer_and_worker):
    # One third of a fused tensor.
    plan, trainer, worker, _, reply = trainer_and_worker("triton", "TRITON", exclude=["*.k_proj.weight"])
    assert reply["error"] == "" and not plan.skipped(1)
    worker.vllm_config.load_config.load_format = "dummy"
    reply = together(lambda: trainer.bind(arrays_of(plan, 0), timeout=20), lambda: worker.refit_bind(timeout=20))[1]
    assert 'load_format "dummy" filled "model.layers.0.self_attn.qkv_proj.weight" with random values' in reply["error"]


@pytest.fixture
def sleeper(trainer_and_worker):
    """A worker that holds a tower, and its trainer, whose plan leaves the tower and one third of a fused tensor alone."""
    class Sleeper(Worker):
        """Of vLLM's worker what sleeps and wakes up."""

        def sleep(self, level=1):
            self.slept = level

        def reload_weights(self, weights_iterator=None, weights_path=None):
            self.slept = 0

    def make(**facts):
        plan, trainer, older, _, _ = trainer_and_worker("triton", "TRITON", exclude=["*.k_proj.weight"])
        worker = Sleeper(plan, "TRITON")
        worker.__dict__.update(facts)
        worker.vllm_config.model_config.enable_sleep_mode = True
        model = worker.model_runner.model
        model._tower_model_names = ["visual"]
        live = {**arrays_of(plan, 1), "visual.merger.weight": np.zeros(4, "float32")}
        model.named_parameters = live.items
        older.refit_close()
        fabric = refit.LocalFabric(2)
        trainer = refit.Executor(plan, 0, fabric=fabric)
        reply = together(lambda: trainer.bind(arrays_of(plan, 0), timeout=20), lambda: worker.refit_init(plan, fabric, timeout=20))[1]

        def ask(method):
            own = trainer.run if method == "refit_update" else lambda timeout: trainer.bind(arrays_of(plan, 0), timeout=timeout)
            return together(lambda: own(timeout=20), lambda: getattr(worker, method)(timeout=20))[1]["error"]

        return worker, ask, reply["error"]
    return make


LOST = ('which discarded "model.layers.0.self_attn.qkv_proj.weight" and 1 more tensor, and no refit writes all of '
        "that: sleep at level 1")


def test_what_sleep_discards_and_no_refit_writes_is_refused(sleeper):
    worker, ask, error = sleeper(_sleep_mode_backend=None)
    assert error == ask("refit_update") == ""
    worker.sleep(1)
    worker.sleep(level=1)
    assert worker.slept == 1
    assert ask("refit_bind") == ask("refit_update") == ""
    worker.sleep(level=2)
    assert worker.slept == 2
    # All ranks' refit ends: a worker that did not come would be waited for.
    assert LOST in ask("refit_update") and worker._refit.refits == 3
    assert LOST in ask("refit_bind")
    worker.reload_weights(weights_iterator=iter([]))
    assert LOST in ask("refit_bind")
    worker.reload_weights()
    assert worker.slept == 0
    assert ask("refit_bind") == ask("refit_update") == ""


def test_a_worker_that_slept_binds_before_it_updates(sleeper):
    worker, ask, _ = sleeper(_sleep_mode_backend=None)
    assert ask("refit_update") == ""
    for _ in range(2):
        worker.sleep(1)
        assert ask("refit_update").startswith("FailedPrecondition: vLLM slept since this worker bound, and its weights woke up in other "
                                              "memory: bind anew on all ranks before the update, by refit.vllm.bind")
        assert ask("refit_bind") == ask("refit_update") == ask("refit_update") == ""


def test_what_sleep_keeps_is_served(sleeper):
    worker, ask, _ = sleeper(_sleep_mode_backend=None)
    worker.vllm_config.model_config.sleep_preserve_parameter_names = ["visual.*", "*.qkv_proj.*"]
    worker.sleep(2)
    assert ask("refit_bind") == ask("refit_update") == ""
    worker.vllm_config.model_config.sleep_preserve_parameter_names = ["visual.*"]
    worker.sleep(2)
    assert LOST.replace(" and 1 more tensor", "") in ask("refit_bind")


def test_a_draft_model_that_sleep_discards_and_no_refit_writes_is_refused(sleeper):
    worker, ask, _ = sleeper(_sleep_mode_backend=None)
    head = np.zeros(4, "float32")
    main = worker.model_runner.model.named_parameters
    worker.model_runner.model.named_parameters = {**dict(main()), "model.lm_head": head}.items
    worker.get_draft_model = lambda: types.SimpleNamespace(named_parameters={"fc.weight": head + 1, "lm_head.weight": head}.items)
    worker.vllm_config.model_config.sleep_preserve_parameter_names = ["visual.*", "*.qkv_proj.*"]
    worker.sleep(2)
    lost = weight_memory.lost(worker.model_runner.model)
    assert {name for name in lost if name.startswith("draft.")} == {"draft.fc.weight"}  # the head is the model's
    worker.model_runner.model.named_parameters = main
    wanted = 'discarded the draft model\'s "draft.fc.weight", and the plan moves no draft model'
    assert wanted in ask("refit_bind")
    worker.reload_weights()  # of the model alone
    assert wanted in ask("refit_bind")
    worker.vllm_config.model_config.sleep_preserve_parameter_names += ["draft.*"]
    weight_memory.restore(worker.model_runner.model)
    worker.sleep(2)
    assert ask("refit_bind") == ask("refit_update") == ""


def test_a_worker_that_slept_before_it_was_watched_is_refused(sleeper):
    assert LOST in sleeper(_sleep_mode_backend="cumem")[2]


def test_a_release_that_does_not_tell_whether_it_slept_is_refused(sleeper):
    assert LOST in sleeper()[2]


def test_a_worker_binds_the_vision_tower_that_a_plan_moves(tower_job, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.32.0"))
    plan = refit.compile(tower_job)
    fabric = refit.LocalFabric(2)
    trainer, worker = refit.Executor(plan, 0, fabric=fabric), Worker(plan, "TRITON")
    model = worker.model_runner.model
    model._tower_model_names = ["visual"]
    live = arrays_of(plan, 1)
    model.named_parameters = live.items
    weights = {name: array + 1 for name, array in arrays_of(plan, 0).items()}
    assert [reply["error"] for reply in together(lambda: {"error": "", "": trainer.bind(weights, timeout=20)},
                                                 lambda: worker.refit_init(plan, fabric, timeout=20))] == ["", ""]
    assert together(lambda: trainer.run(timeout=20), lambda: worker.refit_update(timeout=20))[1]["error"] == ""
    assert "visual.blocks.0.attn.qkv.weight" in live
    assert all((array == 1).all() for array in live.values())

    # What of the tower the plan lacks is not left alone.
    worker.vllm_config.model_config.multimodal_config = types.SimpleNamespace(mm_encoder_tp_mode="data")
    live["visual.extra.weight"] = np.zeros(4, "float32")
    error = together(lambda: trainer.bind(weights, timeout=20), lambda: worker.refit_bind(timeout=20))[1]["error"]
    assert "unexpected: \"visual.extra.weight\"" in error
    assert '"vision": true, "mm_encoder_tp_mode": "data"}' in error

    # An engine that was started with language_model_only has the tower's name alone.
    for name in [name for name in live if name.startswith("visual.")]:
        del live[name]
    error = together(lambda: trainer.bind(weights, timeout=20), lambda: worker.refit_bind(timeout=20))[1]["error"]
    assert "missing: \"visual.blocks.0.attn.qkv.weight\"" in error
    assert "vision" not in error.partition("this worker is")[2]


def test_a_worker_asks_for_a_dense_refit_and_tells_how_it_went(trainer_and_worker):
    plan, trainer, worker, bound, reply = trainer_and_worker("triton", "TRITON", delta=True, peer="staged")
    assert (reply["error"], reply["delta"]) == ("", None)

    def update(**options):
        ran, reply = together(lambda: trainer.run(timeout=20), lambda: worker.refit_update(timeout=20, **options))
        assert (ran, json.loads(json.dumps(reply))) == (trainer, reply)
        return reply["delta"]["is_delta"], reply["delta"]["why_dense"], reply["delta"]["version"]

    assert update() == (False, "rank 0 bound since its last refit", 1)
    assert update() == (True, "", 2)
    assert update(dense=True) == (False, "rank 1 asked for it", 3)
    llm = Llm(worker)
    assert together(lambda: trainer.run(timeout=20), lambda: refit.vllm.update(llm, dense=True, timeout=20)[0]["delta"])[1][
        "why_dense"] == "rank 1 asked for it"


@pytest.mark.parametrize("joined, has_pidfd", [(True, True), (False, True), (True, False)])
def test_a_worker_whose_driver_is_killed_leaves_the_other_ranks(tiny_job, trainer_and_worker, monkeypatch, joined, has_pidfd, caplog):
    driver = subprocess.Popen(["sleep", "1000"])
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.setattr(refit.vllm_driver, "driver_of", lambda pid: driver.pid)
    plan, _, worker, _, _ = trainer_and_worker("triton", "TRITON")
    meeting = refit.rendezvous.unique_id()
    if joined:
        trainer, reply = together(lambda: refit.join(plan, 0, arrays_of(plan, 0), unique_id=meeting, device="cpu", timeout=20),
                                  lambda: worker.refit_init(plan, meeting, timeout=20))
        assert reply["error"] == ""
        waits = lambda: trainer.run(timeout=60)
    else:
        waits = lambda: worker.refit_init(plan, meeting, timeout=60)["error"]
        # Rank 0 is another trainer's, and does not come before the driver is gone.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(waits)
        time.sleep(1)
        driver.kill()
        driver.wait()
        began = time.monotonic()
        if joined:
            with pytest.raises(refit.Unavailable, match="rank 1 has closed its control plane"):
                waiting.result()
        else:
            # Whether the worker meets rank 0 first or ends the meeting first.
            with pytest.raises(refit.Error, match="vLLM's driver, process [0-9]+, is gone|rank 1 (is gone|has closed)|aborted by rank 1"):
                refit.join(plan, 0, arrays_of(plan, 0), unique_id=meeting, device="cpu", timeout=60).run(timeout=60)
            waiting.result()
    assert time.monotonic() - began < 20
    said = f"vLLM's driver, process {driver.pid}, is gone: this worker leaves the other ranks"
    while ("refit", logging.ERROR, said) not in caplog.record_tuples and time.monotonic() - began < 30:
        time.sleep(0.1)
    assert ("refit", logging.ERROR, said) in caplog.record_tuples


def test_the_driver_of_an_engine_is_the_process_that_started_it(monkeypatch):
    processes = {9: ("VLLM::Worker_TP1\0", 8), 8: ("VLLM::EngineCore\0", 7), 7: ("python\0train.py\0", 6), 5: ("VLLM::EngineCore\0", 1),
                 13: ("VLLM::EngineCore_DP0\0", 12), 12: ("VLLM::APIServer_DP0\0", 11), 11: ("bash\0", 10)}
    monkeypatch.setattr(refit.vllm_driver, "_title", lambda pid: processes.get(pid, ("", 0))[0])
    monkeypatch.setattr(refit.vllm_driver, "_parent", lambda pid: processes[pid][1])
    assert [refit.vllm_driver.driver_of(pid) for pid in (9, 8, 7, 5, 13)] == [7, 7, None, None, 12]


class Llm:
    """Of vLLM's `LLM` what the driver calls, with one worker."""

    def __init__(self, worker):
        self.worker, self.llm_engine, self.caches_reset, self.limits = worker, types.SimpleNamespace(), 0, []

    def collective_rpc(self, method, timeout, args=()):
        self.limits.append(timeout)
        return [getattr(self.worker, method)(*args)]

    def reset_prefix_cache(self):
        self.caches_reset += 1


class AsyncLlm(Llm):
    async def collective_rpc(self, method, timeout, args=()):
        return await asyncio.to_thread(super().collective_rpc, method, timeout, args)

    async def reset_prefix_cache(self):
        super().reset_prefix_cache()


def test_every_driver_function_has_a_twin_for_a_running_event_loop(trainer_and_worker, tmp_path):
    plan, trainer, worker, bound, reply = trainer_and_worker("triton", "TRITON")
    write_checkpoint(tmp_path, arrays_of(plan, 0))
    llm = AsyncLlm(worker)

    def own_part():
        trainer.bind(arrays_of(plan, 0), timeout=20).run(timeout=20)
        trainer.run(timeout=20)

    async def drive():
        own = asyncio.ensure_future(asyncio.to_thread(own_part))
        assert (await refit.vllm.bind_async(llm, timeout=20))[0]["state"] == "bound"
        await refit.vllm.update_async(llm, pause=None, timeout=20)
        (report,) = await refit.vllm.compare_async(llm, tmp_path, timeout=20)
        await own
        assert report.ok and report.refits == 2
        assert (await refit.vllm.facts_async(llm))[0]["vllm"] == "0.32.0"
        assert (await refit.vllm.close_async(llm))[0]["state"] == "closed"
        with pytest.raises(refit.vllm.WorkerError, match="none.refit"):
            await refit.vllm.init_async(llm, "none.refit", "00")

    asyncio.run(drive())
    with pytest.raises(refit.InvalidArgument, match="this engine's calls are awaited: .* named …_async"):
        refit.vllm.facts(types.SimpleNamespace(collective_rpc=lambda *_, **__: asyncio.sleep(1)))

    async def inside_a_loop():  # as in a notebook
        return refit.vllm.facts(Llm(worker))

    assert asyncio.run(inside_a_loop())[0]["vllm"] == "0.32.0"
    # No call waits for ever, nor for less than the workers may take.
    assert llm.limits == [180, 180, 1920, 120, 120, 1920]


def test_a_plan_for_a_larger_mesh_is_refused_before_its_ranks_are_waited_for(trainer_and_worker):
    plan, trainer, worker, _, _ = trainer_and_worker("triton", "TRITON")
    config = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "head_dim": 16, "intermediate_size": 64, "vocab_size": 64, "tie_word_embeddings": False, "torch_dtype": "float32"}

    def reply_to(meeting=None, live={}, **destination):
        plans = [refit.compile({"model": config, "source": {"layout": "fsdp"},
                                "destination": {"layout": "vllm", **sizes}}) for sizes in (live, destination)]
        worker.model_runner.model.named_parameters = arrays_of(plans[0], 1).items
        return worker.refit_init(plans[1], meeting or refit.LocalFabric(plans[1].world_size), timeout=0.1)["error"]

    error = reply_to(tensor_parallel=2)
    assert error.startswith('InvalidArgument: the plan is for another mesh: of its rank 1 "')
    assert error.splitlines()[1] == ('this worker is "destination": {"layout": "vllm", "version": "0.32"}, dtype float32; the plan is for '
                                     '"destination": {"layout": "vllm", "tensor_parallel": 2}')
    assert "DeadlineExceeded" in reply_to(replicas=2)
    # Stages of a pipeline have tensors of the same shapes.
    assert reply_to(pipeline_parallel=2).startswith(
        'InvalidArgument: the plan is for another mesh, or another model: its rank 1 does not name "model.layers.1.')
    worker.vllm_config.parallel_config = parallel(pipeline_parallel_size=2, tensor_parallel_size=1, world_size=2)
    error = reply_to(live={"pipeline_parallel": 2}, replicas=4)
    assert error.startswith("InvalidArgument: the plan is for another mesh, or another model: its rank 1 names, and this worker lacks, "
                            '"model.layers.1.')
    assert error.splitlines()[1] == ('this worker is "destination": {"layout": "vllm", "version": "0.32", "pipeline_parallel": 2}, dtype '
                                     'float32; the plan is for "destination": {"layout": "vllm", "replicas": 4}')
    assert "DeadlineExceeded" in reply_to(live={"pipeline_parallel": 2}, pipeline_parallel=2, replicas=2)
    worker.vllm_config.parallel_config = parallel(tensor_parallel_size=1, world_size=1)

    # A trainer that has come does not wait for the rank that nobody starts.
    wide = refit.compile({"model": config, "source": {"layout": "fsdp"}, "destination": {"layout": "vllm", "tensor_parallel": 2}})
    meeting = refit.rendezvous.unique_id()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        joined = pool.submit(refit.join, wide, 0, arrays_of(wide, 0), unique_id=meeting, device="cpu", timeout=60)
        assert "the plan is for another mesh" in reply_to(meeting, tensor_parallel=2)
        with pytest.raises(refit.Aborted, match="the meeting was ended: the plan is for another mesh: of its rank 1"):
            joined.result()
    # Nor for one whose worker has no plan.
    meeting = refit.rendezvous.unique_id()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        joined = pool.submit(refit.join, wide, 0, arrays_of(wide, 0), unique_id=meeting, device="cpu", timeout=60)
        assert "none.refit" in worker.refit_init("none.refit", meeting)["error"]
        with pytest.raises(refit.Aborted, match="the meeting was ended: a worker could not join: .*none.refit"):
            joined.result()
    # An engine that is one too many ends nobody's meeting.
    meeting = refit.rendezvous.unique_id()
    twice = refit.compile({"model": config, "source": {"layout": "fsdp"}, "destination": {"layout": "vllm", "replicas": 2}})
    with concurrent.futures.ThreadPoolExecutor() as pool:
        joined = pool.submit(refit.join, twice, 0, arrays_of(twice, 0), unique_id=meeting, device="cpu", timeout=1)
        assert "engine 2" in worker.refit_init(twice, meeting, engine=2)["error"]
        with pytest.raises(refit.DeadlineExceeded, match="2 of 3 ranks did not come"):
            joined.result()

    worker.vllm_config.parallel_config = parallel(tensor_parallel_size=4, world_size=4)
    error = reply_to(tensor_parallel=2)
    assert "the plan has 2 destination ranks; engine 0 of tensor_parallel 4" in error
    assert '"tensor_parallel": 4}, ' in error.splitlines()[1] and '"tensor_parallel": 2}' in error.splitlines()[1]


def test_an_update_after_a_failed_one_says_how_to_go_on(trainer_and_worker, monkeypatch):
    _, _, worker, _, _ = trainer_and_worker("triton", "TRITON")
    torn = "rank 1: the transport is not connected, or a refit failed since: Connect makes it whole"

    def run(executor, **options):  # of a transport between processes
        raise refit.FailedPrecondition(torn)

    monkeypatch.setattr(refit.Executor, "run", run)
    assert worker.refit_update(timeout=20)["error"] == (
        f"FailedPrecondition: {torn}: bind anew on all ranks before the update, by refit.vllm.bind or send_weights(bind=True), which "
        "connect too")


def test_an_engine_without_the_extension_is_told_of_the_option():
    def call(method, timeout, args):
        raise NotImplementedError(f"Method '{method}' is not implemented.")

    with pytest.raises(refit.FailedPrecondition, match="'refit_init' is not implemented.: start vLLM with worker_extension_cls=\"refit"):
        refit.vllm.init(types.SimpleNamespace(collective_rpc=call), "plan.refit", "00")


def test_a_worker_in_a_backend_of_another_order_is_refused_and_the_trainer_hears_of_it(trainer_and_worker):
    plan, trainer, worker, bound, reply = trainer_and_worker("flashinfer_cutlass", "TRITON")
    assert reply["state"] == "none"
    assert "put \"moe_backend\": \"triton\" into the job's destination" in reply["error"]
    assert isinstance(bound, refit.Error)


def test_no_executor_stays_open_behind_another(trainer_and_worker, monkeypatch):
    made = []
    executor = refit.executor.Executor
    monkeypatch.setattr(refit.executor, "Executor", lambda *given, **named: made.append(executor(*given, **named)) or made[-1])
    plan, trainer, worker, bound, reply = trainer_and_worker("triton", "TRITON")
    trainer.close()
    fabric = refit.LocalFabric(2)
    trainer = refit.Executor(plan, 0, fabric=fabric)
    bound, reply = together(lambda: trainer.bind(arrays_of(plan, 0), timeout=20),
                            lambda: worker.refit_init(plan, fabric, timeout=20))
    assert (reply["error"], [one.state for one in made]) == ("", ["closed", "bound"])
    trainer.close()
    worker.use("FLASHINFER_CUTLASS")
    fabric = refit.LocalFabric(2)
    trainer = refit.Executor(plan, 0, fabric=fabric)
    bound, reply = together(lambda: trainer.bind(arrays_of(plan, 0), timeout=20),
                            lambda: worker.refit_init(plan, fabric, timeout=20))
    assert "the experts' backend is FLASHINFER_CUTLASS" in reply["error"] and reply["state"] == "none"
    assert isinstance(bound, refit.Error) and [one.state for one in made] == ["closed"] * 3


def test_a_worker_checks_what_it_holds(trainer_and_worker, tmp_path):
    plan, trainer, worker, bound, reply = trainer_and_worker("triton", "TRITON")
    write_checkpoint(tmp_path, arrays_of(plan, 0))
    ran, reply = together(lambda: trainer.run(timeout=20), lambda: worker.refit_check(str(tmp_path), timeout=20))
    assert (reply["error"], reply["refits"]) == ("", 1)
    assert refit.Report.from_dict(reply["report"]).ok
    dict(worker.model_runner.model.named_parameters())["model.norm.weight"][3] = 2
    llm = Llm(worker)
    (report,) = refit.vllm.compare(llm, tmp_path, refit=False)
    assert [(mismatch.tensor, mismatch.index) for mismatch in report.mismatches] == [("model.norm.weight", (3,))]
    with pytest.raises(refit.vllm.WorkerError, match="has no .*safetensors file"):
        refit.vllm.compare(llm, tmp_path / "..", refit=False)


def test_an_engine_boots_from_a_checkpoint_and_meets_nobody(trainer_and_worker, tmp_path):
    plan, trainer, worker, bound, reply = trainer_and_worker("triton", "TRITON")
    random = np.random.default_rng(1)
    held = {name: random.standard_normal(array.shape).astype("f4") for name, array in arrays_of(plan, 0).items()}
    write_checkpoint(tmp_path, held)
    worker.refit_close()
    trainer.close()
    llm, model = Llm(worker), worker.model_runner.model
    weight_memory.release(model, ["model.norm.weight", "visual.weight"])
    (loaded,) = refit.vllm.load(llm, plan, tmp_path)
    assert loaded.tensors == len(plan.tensors(1)) and loaded.bytes_read == sum(array.nbytes for array in held.values())
    assert weight_memory.lost(model) == {"visual.weight"}
    executors = [refit.Executor(plan, rank, fabric=fabric) for fabric in [refit.LocalFabric(2)] for rank in range(2)]
    written = {name: array.copy() for name, array in model.named_parameters()}
    together(lambda: executors[0].bind(held, timeout=20).run(timeout=20),
             lambda: executors[1].bind(dict(model.named_parameters()), timeout=20).run(timeout=20))
    assert all((array == written[name]).all() for name, array in model.named_parameters())  # the executor writes the same
    for name, array in model.named_parameters():
        array[:] = 0
    worker.use("FLASHINFER_CUTLASS")
    with pytest.raises(refit.vllm.WorkerError, match="worker 0 .*the experts' backend is FLASHINFER_CUTLASS"):
        refit.vllm.load(llm, plan, tmp_path)
    worker.use("TRITON")
    del held["model.norm.weight"]
    write_checkpoint(tmp_path, held)
    with pytest.raises(refit.vllm.WorkerError, match='(?s)cannot load .*1 problem\n .*has no model.norm.weight\n.*this worker is "destination"'):
        refit.vllm.load(llm, plan, tmp_path)
    assert all((array == 0).all() for _, array in model.named_parameters())


def write_checkpoint(directory, tensors):
    header, data = {}, b""
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [len(data), len(data) + tensor.nbytes]}
        data += tensor.tobytes()
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("knows_running", [True, False])
def test_a_prefix_cache_that_is_not_reset_fails_the_update(knows_running):
    reply = {"rank": 1, "state": "bound", "refits": 1, "version": "7", "error": ""}
    calls = []

    async def call(name, result=None):
        calls.append(name)
        return result

    def reset(reset_running_requests=False):
        return call("reset", reset_running_requests)

    llm = types.SimpleNamespace(
        collective_rpc=lambda *_, **__: call("refit", [reply]), pause_generation=lambda **_: call("pause"),
        reset_prefix_cache=reset if knows_running else lambda: call("reset", False),
        update_weight_version=lambda _: call("version"), resume_generation=lambda: call("resume"))
    if knows_running:
        assert asyncio.run(refit.vllm.update_async(llm, version="7")) == [reply]
        assert calls == ["pause", "refit", "reset", "version", "resume"]
        return
    with pytest.raises(refit.vllm.WorkerError, match="did not reset its prefix cache"):
        asyncio.run(refit.vllm.update_async(llm, version="7"))
    assert calls == ["pause", "refit", "reset"]
    llm = types.SimpleNamespace(collective_rpc=lambda *_, **__: [reply], reset_prefix_cache=lambda: False,
                                llm_engine=types.SimpleNamespace(set_weight_version=calls.append))
    with pytest.raises(refit.vllm.WorkerError, match="did not reset its prefix cache"):
        refit.vllm.update(llm, version="7")
    assert calls == ["pause", "refit", "reset"]


@pytest.mark.parametrize("caching", [False, True])
def test_an_engine_that_caches_no_prefixes_is_asked_to_reset_none(caching):
    reply = {"rank": 1, "state": "bound", "refits": 1, "version": None, "error": ""}
    calls = []
    config = types.SimpleNamespace(cache_config=types.SimpleNamespace(enable_prefix_caching=caching))
    llm = types.SimpleNamespace(
        collective_rpc=lambda *_, **__: [reply], reset_prefix_cache=lambda: calls.append("prefixes"),
        llm_engine=types.SimpleNamespace(vllm_config=config, reset_encoder_cache=lambda: calls.append("encoder")))
    assert refit.vllm.update(llm) == [reply]
    assert calls == (["prefixes", "encoder"] if caching else ["encoder"])


@pytest.fixture
def server():
    """A vLLM server of which the test sees what is posted. `answers`: by path, (status, body)."""
    done = threading.Event()
    done.set()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            found.seen.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            found.headers.append(dict(self.headers))
            self.answer()

        def do_GET(self):
            self.answer()

        def answer(self):
            found.delays.get(self.path, done).wait(20)
            status, text = found.answers.get(self.path, (200, ""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        found = types.SimpleNamespace(url=f"http://127.0.0.1:{listener.server_port}", seen=[], answers={}, headers=[], delays={})
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield found
        listener.shutdown()


ENCODER, PREFIXES = "/reset_encoder_cache", "/reset_prefix_cache?reset_running_requests=true"


def test_a_servers_caches_are_reset_after_an_update(server):
    server.answers[PREFIXES] = (200, '{"success": true}')
    client = HTTPClient(server.url + "/")
    client.init_weight_transfer_engine({"plan": "plan.refit"})
    update_by(client, {"check": True}, "7")
    assert server.seen == [("/init_weight_transfer_engine", {"init_info": {"plan": "plan.refit"}}), ("/start_weight_update", {}),
                           ("/update_weights", {"update_info": {"check": True, "version": "7"}}), ("/finish_weight_update", {"weight_version": "7"}),
                           (ENCODER, {}), (PREFIXES, {})]
    server.answers[PREFIXES] = (200, '{"success": false}')
    with pytest.raises(refit.vllm.WorkerError, match="has the new weights, but cannot reset its prefix cache"):
        update_by(client, {})


def test_what_a_server_says_of_an_error_is_raised(server):
    server.answers["/update_weights"] = (500, '{"error": {"message": "BindError: no"}}')
    with pytest.raises(refit.vllm.WorkerError, match="/update_weights answers 500: BindError: no"):
        update_by(HTTPClient(server.url), {})
    # The workers that did not raise wait for the end.
    assert "/finish_weight_update" in dict(server.seen)
    server.answers["/start_weight_update"] = (404, "no such route")
    with pytest.raises(refit.vllm.WorkerError, match="/start_weight_update answers 404: no such route"):
        update_by(HTTPClient(server.url), {})


def test_a_client_sends_its_headers_and_waits_as_long_as_the_engine_may_take(server, monkeypatch):
    client = HTTPClient(server.url, headers={"Authorization": "Bearer key"})
    client.start_weight_update()
    assert (server.headers[0]["Authorization"], server.headers[0]["Content-Type"]) == ("Bearer key", "application/json")
    limits = []
    monkeypatch.setattr("urllib.request.urlopen", lambda _, timeout: limits.append(timeout) or io.BytesIO(b"{}"))
    client.init_weight_transfer_engine({"plan": "plan.refit", "timeout": 100})
    client.update_weights({"timeout": 1000, "bind": True})
    client.finish_weight_update()
    client.abandon_weight_update()
    HTTPClient(server.url).update_weights({})
    HTTPClient(server.url, 7).init_weight_transfer_engine({"timeout": 100})
    # A worker connects, binds and refits, each within its timeout. What comes after waits for that, too.
    assert limits == [3 * 100 + 120, *[3 * 1000 + 120] * 4, 60, 3 * 600 + 120, 7]


def test_an_engine_that_hangs_is_waited_for_once(server, monkeypatch):
    monkeypatch.setattr("refit.vllm_client.ABANDON_SECONDS", 0.1)
    server.delays["/update_weights"] = server.delays["/finish_weight_update"] = threading.Event()
    began = time.monotonic()
    with pytest.raises(refit.vllm.WorkerError, match="/update_weights: timed out"):
        update_by(HTTPClient(server.url, 0.2), {})
    assert time.monotonic() - began < 2
    server.delays["/update_weights"].set()


def test_a_server_is_driven_by_its_worker_extension(server):
    reply = {"rank": 1, "state": "bound", "error": ""}
    server.answers["/collective_rpc"] = (200, json.dumps({"results": [reply]}))
    client = ExtensionHTTPClient(server.url)
    client.init_weight_transfer_engine({"plan": {"base64": ""}, "meeting": "00", "timeout": 5})
    update_by(client, {"timeout": 5, "check": True}, "7")
    assert [(path, body.get("method"), body.get("args")) for path, body in server.seen] == [
        ("/collective_rpc", "refit_init", [{"base64": ""}, "00", 0, True, 5, None]),
        ("/collective_rpc", "refit_update", ["7", 5, True, False]), (ENCODER, None, None), (PREFIXES, None, None)]
    del server.seen[:]
    update_by(Clients([client, HTTPClient(server.url)]), {"timeout": 5, "check": True}, "8")
    seen = sorted((path, body.get("args", body)) for path, body in server.seen if path not in (ENCODER, PREFIXES))
    assert seen == [("/collective_rpc", ["8", 5, True, False]), ("/finish_weight_update", {"weight_version": "8"}),
                    ("/start_weight_update", {}), ("/update_weights", {"update_info": {"timeout": 5, "check": True, "version": "8"}})]
    server.answers["/collective_rpc"] = (200, json.dumps({"results": [reply, {**reply, "error": "BindError: no"}]}))
    with pytest.raises(refit.vllm.WorkerError, match="1 of 2 workers failed\n  worker 1 .bound.: BindError: no"):
        update_by(client, {"timeout": 5})


def test_a_server_says_that_its_workers_hang_before_its_client_gives_up(server, monkeypatch):
    found = []

    def urlopen(request, timeout):
        found.append((timeout, json.loads(request.data)["timeout"]))
        return io.BytesIO(b'{"results": []}')

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    for own in (None, 7):
        ExtensionHTTPClient(server.url, own).update_weights({"timeout": 100})
    ExtensionHTTPClient(server.url).update_weights({"timeout": 1e300})
    limit = 3 * 100 + 120
    assert found[:2] == [(limit + 60, limit), (7, limit)]
    assert found[2][0] == found[2][1] + 60 == threading.TIMEOUT_MAX


def test_a_server_tells_the_destination_of_a_job(server):
    config = {"parallel_config": {"tensor_parallel_size": 2}, "model_config": {"dtype": "bfloat16"}}
    server.answers |= {"/server_info?config_format=json": (200, json.dumps({"vllm_config": config})), "/version": (200, '{"version": "0.33.0"}')}
    assert HTTPClient(server.url).destination() == {"layout": "vllm", "version": "0.33", "dtype": "bf16", "tensor_parallel": 2}


@pytest.mark.parametrize("placements, experts", [([], {}), (["linear"], {}), (["linear or round_robin"], {}),
                                                 (["round_robin"], {"experts": {"placement": "round_robin"}})])
def test_an_engines_destination_places_experts_as_its_workers_do(monkeypatch, placements, experts):
    facts = {"vllm": "0.33.0", "tensor_parallel": 2, "pipeline_parallel": 1, "data_parallel": 1, "expert_parallel": True, "dtype": "bfloat16",
             "moe_backends": ["TRITON"], "expert_placements": placements}
    monkeypatch.setattr(refit.vllm, "facts", lambda llm: [facts])
    assert refit.vllm.destination(None) == {"layout": "vllm", "version": "0.33", "dtype": "bf16", "tensor_parallel": 2, "expert_parallel": True,
                                            **experts}


class Engine:
    """A server whose worker is vLLM's: it refuses a second beginning, and an end without one, unless Refit's backend owns them."""

    def __init__(self, owned=True, **failures):
        class Worker:
            _weight_update_active = False
            weight_transfer_engine = self
            target = "model"  # what an update writes

            def start_weight_update(worker):
                if worker._weight_update_active:
                    raise RuntimeError("start_weight_update called while a weight update is already active")
                worker._weight_update_active = True

            def start_draft_weight_update(worker):
                Worker.begin(worker)
                worker.target = "draft"

            def finish_weight_update(worker):
                if not worker._weight_update_active:
                    raise RuntimeError("finish_weight_update called without a matching start_weight_update")
                worker._weight_update_active, worker.target = False, "model"

            begin = start_weight_update

        vllm_worker.own_updates(Worker, Engine if owned else Llm)
        self.worker, self.failures, self.calls = Worker(), failures, []

    def _do(self, name, call=lambda: None):
        self.calls.append(name)
        if name in self.failures:
            self.failures[name]()
        call()

    def start_weight_update(self):
        self._do("start", self.worker.start_weight_update)

    def update_weights(self, update_info):
        self._do("update")

    def finish_weight_update(self):
        self._do("finish", self.worker.finish_weight_update)


def gone():
    raise ConnectionRefusedError("the server is gone")


@pytest.mark.parametrize("owned", [True, False])
def test_an_engine_that_began_an_update_ends_it_if_another_could_not_begin(owned):
    left, lost = Engine(owned), Engine(owned, start=gone, finish=gone)
    with pytest.raises(RuntimeError, match="1 of 2 engines failed\n  engine 1: ConnectionRefusedError: the server is gone"):
        update_by(Clients([left, lost]), {})
    update_by(Clients([left]), {})
    assert left.calls == ["start", "finish"] + ["start", "update", "finish"]


def test_an_engine_ends_a_failed_update_after_its_part_of_it_and_before_the_next():
    let_go = threading.Event()
    slow, failing = Engine(update=let_go.wait), Engine(update=gone)
    clients = Clients([slow, failing])
    with pytest.raises(RuntimeError, match="engine 1: ConnectionRefusedError"):
        update_by(clients, {})
    assert slow.calls == ["start", "update"]  # its end is not waited for: its part may need the caller
    let_go.set()
    failing.failures.clear()
    update_by(clients, {})
    assert slow.calls == failing.calls == ["start", "update", "finish"] * 2


def test_an_engine_whose_driver_went_away_takes_the_next_ones_update():
    engine = Engine()
    engine.start_weight_update()
    update_by(engine, {})
    assert not engine.worker._weight_update_active
    engine.finish_weight_update()  # nothing to end
    for begin in (engine.worker.start_draft_weight_update, engine.worker.start_draft_weight_update, engine.start_weight_update):
        begin()  # each after a draft session or an update that nobody ended
    assert engine.worker.target == "model"
    other = Engine(owned=False)  # of another backend
    other.start_weight_update()
    with pytest.raises(RuntimeError, match="already active"):
        other.start_weight_update()


def test_a_client_without_weight_versions_tells_workers_alone():
    calls = []
    client = types.SimpleNamespace(start_weight_update=lambda: calls.append("start"), update_weights=calls.append,
                                   finish_weight_update=lambda: calls.append("finish"))
    update_by(client, {"check": False}, "7")
    update_by(Clients([client]), {"check": False}, "7")
    assert calls == ["start", {"check": False, "version": "7"}, "finish"] * 2
