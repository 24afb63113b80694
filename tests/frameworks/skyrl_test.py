#!/usr/bin/env python3
"""refit.skyrl with SkyRL's own classes: two policy workers, and two engines behind vLLM's own HTTP routes, meet over UCX.

usage: skyrl_test.py      (skyrl.sh installs what it needs)

Real: SkyRL's configuration, policy worker, its init of weight sync and broadcast_to_inference_engines, its clients of the engines, the
capabilities that it asks of an engine; vLLM's routes and the weight updates of its worker; refit's weight-transfer backend. Stand-ins:
Ray, vLLM's engine around its worker, kernels, and Megatron, whose model chunks are FSDP's here.
"""

import asyncio
import contextlib
import dataclasses
import enum
import importlib.metadata
import os
import pathlib
import socket
import sys
import tempfile
import threading
import time
import types
import warnings

warnings.filterwarnings("ignore")
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
import skyrl_cpu

skyrl_cpu.stand_in()

import fastapi
import skyrl
import torch
import uvicorn
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
from skyrl.backends.skyrl_train.weight_sync.weight_senders import SkyrlTrainerCapabilities, teardown_engine
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
from skyrl.train.entrypoints.main_base import BasePPOExp
from trainer_worlds import (BITMAP_UPDATES, BITMAPS, CONFIG, DELTA_UPDATES, DELTAS, Rank, check_reports, differences, fill, module_of, plan_of,
                            sharded, told, vllm_facts, with_bitmaps)  # fmt: skip
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.rl.online import api_router as rl_routes
from vllm.entrypoints.serve.dev.cache import api_router as cache_routes
from vllm.v1.worker.gpu_worker import Worker

import refit
import refit.skyrl
import refit.vllm
import refit.vllm_weight_transfer

TRAINERS = ENGINES = 2


def configuration(path, *more):
    """`path`: the plan's, and settings behind it."""
    path, *settings = path.split(" ")
    return refit.skyrl.Config.from_cli_overrides(
        ["trainer.strategy=fsdp", "trainer.placement.colocate_all=false", f"trainer.policy.model.path={os.getcwd()}", f"refit.plan={path}",
         "refit.check=true", "refit.timeout=60", *settings, *more])  # fmt: skip


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
    return policy if isinstance(policy, str) else policy.__ray_metadata__.modified_class


