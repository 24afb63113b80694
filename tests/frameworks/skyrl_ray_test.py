#!/usr/bin/env python3
"""refit.skyrl in a real Ray: SkyRL's trainer updates SkyRL's vLLM servers from SkyRL's FSDP2 policy workers, on the CPU.

usage: skyrl_ray_test.py      (skyrl.sh installs what it needs)

Real: Ray; SkyRL's configuration, experiment, trainer, dispatch, placement, policy workers and their FSDP2, servers, router and client;
vLLM's engines and workers. Stand-ins: CUDA, whose devices Ray counts, flash_attn, the group of the policy workers, which is gloo's alone;
the prompts and the generator, since no batch is trained; vLLM keeps weights as loaded. Policy
workers read a checkpoint's values into their shards.
"""

import asyncio
import json
import os
import pathlib
import sys
import tempfile
import threading
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "engines")]
NODE = "127.0.0.3"  # not the address that Refit would choose
os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
               "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "RAY_DEDUP_LOGS": "0",
               "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], *sys.path[-2:]])}  # fmt: skip

import skyrl_cpu

skyrl_cpu.set_up()

import ray
import skyrl
import torch
import vllm_cpu
from ray.exceptions import RayActorError, RayError
from safetensors.torch import load_file
from torch.distributed.tensor import distribute_tensor
from trainer import write_checkpoint, write_tokenizer
from vllm_router.router_args import RouterArgs

import refit
import refit.skyrl

RouterArgs.pd_disaggregation = False  # SkyRL 0.4.0 reads it, and vllm-router 0.1.17 has it no more
POLICY_WORKERS = ENGINES = 2
PROMPT = [5, 17, 101, 44, 9]
policy_worker = refit.skyrl.policy_worker


def policy_worker_for_cpus(*arguments):
    class Actor(policy_worker(*arguments).__ray_metadata__.modified_class):
        refit_device = "cpu"

        def init_worker_process_group(self):
            torch.distributed.init_process_group("gloo")
            super().init_worker_process_group()

        def read(self, checkpoint):
            """What a training step does: writes the live shards in place."""
            values = load_file(checkpoint / "model.safetensors")
            with torch.no_grad():
                for name, parameter in self.model.model.named_parameters():
                    value = values[name].to(parameter.dtype)
                    parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None))

        def meeting(self):
            return bytes.fromhex(self._weight_sync_engine._info.meeting)

        def hang(self, rank):
            """This rank takes no part in the next update, although the others have agreed with it on one."""
            if torch.distributed.get_rank() == rank:
                self._weight_sync_engine._update = lambda *_: threading.Event().wait()

    return ray.remote(num_gpus=1)(Actor)


class Prompts(list):
    collate_fn = staticmethod(list)


class Experiment(refit.skyrl.Experiment):
    def get_train_dataset(self):
        return Prompts(["w1", "w2"])

    def get_generator(self, *_):
        return None


def configuration(model, work):
    """SkyRL's own, by the options of docs/integrations/skyrl.md and what a CPU and a tiny model need."""
    engine = "generator.inference_engine."
    return refit.skyrl.Config.from_cli_overrides([
        "refit.plan=auto", f"refit.save_to={work}/auto", "refit.check=true", "refit.timeout=120",
        "trainer.strategy=fsdp", f"trainer.policy.model.path={model}", "trainer.placement.colocate_all=false",
        f"trainer.placement.policy_num_gpus_per_node={POLICY_WORKERS}", "trainer.algorithm.use_kl_loss=false",
        "trainer.flash_attn=false", "trainer.remove_microbatch_padding=false", "trainer.gradient_checkpointing=false",
        "trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2", "trainer.eval_interval=-1", "data.dataloader.num_workers=0",
        "trainer.logger=console", "trainer.enable_ray_gpu_monitor=false", f"trainer.log_path={work}", f"trainer.ckpt_path={work}/checkpoints",
        f"trainer.export_path={work}/exports", f"{engine}num_engines={ENGINES}", f"{engine}distributed_executor_backend=mp",
        f"{engine}enable_ray_prometheus_stats=false", f"{engine}enforce_eager=true", f"{engine}max_num_seqs=4",
        f"{engine}gpu_memory_utilization=0.1",
        f"{engine}engine_init_kwargs.worker_cls=vllm.v1.worker.cpu_worker.CPUWorker",
        f"{engine}engine_init_kwargs.worker_extension_cls=skyrl_ray_worker.Extension", f"{engine}engine_init_kwargs.max_model_len=64",
    ])  # fmt: skip


