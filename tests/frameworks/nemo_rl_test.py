#!/usr/bin/env python3
"""refit.nemo_rl with NeMo-RL's own classes: two policy workers and two workers of vLLM, processes that meet over UCX.

usage: nemo_rl_test.py      (nemo_rl.sh installs what it needs, and is given a checkout of NeMo-RL)

Real: NeMo-RL's reading of the configuration, its factory of synchronizers and the synchronizer, the checkpoint-engine methods of
its policy workers and of its vLLM workers, its extension of vLLM's worker; how vLLM makes a worker of a class and an extension.
Stand-ins: Ray's handles, vLLM's engine around its worker, what the worker has beside these, packages that only training needs.
"""

import asyncio
import contextlib
import inspect
import os
import sys
import tempfile
import types
import warnings
from unittest import mock

warnings.filterwarnings("ignore")
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_TARGET_DEVICE": "cpu", "GLOO_SOCKET_IFNAME": "lo",
               "HF_HUB_OFFLINE": "1"}  # fmt: skip

import nemo_rl_cpu

nemo_rl_cpu.stand_in()

import nemo_rl
import nemo_rl.weight_sync.checkpoint_engine_weight_synchronizer as synchronizers
import torch
from nemo_rl.algorithms import grpo
from nemo_rl.distributed import ray_actor_environment_registry as registry
from nemo_rl.models.generation.vllm.checkpoint_engine import VllmCheckpointEngineRpcMixin
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.workers.checkpoint_engine import PolicyCheckpointEngineMixin
from nemo_rl.weight_sync import create_weight_synchronizer
from trainer_worlds import (BITMAP_UPDATES, BITMAPS, DELTA_UPDATES, DELTAS, Rank, check_reports, differences, fill, module_of, plan_of,
                            sharded, told, vllm_facts, with_bitmaps)  # fmt: skip
from vllm.v1.worker import worker_base
from vllm.v1.worker.gpu_worker import Worker

import refit
import refit.nemo_rl

# NeMo-RL is for vLLM 0.25, whose worker did not have this method of NeMo-RL's extension.
for base in Worker.mro():
    if "synchronize_device" in vars(base):
        del base.synchronize_device
TRAINERS = ENGINES = 2
EXTENSION = "nemo_rl.models.generation.vllm.vllm_backend.VllmInternalWorkerExtensionWithCheckpointEngine"
TRANSPORT = "refit.nemo_rl:CheckpointEngine"


def generation_config(path, **more):
    return {"backend": "vllm", "colocated": {"enabled": False}, "vllm_cfg": {"async_engine": False}, "refit_transport": TRANSPORT,
            "refit_cfg": {TRANSPORT: {"plan": path, "check": True, "timeout": 60, "device": "cpu", **more}}}  # fmt: skip


def policy_worker(**attributes):
    """A policy worker of the class that NeMo-RL's Policy asks for, without Ray around it."""
    worker = object.__new__(refit.nemo_rl.DTensorPolicyWorkerV2.__ray_metadata__.modified_class)
    assert isinstance(worker, PolicyCheckpointEngineMixin)
    vars(worker).update({"cfg": {}, "cpu_offload": False, "lora_enabled": False, "rank": 0, **attributes})
    return worker


def serve_trainer(pipe, path, rank, directory, bitmaps):
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/trainers", rank=rank, world_size=TRAINERS)
    plan = refit.Plan.load(path)
    shards = module_of(plan, rank)
    if bitmaps:
        with_bitmaps(shards)
    worker = policy_worker(rank=rank, model=sharded(shards, [0, 1]))
    for command, argument in iter(pipe.recv, None):
        if command == "fill":
            pipe.send(fill(shards, rank, argument))
        elif command == "move":
            shards = module_of(plan, rank)
            worker.model = sharded(shards, [0, 1])
            pipe.send(None)
        elif command == "report":
            pipe.send(worker.checkpoint_engine.delta_report)
        elif command == "set":
            pipe.send(vars(worker).update(argument))
        else:
            pipe.send(told(lambda: asyncio.run(getattr(worker, command)(**argument))))


