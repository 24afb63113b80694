#!/usr/bin/env python3
"""refit.skyrl with SkyRL's own classes: two policy workers, and two engines behind vLLM's own HTTP routes, meet over UCX.

usage: skyrl_test.py      (skyrl.sh installs what it needs)

Real: SkyRL's configuration, policy worker, its broadcast_to_inference_engines, its client of the engines, the weight extractor's and
sender's interfaces; vLLM's routes; refit's worker extension. Stand-ins: Ray, vLLM's engine around its worker, kernels.
"""

import asyncio
import contextlib
import importlib
import importlib.metadata
import os
import socket
import sys
import tempfile
import threading
import time
import types
import typing
import warnings

import typing_extensions

warnings.filterwarnings("ignore")
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict  # pydantic's wish, for the TypedDicts of SkyRL

import kernel_stand_ins

kernel_stand_ins.PACKAGES = {"flash_attn": "2.8.3"}

import fastapi
import torch
import uvicorn
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
from skyrl.backends.skyrl_train.weight_sync import WeightExtractor, WeightTransferSender
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
from skyrl.train.entrypoints.main_base import BasePPOExp
from trainer_worlds import (BITMAP_UPDATES, BITMAPS, DELTA_UPDATES, DELTAS, Rank, check_reports, differences, fill, module_of, plan_of,
                            sharded, told, vllm_facts, with_bitmaps)  # fmt: skip
from vllm.entrypoints.rl.online import api_router as rl_routes
from vllm.entrypoints.serve.dev.cache import api_router as cache_routes
from vllm.entrypoints.serve.dev.rpc import api_router as rpc_routes

import refit
import refit.skyrl
import refit.vllm

# SkyRL is for vLLM 0.23, which had this module elsewhere.
sys.modules.setdefault("vllm.entrypoints.openai.cli_args", importlib.import_module("vllm.entrypoints.launchers.cli_args"))
TRAINERS = ENGINES = 2


def configuration(path, *more):
    return refit.skyrl.Config.from_cli_overrides(
        ["trainer.strategy=fsdp", "trainer.placement.colocate_all=false", "trainer.policy.model.path=none", f"refit.plan={path}",
         "refit.check=true", "refit.timeout=60", *more])  # fmt: skip


def experiment(cfg):
    """SkyRL's experiment, of which only the trainer is made."""
    made = []

    class Trainer:
        def build_models(self, *workers):
            made.append(workers)

    base = {name: getattr(BasePPOExp, name) for name in ("__init__", "get_trainer")}
    BasePPOExp.__init__, BasePPOExp.get_trainer = lambda self, cfg: setattr(self, "cfg", cfg), lambda self: Trainer()
    try:
        refit.skyrl.Experiment(cfg).get_trainer().build_models("policy", "critic", "reference")
    finally:
        for name, function in base.items():
            setattr(BasePPOExp, name, function)
    (policy, critic, reference), = made
    assert (critic, reference) == ("critic", "reference")
    return policy.__ray_metadata__.modified_class


def serve_trainer(pipe, path, rank, directory, urls, bitmaps):
    """A policy worker: the class that SkyRL's trainer is given, without Ray around it."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/trainers", rank=rank, world_size=TRAINERS)
    cfg, plan = configuration(path), refit.Plan.load(path)
    policy = experiment(cfg)
    assert issubclass(policy, FSDPPolicyWorkerBase)
    worker = object.__new__(policy)
    shards = module_of(plan, rank)
    if bitmaps:
        with_bitmaps(shards)
    worker.cfg, worker._is_lora = cfg.trainer, False
    worker.model = types.SimpleNamespace(model=sharded(shards, [0, 1]))
    client = RemoteInferenceClient(proxy_url=urls[0], server_urls=urls, data_parallel_size=1)
    engine = cfg.generator.inference_engine

    async def call(method):
        try:
            return await getattr(worker, method)(client, engine)
        finally:
            await client.aclose()

    for command, step in iter(pipe.recv, None):
        if command == "report":
            result = worker._weight_transfer_sender.delta_report
        elif command == "ask_dense":
            result = worker._weight_transfer_sender.ask_dense()
        elif command == "init":
            result = told(lambda: asyncio.run(call("init_weight_sync_state")))
            worker._weight_transfer_sender._device = "cpu"
            assert isinstance(worker._weight_transfer_sender, WeightTransferSender) and isinstance(worker.weight_extractor, WeightExtractor)
        else:
            if command == "move":
                shards = module_of(plan, rank)
                worker.model.model = sharded(shards, [0, 1])
                worker.weight_extractor = refit.skyrl.LiveExtractor(worker.model.model)
            fill(shards, rank, step)
            barrier = torch.distributed.barrier  # SkyRL's workers meet at the end; one that failed is not there
            torch.distributed.barrier = lambda: None
            result = told(lambda: asyncio.run(call("broadcast_to_inference_engines")))
            torch.distributed.barrier = barrier
        pipe.send(result)


class Engine:
    """vLLM's engine as its routes see it, with one worker."""

    def __init__(self, plan, number):
        self.worker = refit.vllm.WorkerExtension()
        self.worker.vllm_config, self.worker.device, self.worker.rank = vllm_facts(), "cpu", 0
        self.worker.model_runner = types.SimpleNamespace(model=module_of(plan, TRAINERS + number))
        self.resets = self.refits_at_encoder_reset = 0

    async def collective_rpc(self, method, timeout, args, kwargs):
        return [await asyncio.to_thread(getattr(self.worker, method), *args, **kwargs)]

    async def reset_prefix_cache(self, *_, **__):
        self.resets += 1
        return True

    async def reset_encoder_cache(self):
        self.refits_at_encoder_reset = self.worker._refit.refits


