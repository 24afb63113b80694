#!/usr/bin/env python3
"""refit.verl in a real Ray: verl's CheckpointEngineManager updates verl's vLLM replica from verl's FSDP2 actors, on the CPU.

usage: verl_ray_test.py      (verl.sh installs what it needs)

Real: Ray; verl's configuration, resource pools, worker groups, ActorRolloutRefWorker and its engine, CheckpointEngineWorker, server adapter,
vLLMReplica and its server; vLLM's engine and workers. Stand-ins: a platform of verl for CPUs, whose devices Ray counts as GPUs; actors
make their process group before verl does, because verl's names one backend for CPUs and one more for the device; vLLM keeps weights as
loaded. No batch is trained: actors read a checkpoint's values into their shards.
"""

import asyncio
import os
import pathlib
import sys
import tempfile
import threading

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "engines")]
NODE = "127.0.0.3"  # not the address that Refit would choose
os.environ |= {"VERL_USE_EXTERNAL_MODULES": "verl_cpu,refit.verl", "VERL_PLATFORM": "cpu", "VERL_ENGINE_VENDOR": "refit",
               "VERL_ENGINE_DEVICE": "cuda", "VERL_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
               "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
               "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "RAY_DEDUP_LOGS": "0",
               "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], *sys.path[-2:]])}  # fmt: skip

import ray
import torch
import verl
import vllm_cpu
from hydra import compose, initialize_config_module
from ray.exceptions import RayActorError, RayError
from safetensors.torch import load_file
from torch.distributed.tensor import distribute_tensor
from trainer import write_checkpoint, write_tokenizer
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import get_rollout_replica_class
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

import refit

TRAINERS = WORKERS = 2
PROMPT = [5, 17, 101, 44, 9]


class Actor(ActorRolloutRefWorker):
    def __init__(self, *args, **named):
        torch.distributed.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
        super().__init__(*args, **named)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read(self, checkpoint):
        """What a training step does: writes the live shards in place."""
        values = load_file(checkpoint / "model.safetensors")
        with torch.no_grad():
            for name, parameter in self.actor.engine.module.named_parameters():
                value = values[name].to(parameter.dtype)
                parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meeting(self):
        return self.checkpoint_engine._meeting

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hang(self, rank):
        """This rank takes no part in the next update, although verl calls it."""
        async def hung(*_, **__):
            await asyncio.Event().wait()

        if torch.distributed.get_rank() == rank:
            self.checkpoint_engine.send_weights = hung


class Server(vLLMHttpServer):
    """verl 0.9.1 pauses by the argument of an older vLLM."""

    async def run_server(self, args):
        await super().run_server(args)
        pause = self.engine.pause_generation
        self.engine.pause_generation = lambda wait_for_inflight_requests, **more: pause(
            mode="wait" if wait_for_inflight_requests else "abort", **more)


def configuration(model, folder):
    """verl's own, by the options of docs/integrations/verl.md and what a CPU and a tiny model need."""
    rollout = "actor_rollout_ref.rollout."
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [
            f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.model.use_remove_padding=false",
            "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
            "actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
            f"{rollout}name=vllm", f"{rollout}tensor_model_parallel_size={WORKERS}", f"{rollout}log_prob_micro_batch_size_per_gpu=1",
            f"{rollout}free_cache_engine=false", f"+{rollout}enable_sleep_mode=false", f"{rollout}enforce_eager=true",
            f"{rollout}max_model_len=64", f"{rollout}max_num_seqs=4", f"{rollout}prompt_length=16", f"{rollout}response_length=16",
            f"{rollout}checkpoint_engine.backend=refit", f"{rollout}checkpoint_engine.custom_backend_module=refit.verl",
            f"+{rollout}checkpoint_engine.engine_kwargs.refit={{plan:auto,save_to:{folder},check:true,device:cpu,timeout:120}}",
            f"+{rollout}engine_kwargs.vllm.weight_transfer_config.backend=refit",
            f"+{rollout}engine_kwargs.vllm.worker_extension_cls=verl_ray_worker.Extension",
        ]).actor_rollout_ref  # fmt: skip


def write_model(directory, seed):
    """A checkpoint with a tokenizer, which verl's server asks for."""
    config = vllm_cpu.FAMILIES["dense"]
    write_checkpoint(directory, config, vllm_cpu.plan_of("dense"), seed)
    write_tokenizer(directory, config["vocab_size"])
    return directory


async def an_actor_dies(manager, actors, server):
    """The others are in an update, and hear of it from Refit. verl raises, and vLLM's workers answer again."""
    actors.hang(1)
    death = threading.Timer(5, ray.kill, [actors.workers[1]])
    death.start()
    try:
        await manager.update_weights(global_steps=9)
    except (refit.Error, RayError) as error:
        said, is_death = str(getattr(error, "cause", None) or error), isinstance(error, RayActorError)
    else:
        raise AssertionError("the update succeeded without one of the actors")
    death.join()
    assert is_death or "rank 1 is gone" in said, said
    await server.collective_rpc.remote("answer")
    return said.splitlines()[-1]


async def run(work):
    checkpoints = [write_model(work / name, seed) for name, seed in (("a", 1), ("b", 2), ("c", 3))]
    config = configuration(checkpoints[0], work / "auto")
    pool = RayResourcePool([TRAINERS], max_colocate_count=1)
    actors = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Actor), config=config, role="actor"), device_name="cpu")
    actors.init_model()
    replica = get_rollout_replica_class("vllm")(replica_rank=0, config=config.rollout, model_config=config.model, gpus_per_node=WORKERS)
    replica.server_class = ray.remote(Server)
    await replica.init_standalone()
    (server,) = replica.servers

    async def tokens(request):
        greedy = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
        return (await server.generate.remote(PROMPT, greedy, request)).token_ids

    manager = CheckpointEngineManager(omega_conf_to_dataclass(config.rollout.checkpoint_engine), actors, [replica])
    said, meetings = [await tokens("before")], set()
    for step, checkpoint in enumerate([*checkpoints, checkpoints[0]], 1):
        actors.read(checkpoint)
        metrics = await manager.update_weights(global_steps=step)
        assert metrics["refit/checked"] == 1 and metrics["refit/bytes"] > 0, metrics
        await server.collective_rpc.remote("compare", args=(str(checkpoint),))
        said.append(await tokens(f"step {step}"))
        meetings.add(actors.meeting()[0])
    # Each of three checkpoints says something else, and the first says the same again.
    assert len({tuple(text) for text in said[:4]}) == 4 and said[4] == said[1], said
    (meeting,) = meetings
    assert bytes([len(NODE)]) + NODE.encode() in meeting, meeting
    print(await an_actor_dies(manager, actors, server))
    print(f"| verl {verl.__version__}, ray {ray.__version__} | {TRAINERS} FSDP2 actors, vLLM TP{WORKERS} | {len(said) - 1} updates by "
          "CheckpointEngineManager | equal |")


def main():
    ray.init(num_cpus=8, num_gpus=TRAINERS + WORKERS, include_dashboard=False, _node_ip_address=NODE, log_to_driver="-v" in sys.argv)
    try:
        with tempfile.TemporaryDirectory(prefix="refit-") as work:
            asyncio.run(run(pathlib.Path(work)))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