class Engine(VllmCheckpointEngineRpcMixin):
    """NeMo-RL's vLLM worker, whose engine has one worker; vLLM makes it of the configured classes."""

    def __init__(self, plan, number, worker_class):
        config = vllm_facts()
        config.parallel_config.worker_cls, config.parallel_config.worker_extension_cls = worker_class, EXTENSION
        config.enable_trace_function_call_for_thread = lambda: None
        model = module_of(plan, TRAINERS + number)

        def init(worker, vllm_config, **_):
            worker.vllm_config, worker.device, worker.rank = vllm_config, torch.device("cpu"), 0
            worker.model_runner = types.SimpleNamespace(model=model, vllm_config=vllm_config)

        wrapper = worker_base.WorkerWrapperBase()
        with mock.patch.object(Worker, "__init__", init), mock.patch("vllm.plugins.load_general_plugins"), \
                mock.patch.object(worker_base, "worker_receiver_cache_from_config"), \
                mock.patch.object(worker_base, "set_current_vllm_config", lambda _: contextlib.nullcontext()):  # fmt: skip
            wrapper.init_worker([{"vllm_config": config}])
        self.worker, self.model, self.llm = wrapper.worker, model, self

    def set(self, **attributes):
        vars(self.worker).update(attributes)

    def collective_rpc(self, method, args=()):
        return [getattr(self.worker, method)(*args)]


def serve_engine(pipe, path, number, directory, worker_class):
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/engine-{number}", rank=0, world_size=1)
    plan = refit.Plan.load(path)
    engine = Engine(plan, number, worker_class)
    for command, argument in iter(pipe.recv, None):
        if command == "differences":
            pipe.send(differences(plan, engine.model, TRAINERS + number, argument))
        else:
            pipe.send(told(lambda: getattr(engine, command)(**argument)))


class Group:
    """NeMo-RL's RayWorkerGroup: one answer of each worker."""

    def __init__(self, workers):
        self.workers = workers

    def run_all_workers_single_data(self, method, run_rank_0_only_axes=None, **arguments):
        return self._run(method, [arguments] * len(self.workers))

    def run_all_workers_multiple_data(self, method, run_rank_0_only_axes=None, common_kwargs=None, **arguments):
        return self._run(method, [{name: values[number] for name, values in arguments.items()} | common_kwargs
                                  for number in range(len(self.workers))])  # fmt: skip

    def _run(self, method, arguments):
        for worker, of_worker in zip(self.workers, arguments):
            worker.tell(method, of_worker)
        return [worker.answer for worker in self.workers]


def get(references):
    """Ray's. An error is the text that `told` makes of it."""
    answers = [answer() for answer in references]
    for answer in answers:
        if isinstance(answer, str):
            raise RuntimeError(answer)
    return answers


def on_all(ranks, *messages):
    for rank, message in zip(ranks, messages if len(messages) > 1 else messages * len(ranks)):
        rank.tell(*message)
    return [rank.answer() for rank in ranks]


@contextlib.contextmanager
def world(path, bitmaps=False, worker_class="refit.nemo_rl.VllmWorker", **options):
    """The workers, and the synchronizer that NeMo-RL's factory makes of the configuration."""
    with tempfile.TemporaryDirectory(prefix="refit-") as directory:
        trainers = [Rank(serve_trainer, path, rank, directory, bitmaps) for rank in range(TRAINERS)]
        engines = [Rank(serve_engine, path, number, directory, worker_class) for number in range(ENGINES)]
        policy = types.SimpleNamespace(worker_group=Group(trainers), prepare_refit_info=dict)
        generation = types.SimpleNamespace(worker_group=Group(engines), prepare_refit_info=lambda _: None, dp_size=ENGINES,
                                           cfg=generation_config(path, **options))  # fmt: skip
        yield trainers, engines, create_weight_synchronizer(policy, generation, "vllm", colocated=False)
        for rank in trainers + engines:
            rank.close()