def write_model(directory, seed):
    config = vllm_cpu.FAMILIES["dense"]
    write_checkpoint(directory, config, vllm_cpu.plan_of("dense"), seed)
    write_tokenizer(directory, config["vocab_size"])
    return directory


def on_workers(client, method, *arguments):
    """Calls a method of skyrl_ray_worker.Extension in the workers of each server."""
    for url in client.server_urls:
        request = urllib.request.Request(f"{url}/collective_rpc", json.dumps({"method": method, "args": arguments}).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120):
            pass


def a_policy_worker_dies(trainer, client):
    """The other is in an update, and hears of it from Refit. SkyRL raises, and vLLM's workers answer again."""
    actors = [info.handle for info in trainer.policy_model.actor_infos]
    ray.get([actor.hang.remote(1) for actor in actors])
    death = threading.Timer(5, ray.kill, [actors[1]])
    death.start()
    try:
        asyncio.run(trainer.dispatch.save_weights_for_sampler())
    except (refit.Error, RayError) as error:
        said, is_death = str(getattr(error, "cause", None) or error), isinstance(error, RayActorError)
    else:
        raise AssertionError("the update succeeded without one of the policy workers")
    death.join()
    assert is_death or "rank 1 is gone" in said, said
    on_workers(client, "answer")
    return said.splitlines()[-1]


def run(work):
    checkpoints = [write_model(work / name, seed) for name, seed in (("a", 1), ("b", 2), ("c", 3))]
    refit.skyrl.policy_worker = policy_worker_for_cpus
    experiment = Experiment(configuration(checkpoints[0], work))  # holds the servers' actors
    trainer = experiment._setup_trainer()
    client, actors = trainer.inference_engine_client, trainer.policy_model

    def on_actors(method, *arguments):
        return ray.get(actors.async_run_ray_method("pass_through", method, *arguments))

    def tokens():
        async def generated():
            try:
                return await client.generate({"prompt_token_ids": [PROMPT] * (4 * ENGINES), "sampling_params": {
                    "temperature": 0.0, "max_tokens": 12, "ignore_eos": True}})
            finally:
                await client.aclose()

        answers = {tuple(answer) for answer in asyncio.run(generated())["response_ids"]}
        assert len(answers) == 1, answers  # the engines agree
        return answers.pop()

    said, meetings = [tokens()], set()
    trainer.dispatch.init_weight_sync_state(client)
    for checkpoint in (*checkpoints, checkpoints[0]):
        on_actors("read", checkpoint)
        asyncio.run(trainer.dispatch.save_weights_for_sampler())
        for metrics in on_actors("refit_metrics"):
            assert metrics["refit/checked"] == 1 and metrics["refit/bytes"] > 0, metrics
        on_workers(client, "compare", str(checkpoint))
        said.append(tokens())
        meetings |= set(on_actors("meeting"))
    # Each of three checkpoints says something else, and the first says the same again.
    assert len(set(said[1:4])) == 3 and said[4] == said[1], said
    (meeting,) = meetings
    assert bytes([len(NODE)]) + NODE.encode() in meeting, meeting
    print(a_policy_worker_dies(trainer, client))
    print(f"| SkyRL {skyrl.__version__}, ray {ray.__version__} | {POLICY_WORKERS} FSDP2 policy workers, {ENGINES} engines of vLLM | "
          f"{len(said) - 1} updates by SkyRL's dispatch | equal |")


def main():
    ray.init(num_cpus=POLICY_WORKERS + ENGINES, num_gpus=POLICY_WORKERS + ENGINES, include_dashboard=False, _node_ip_address=NODE,
             log_to_driver="-v" in sys.argv, runtime_env={"worker_process_setup_hook": "skyrl_cpu.set_up"})
    try:
        with tempfile.TemporaryDirectory(prefix="refit-") as work:
            run(pathlib.Path(work))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