def serve_engine(pipe, path, number):
    plan = refit.Plan.load(path)
    engine = Engine(plan, number)
    app = fastapi.FastAPI()
    for routes in (rpc_routes, cache_routes, rl_routes):
        app.include_router(routes.router)
    app.state.engine_client = engine
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    threading.Thread(target=server.run, args=([listening],), daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    pipe.send("http://127.0.0.1:%d" % listening.getsockname()[1])
    for step, in iter(pipe.recv, None):
        pipe.send((differences(plan, engine.worker.model_runner.model, TRAINERS + number, step), engine.resets,
                   engine.refits_at_encoder_reset))


def on_all(ranks, *messages):
    for rank, message in zip(ranks, messages if len(messages) > 1 else messages * len(ranks)):
        rank.tell(*message)
    return [rank.answer() for rank in ranks]


@contextlib.contextmanager
def world(path, bitmaps=False):
    with tempfile.TemporaryDirectory(prefix="refit-") as directory:
        engines = [Rank(serve_engine, path, number) for number in range(ENGINES)]
        urls = [engine.answer() for engine in engines]
        trainers = [Rank(serve_trainer, path, rank, directory, urls, bitmaps) for rank in range(TRAINERS)]
        yield trainers, engines
        for rank in trainers + engines:
            rank.close()


def refused(cfg, wanted, **more):
    """Whether a policy worker of this configuration refuses to begin."""
    worker = object.__new__(refit.skyrl.policy_worker(cfg.refit).__ray_metadata__.modified_class)
    worker.cfg, worker._is_lora = cfg.trainer, cfg.trainer.policy.model.lora.rank > 0
    error = told(lambda: asyncio.run(worker.init_weight_sync_state(None, cfg.generator.inference_engine)))
    assert error is not None and wanted in error, error


def run(path):
    plan_of(TRAINERS, replicas=ENGINES).save(path)
    cfg = configuration(path)
    refused(cfg, "engine_init_kwargs.worker_extension_cls is None; wanted \"refit.vllm.WorkerExtension\"")
    refused(configuration(path, "trainer.placement.colocate_all=true"), "set trainer.placement.colocate_all=false")
    refused(configuration(path, "trainer.policy.model.lora.rank=8"), "set trainer.policy.model.lora.rank=0")
    assert "refit.plan is not set" in told(lambda: experiment(configuration("")))
    assert 'trainer.strategy is "megatron"' in told(lambda: experiment(configuration(path, "trainer.strategy=megatron")))
    experiment(cfg)
    assert build_vllm_cli_args(cfg).worker_extension_cls == "refit.vllm.WorkerExtension"

    with world(path) as (trainers, engines):
        assert on_all(trainers, ("init", None)) == [None, None]
        for step in (1, 2):
            answers = on_all(trainers, ("update", step))
            assert answers == [None, None], answers
            assert on_all(engines, (step,)) == [([], step, step)] * ENGINES
        # An update that fails is told on all ranks, and the next one succeeds.
        answers = on_all(trainers, ("update", 3), ("move", 3))
        assert "more tensors are at other addresses than at the first update" in answers[1], answers
        assert "the engine: WorkerError: 2 of 2 workers failed" in answers[0], answers
        answers = on_all(trainers, ("update", 4))
        assert answers == [None, None], answers
        assert [wrong for wrong, *_ in on_all(engines, (4,))] == [[], []]
    for options, updates in ((DELTAS, DELTA_UPDATES), (BITMAPS, BITMAP_UPDATES)):
        plan_of(TRAINERS, options, replicas=ENGINES).save(path)
        with world(path, options is BITMAPS) as (trainers, engines):
            assert on_all(trainers, ("init", None)) == [None, None]
            for update in updates:
                step, dense, *_ = update
                if dense:
                    on_all(trainers[-1:], ("ask_dense", None))
                answers = on_all(trainers, ("update", step))
                assert answers == [None, None], answers
                assert [wrong for wrong, *_ in on_all(engines, (step,))] == [[], []]
                check_reports(on_all(trainers, ("report", None)), update)
    # Nobody waits for ranks of a plan that SkyRL does not start.
    for trained, replicas, wanted in (
            (TRAINERS, ENGINES + 1, f"the plan has {ENGINES + 1} destination ranks; engines that join: {ENGINES}, of 1 each"),
            (TRAINERS + 1, ENGINES, f"SkyRL has {TRAINERS} policy workers; the plan has {TRAINERS + 1} source ranks")):
        plan_of(trained, replicas=replicas).save(path)
        with world(path) as (trainers, engines):
            on_all(trainers, ("init", None))
            began = time.monotonic()
            answers = on_all(trainers, ("update", 1))
            assert all(wanted in answer for answer in answers), answers
            assert time.monotonic() - began < 10, answers
    print(f"| SkyRL {importlib.metadata.version('skyrl')} | 2 FSDP2 trainers, 2 engines of vLLM | 4 updates, one of which fails; 8 with deltas, 3 with bitmaps | equal |")


def main():
    with tempfile.TemporaryDirectory(prefix="refit-") as directory:
        run(os.path.join(directory, "plan.refit"))


if __name__ == "__main__":
    sys.exit(main())