def update(ranks, synchronizer, step):
    trainers, engines = ranks
    on_all(trainers, ("fill", step))
    synchronizer.sync_weights()
    assert not synchronizer.is_stale
    assert on_all(engines, ("differences", step)) == [[], []]


def fails(action):
    """What is said of it."""
    answer = told(action)
    assert isinstance(answer, str), answer
    return answer


def updates(path):
    with world(path) as (*ranks, synchronizer):
        synchronizer.init_communicator()
        for step in (1, 2):
            update(ranks, synchronizer, step)
        # An update that fails is told, and the next one succeeds once the synchronizer was shut down.
        trainers, _ = ranks
        on_all(trainers[1:], ("move", None))
        on_all(trainers, ("fill", 3))
        answers = [reference() for reference in synchronizer._run_policy("send_weights_via_checkpoint_engine")
                   + synchronizer._run_generation("update_weights_from_checkpoint_engine")]  # fmt: skip
        assert "no phase may move the policy to the CPU" in answers[1], answers
        assert all("WorkerError: 1 of 1 workers failed" in answer for answer in answers[TRAINERS:]), answers
        assert "the last update failed" in fails(synchronizer.sync_weights)
        synchronizer.shutdown()
        update(ranks, synchronizer, 4)
        # What a policy worker refuses while the others are under way they hear at once.
        answers = [reference() for reference in synchronizer._run_policy("send_weights_via_checkpoint_engine", kv_scales={})
                   + synchronizer._run_generation("update_weights_from_checkpoint_engine")]  # fmt: skip
        assert all("Refit moves weights" in answer for answer in answers[:TRAINERS]), answers
        assert all("WorkerError: 1 of 1 workers failed" in answer and "DeadlineExceeded" not in answer
                   for answer in answers[TRAINERS:]), answers  # fmt: skip
    # All meet anew at each.
    with world(path, release_after_refit=True) as (*ranks, synchronizer):
        for step in (1, 2):
            update(ranks, synchronizer, step)


def updates_with_deltas(path):
    for options, steps in ((DELTAS, DELTA_UPDATES), (BITMAPS, BITMAP_UPDATES)):
        plan_of(TRAINERS, options, replicas=ENGINES).save(path)
        with world(path, options is BITMAPS) as (trainers, engines, synchronizer):
            synchronizer.init_communicator()
            for of_update in steps:
                step, dense, *_ = of_update
                if dense:
                    get(synchronizer._run_policy("ask_dense"))
                update((trainers, engines), synchronizer, step)
                check_reports(on_all(trainers, ("report", None)), of_update)


def mistakes_are_told_before_the_first_update(path):
    wanted = 'wanted policy.generation.vllm_kwargs.worker_cls "refit.nemo_rl.VllmWorker"'
    with world(path, worker_class="vllm.v1.worker.gpu_worker.Worker") as (*_, synchronizer):
        assert wanted in fails(synchronizer.init_communicator)
    for attributes, wanted in (({"cpu_offload": True}, "set policy.dtensor_cfg.cpu_offload=false"),
                               ({"lora_enabled": True}, "switch LoRA off"),
                               ({"cfg": {"megatron_cfg": {"peft": {"enabled": True}}}}, "switch LoRA off"),
                               ({"cfg": {"megatron_cfg": {"enabled": True, "fp8_cfg": {"enabled": True, "fp8_param": True}}}},
                                "set policy.megatron_cfg.fp8_cfg.fp8_param=false"),
                               ({"cfg": {"draft": {"enabled": True}}}, "set policy.draft.enabled=false"),
                               ({"cfg": {"quant_cfg": "NVFP4_DEFAULT_CFG"}}, "set policy.quant_cfg=null"),
                               ({"cfg": {"generation": {"vllm_cfg": {"kv_cache_dtype": "fp8_e4m3"}}}},
                                "set policy.generation.vllm_cfg.kv_cache_dtype=auto")):  # fmt: skip
        with world(path) as (trainers, _, synchronizer):
            on_all(trainers, ("set", attributes))
            assert wanted in fails(synchronizer.init_communicator)
    with world(path) as (_, engines, synchronizer):
        engines[0].tell("set", {"rank": 1})
        engines[0].answer()
        assert "NeMo-RL counts this worker as 0 of its engine's 1, vLLM as 1" in fails(synchronizer.init_communicator)
    plan_of(TRAINERS, replicas=3).save(path)
    with world(path) as (*_, synchronizer):
        assert ("NeMo-RL has 2 policy workers and 2 workers of vLLM; the plan has 2 source and 3 destination ranks"
                in fails(synchronizer.init_communicator))  # fmt: skip