def serve_trainer(pipe, path, rank, directory, urls, bitmaps, strategy):
    """A policy worker: the class that SkyRL's trainer is given, without Ray around it."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/trainers", rank=rank, world_size=TRAINERS)
    cfg, plan = configuration(path), refit.Plan.load(path.split(" ")[0])
    policy = experiment(cfg)
    assert issubclass(policy, FSDPPolicyWorkerBase)
    worker = object.__new__(policy)
    shards = module_of(plan, rank)
    if bitmaps:
        with_bitmaps(shards)
    worker.cfg, worker._is_lora, worker.refit_device = cfg.trainer, False, "cpu"

    def hold(module):
        module.config = types.SimpleNamespace(to_dict=CONFIG.copy)
        worker.model = types.SimpleNamespace(model=None if strategy == "megatron" else module)
        worker.actor_module = [module] if strategy == "megatron" else None

    hold(sharded(shards, [0, 1]))
    if strategy == "megatron":
        worker.broadcast_to_inference_engines = worker._sync_weights_to_inference_engines  # as its worker does without LoRA
    client = RemoteInferenceClient(proxy_url=urls[0], server_urls=urls, data_parallel_size=1)
    engine = cfg.generator.inference_engine

    async def call(method):
        try:
            return await getattr(worker, method)(client, engine)
        finally:
            await client.aclose()

    for command, step in iter(pipe.recv, None):
        if command == "report":
            result = worker._weight_sync_engine.delta_report
        elif command == "ask_dense":
            result = worker._weight_sync_engine.ask_dense()
        elif command in ("init", "init without a plan", "init without engines"):
            options, world_size = worker.refit_options, client.get_world_size
            if command == "init without a plan":
                worker.refit_options = dataclasses.replace(options, plan="/nowhere")
            if command == "init without engines":
                client.get_world_size = no_engines
            result = told(lambda: asyncio.run(call("init_weight_sync_state")))
            worker.refit_options, client.get_world_size = options, world_size
            if result is None:
                transfer = worker._weight_sync_engine
                assert isinstance(transfer, SkyrlTrainerCapabilities)
                assert isinstance(transfer, refit.vllm_weight_transfer.RefitTrainerWeightTransferEngine)
                # What SkyRL's worker reads of it.
                assert (transfer.skyrl_handles_prefix_cache_reset, transfer.skyrl_force_disable_expandable_segments,
                        transfer.skyrl_empty_cache_after_send, transfer.skyrl_draft_source) == (False, False, False, None)
        else:
            if command == "move":  # as an offload to the CPU and back does
                for tensor in shards.parameters():
                    tensor.data = tensor.data.clone()
                hold(sharded(shards, [0, 1]))
            if command == "lose":
                hold(torch.nn.Linear(2, 2))
            if command == "break":
                worker._weight_sync_engine.source.take_local = no_shards
            fill(shards, rank, step)
            result = told(lambda: asyncio.run(call("broadcast_to_inference_engines")))
            if command == "lose":
                hold(sharded(shards, [0, 1]))
            if command == "break":
                del worker._weight_sync_engine.source.take_local
        pipe.send(result)
    if "_weight_sync_engine" in vars(worker):
        teardown_engine(worker._weight_sync_engine)


def parts_of(whole):
    """A worker's model and its draft model, which shares the embedding and the head, or None; of a module with the plan's names."""
    parts = {"model": torch.nn.Module(), "draft": torch.nn.Module()}
    named = dict(whole.named_parameters())
    drafts = any(name.startswith("mtp.") for name in named)
    for name, parameter in named.items():
        shared = name in ("model.embed_tokens.weight", "lm_head.weight")
        of_draft = name.startswith("mtp.")
        for part, own in (("model", None if of_draft else name),
                          ("draft", name.replace("mtp.", "model.", 1) if of_draft else name if shared else None)):
            if own is not None:
                *path, leaf = own.split(".")
                inner = parts[part]
                for step in path:
                    if step not in inner._modules:
                        inner.add_module(step, torch.nn.Module())
                    inner = inner._modules[step]
                inner.register_parameter(leaf, parameter)
    return parts["model"], parts["draft"] if drafts else None


async def no_engines():
    raise refit.Unavailable("no engine answers")


def no_shards():
    raise refit.FailedPrecondition("no such shard")


class Engine:
    """vLLM's engine as its routes see it, with one worker, which has vLLM's own weight updates."""

    def __init__(self, plan, number):
        self.worker = worker = object.__new__(Worker)
        self.vllm_config = worker.vllm_config = vllm_facts()
        self.vllm_config.parallel_config.world_size_across_dp = 1
        worker.parallel_config, worker.device, worker.rank = worker.vllm_config.parallel_config, torch.device("cpu"), 0
        self.whole = module_of(plan, TRAINERS + number)
        self.model, draft = parts_of(self.whole)
        self.model.quant_method = types.SimpleNamespace(unquantized_backend=enum.Enum("Backend", ["TRITON"]).TRITON)  # as vLLM's experts
        worker.model_runner = types.SimpleNamespace(model=self.model, get_model=lambda: self.model, reset_lora_state=lambda: None,
                                                    get_draft_model=lambda: draft)
        worker.speculative_config = worker.vllm_config.speculative_config = None if draft is None else types.SimpleNamespace(draft_model_config="the drafter's")
        worker._weight_update_active = worker._weight_update_is_draft = False
        worker.weight_transfer_engine = refit.vllm_weight_transfer.RefitWeightTransferEngine(None, worker.vllm_config, "cpu", self.model)
        self.resets = self.refits_at_encoder_reset = 0
        self.drop_the_next = False

    async def init_weight_transfer_engine(self, request):
        await asyncio.to_thread(self.worker.init_weight_transfer_engine, request.init_info)

    async def start_weight_update(self):
        self.worker.start_weight_update()

    async def start_draft_weight_update(self):
        self.worker.start_draft_weight_update()

    async def update_weights(self, request):
        await asyncio.to_thread(self.worker.update_weights, request.update_info)

    async def finish_weight_update(self, weight_version=None):
        self.worker.finish_weight_update()

    async def reset_prefix_cache(self, *_, **__):
        self.resets += 1
        return True

    async def reset_encoder_cache(self):
        executor = self.worker.weight_transfer_engine.executor
        self.refits_at_encoder_reset = 0 if executor is None else executor.refits


def serve_engine(pipe, path, number):
    torch.accelerator.synchronize = lambda: None
    plan = refit.Plan.load(path.split(" ")[0])
    engine = Engine(plan, number)
    app = fastapi.FastAPI()

    @app.exception_handler(Exception)
    async def error(_, failed):  # as vLLM's server answers
        return fastapi.responses.JSONResponse({"error": {"message": str(failed)}}, 500)

    for routes in (cache_routes, rl_routes):
        app.include_router(routes.router)
    app.state.engine_client = engine
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    threading.Thread(target=server.run, args=([listening],), daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    pipe.send("http://127.0.0.1:%d" % listening.getsockname()[1])
    for command, step in iter(pipe.recv, None):
        if command == "move":  # as sleep and wake-up do
            for tensor in engine.whole.parameters():
                tensor.data = torch.zeros_like(tensor.data)
            pipe.send(None)
            continue
        pipe.send((differences(plan, engine.whole, TRAINERS + number, step), engine.resets, engine.refits_at_encoder_reset))


def on_all(ranks, *messages):
    for rank, message in zip(ranks, messages if len(messages) > 1 else messages * len(ranks)):
        rank.tell(*message)
    return [rank.answer() for rank in ranks]


@contextlib.contextmanager
def world(path, bitmaps=False, strategy="fsdp"):
    with tempfile.TemporaryDirectory(prefix="refit-") as directory:
        engines = [Rank(serve_engine, path, number) for number in range(ENGINES)]
        urls = [engine.answer() for engine in engines]
        trainers = [Rank(serve_trainer, path, rank, directory, urls, bitmaps, strategy) for rank in range(TRAINERS)]
        yield trainers, engines
        for rank in trainers + engines:
            rank.close()


def refused(path, wanted, *settings):
    """Whether an experiment of this configuration, and a policy worker of it, refuse to begin."""
    cfg = configuration(path, *settings)
    worker = object.__new__(refit.skyrl.policy_worker(cfg.refit).__ray_metadata__.modified_class)
    worker.cfg = cfg.trainer
    for action in (lambda: refit.skyrl.Experiment(cfg),
                   lambda: asyncio.run(worker.init_weight_sync_state(None, cfg.generator.inference_engine))):
        error = told(action)
        assert isinstance(error, str) and wanted in error, error


def mistakes_are_told_before_anything_starts(path):
    for wanted, *settings in (
            ("set trainer.placement.colocate_all=false", "trainer.placement.colocate_all=true"),
            ("set trainer.policy.model.lora.rank=0", "trainer.policy.model.lora.rank=8"),
            ("weight_sync_backend=nccl", "generator.inference_engine.weight_sync_backend=sharded_rdt"),
            ("set generator.inference_engine.enable_pd=false", "generator.inference_engine.enable_pd=true"),
            ("set generator.inference_engine.offload_kv_for_weight_sync=false",
             "generator.inference_engine.offload_kv_for_weight_sync=true", "trainer.fully_async.enabled=true"),
            ('trainer.strategy is "jax"; refit.skyrl has policy workers for fsdp and megatron', "trainer.strategy=jax")):
        refused(path, wanted, *settings)
    # All at once.
    cfg = configuration(path, "trainer.placement.colocate_all=true", "trainer.policy.model.lora.rank=8", "trainer.strategy=jax")
    assert len(refit.skyrl.refusals(cfg.trainer, cfg.generator.inference_engine)) == 3
    assert experiment(configuration(path, "trainer.policy.model.lora.rank=8", "refit.on_refusal=framework")) == "policy"  # SkyRL's own
    assert 'on_refusal is "' in told(lambda: experiment(configuration(path, "trainer.strategy=jax", "refit.on_refusal=nccl"))).replace("'", '"')
    assert "refit.plan is not set" in told(lambda: experiment(configuration("")))
    cfg = configuration(path)
    experiment(cfg)
    arguments = AsyncEngineArgs.from_cli_args(build_vllm_cli_args(cfg))
    assert arguments.weight_transfer_config.backend == "refit", arguments.weight_transfer_config
    assert arguments.worker_extension_cls.endswith(".NewInferenceWorkerWrap")  # SkyRL's own
    payloads = refit.skyrl.engine_payloads({"plan": "p"}, ["a", "b", "c", "d"], 2)
    assert [(payload["plan"], payload["engine"], payload["engines"]) for payload in payloads] == [("p", number, 2) for number in (0, 0, 1, 1)]
    # SkyRL's worker of the other strategy needs Megatron.
    workers = types.ModuleType("skyrl.backends.skyrl_train.workers.megatron.megatron_worker")
    workers.MegatronPolicyWorkerBase = type("MegatronPolicyWorkerBase", (), {})
    sys.modules[workers.__name__] = workers
    order = experiment(configuration(path, "trainer.strategy=megatron")).mro()
    assert order.index(refit.skyrl.LiveShards) < order.index(workers.MegatronPolicyWorkerBase)
    source = pathlib.Path(skyrl.__path__[0], "backends/skyrl_train/workers/megatron/megatron_worker.py").read_text()
    assert "class MegatronPolicyWorkerBase(" in source and "self.actor_module" in source


def updates(path):
    for strategy in ("fsdp", "megatron"):
        plan_of(TRAINERS, replicas=ENGINES).save(path)
        with world(path, strategy=strategy) as (trainers, engines):
            # What one policy worker alone fails at ends on both.
            for command, wanted in (("init without a plan", "/nowhere"), ("init without engines", "no engine answers")):
                began = time.monotonic()
                answers = on_all(trainers, ("init", None), (command, None))
                assert wanted in answers[1] and "trainer 1 failed: " in answers[0] and wanted in answers[0], answers
                assert time.monotonic() - began < 10, answers
            answers = on_all(trainers, ("init", None))
            assert answers == [None, None], answers
            for step in (1, 2):
                answers = on_all(trainers, ("update", step))
                assert answers == [None, None], answers
                assert on_all(engines, ("differences", step)) == [([], step, step)] * ENGINES
            # All bind anew where one policy worker's tensors moved: SkyRL offloads the policy beside a reference model.
            answers = on_all(trainers, ("update", 3), ("move", 3))
            assert answers == [None, None], answers
            assert on_all(engines, ("differences", 3)) == [([], 3, 3)] * ENGINES
            # One that cannot say what it holds stops the others before anything moves.
            for command, wanted in (("break", "no such shard"), ("lose", "missing")):
                answers = on_all(trainers, ("update", 4), (command, 4))
                assert wanted in answers[1], answers
                assert command != "break" or "trainer 1 failed: FailedPrecondition: no such shard" in answers[0], answers
                answers = on_all(trainers, ("update", 5))
                assert answers == [None, None], answers
                assert [wrong for wrong, *_ in on_all(engines, ("differences", 5))] == [[], []]
            # Of an engine whose weights are elsewhere the workers' error comes with that of trainer 0.
            on_all(engines[1:], ("move", None))
            answers = on_all(trainers, ("update", 6))
            assert all(answers) and "the engine: RuntimeError: Weight-sync control-plane call /update_weights" in answers[0], answers
            answers = on_all(trainers, ("update", 7))
            assert answers == [None, None], answers
            assert [wrong for wrong, *_ in on_all(engines, ("differences", 7))] == [[], []]


def updates_that_send_what_changed(path):
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
                assert [wrong for wrong, *_ in on_all(engines, ("differences", step))] == [[], []]
                check_reports(on_all(trainers, ("report", None)), update)


def a_plan_of_what_runs(path):
    plan_of(TRAINERS, replicas=ENGINES).save(path)
    folder = pathlib.Path(path).parent / "auto"
    with world(f"{path} refit.plan=auto refit.save_to={folder}") as (trainers, engines):
        assert on_all(trainers, ("init", None)) == [None, None]
        for step in (1, 2):
            answers = on_all(trainers, ("update", step))
            assert answers == [None, None], answers
            assert [wrong for wrong, *_ in on_all(engines, ("differences", step))] == [[], []]
    job = refit.Plan.load(folder / "plan.refit").job
    assert (job["source.data_parallel"], job["destination.replicas"]) == (str(TRAINERS), str(ENGINES)), job


def engines_that_sleep_before_each_update(path):
    plan_of(TRAINERS, replicas=ENGINES).save(path)
    with world(f"{path} generator.inference_engine.offload_kv_for_weight_sync=true") as (trainers, engines):
        assert on_all(trainers, ("init", None)) == [None, None]
        for step in (1, 2):
            on_all(engines, ("move", None))
            answers = on_all(trainers, ("update", step))
            assert answers == [None, None], answers
            assert [wrong for wrong, *_ in on_all(engines, ("differences", step))] == [[], []]


DRAFTED = {
    "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 2, "full_attention_interval": 2,
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "vocab_size": 256, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "norm_topk_prob": True, "attention_bias": False,
}  # fmt: skip


def drafters_are_updated_with_the_model(path):
    drafts = "generator.inference_engine.speculative_config={method: mtp}".replace(" ", "")
    for source, wanted in (({"mtp": True}, None), ({"mtp": False}, 'put "mtp": true into the job\'s source')):
        refit.compile({"model": DRAFTED, "source": {"layout": "fsdp", "data_parallel": TRAINERS, **source},
                       "destination": {"layout": "vllm", "replicas": ENGINES}}).save(path)  # fmt: skip
        with world(f"{path} {drafts}") as (trainers, engines):
            answers = on_all(trainers, ("init", None))
            assert all(answer is None if wanted is None else wanted in answer for answer in answers), answers
            for step in (1, 2) if wanted is None else ():
                answers = on_all(trainers, ("update", step))
                assert answers == [None, None], answers
                assert [wrong for wrong, *_ in on_all(engines, ("differences", step))] == [[], []]


def plans_for_other_ranks_leave_nobody_waiting(path):
    for trained, replicas in ((TRAINERS, ENGINES + 1), (TRAINERS + 1, ENGINES)):
        plan_of(trained, replicas=replicas).save(path)
        with world(path) as (trainers, _):
            began = time.monotonic()
            answers = on_all(trainers, ("init", None))
            assert all(f"SkyRL has {TRAINERS} policy workers and {ENGINES} workers of vLLM; the plan has {trained} source and {replicas} "
                       "destination ranks" in answer for answer in answers), answers
            assert time.monotonic() - began < 10, answers


def run(path):
    plan_of(TRAINERS, replicas=ENGINES).save(path)
    mistakes_are_told_before_anything_starts(path)
    updates(path)
    a_plan_of_what_runs(path)
    engines_that_sleep_before_each_update(path)
    drafters_are_updated_with_the_model(path)
    updates_that_send_what_changed(path)
    plans_for_other_ranks_leave_nobody_waiting(path)
    print(f"| SkyRL {importlib.metadata.version('skyrl')} | 2 policy workers, FSDP2 and as Megatron's chunks, 2 engines of vLLM | 9 updates of each, "
          "3 of which fail; 2 after sleep; 2 with a drafter; 8 with deltas, 3 with bitmaps | equal |")  # fmt: skip


def main():
    with tempfile.TemporaryDirectory(prefix="refit-") as directory:
        run(os.path.join(directory, "plan.refit"))


if __name__ == "__main__":
    sys.exit(main())