def policies_have_workers_that_yield_live_shards():
    assert {"policy_factory"} <= inspect.signature(grpo.setup).parameters.keys()
    assert {"config", "worker_extension_cls_fqn"} <= inspect.signature(Policy.__init__).parameters.keys()
    for config, module, name in (({"dtensor_cfg": {"enabled": True, "_v2": True}}, "dtensor_policy_worker_v2", "DTensorPolicyWorkerV2"),
                                 ({"dtensor_cfg": {"enabled": True}}, "dtensor_policy_worker", "DTensorPolicyWorker"),
                                 ({"megatron_cfg": {"enabled": True}}, "megatron_policy_worker", "MegatronPolicyWorker")):
        asked = refit.nemo_rl.policy(lambda **options: options, config=config, cluster="c")
        assert asked == {"config": config, "cluster": "c", "worker_extension_cls_fqn": f"refit.nemo_rl.{name}"}, asked
        assert registry.get_actor_python_env(f"refit.nemo_rl.{name}") == registry.get_actor_python_env(
            f"nemo_rl.models.policy.workers.{module}.{name}")
        worker = getattr(refit.nemo_rl, name).__ray_metadata__.modified_class
        theirs = getattr(sys.modules[f"nemo_rl.models.policy.workers.{module}"], f"{name}Impl")
        order = worker.mro()
        assert order.index(refit.nemo_rl.LiveShards) < order.index(theirs) < order.index(PolicyCheckpointEngineMixin)


def policies_that_train_quantization_are_refused():
    assert "set policy.quant_cfg=null" in fails(lambda: refit.nemo_rl.policy(
        dict, config={"dtensor_cfg": {"enabled": True}, "quant_cfg": "NVFP4_DEFAULT_CFG"}))


def megatron_workers_gather_what_the_optimizer_left_to_the_next_forward_pass():
    """With overlap_param_gather. Megatron's DDP is a stand-in here, as megatron_training_test.py has it real."""

    class DistributedDataParallel(torch.nn.Module):
        use_forward_hook = True

        def start_param_sync(self, force_sync):
            torch.nn.init.constant_(self.module.weight, 7)

    worker = object.__new__(refit.nemo_rl.MegatronPolicyWorker.__ray_metadata__.modified_class)
    worker.model = DistributedDataParallel()
    worker.model.module = torch.nn.Linear(2, 2)
    assert (dict(worker._checkpoint_engine_weight_iterator())["weight"] == 7).all()


def main():
    synchronizers.ray = types.SimpleNamespace(get=get)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(total_memory=80 << 30)
    policies_have_workers_that_yield_live_shards()
    policies_that_train_quantization_are_refused()
    megatron_workers_gather_what_the_optimizer_left_to_the_next_forward_pass()
    with tempfile.TemporaryDirectory(prefix="refit-") as directory, contextlib.redirect_stdout(None):  # NeMo-RL tells of each update
        path = os.path.join(directory, "plan.refit")
        plan_of(TRAINERS, replicas=ENGINES).save(path)
        updates(path)
        updates_with_deltas(path)
        plan_of(TRAINERS, replicas=ENGINES).save(path)
        mistakes_are_told_before_the_first_update(path)
    print(f"| NeMo-RL {nemo_rl.__version__} | 2 FSDP2 trainers, 2 engines of vLLM | 6 updates, one of which fails; 8 with deltas, 3 with bitmaps | equal |")


if __name__ == "__main__":
    sys.exit(main())
