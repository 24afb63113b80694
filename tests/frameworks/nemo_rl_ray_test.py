#!/usr/bin/env python3
"""refit.nemo_rl in a real Ray: NeMo-RL's `setup` builds policy workers and vLLM actors, and its synchronizer updates these, on the CPU.

usage: nemo_rl_ray_test.py CHECKOUT      (nemo_rl.sh installs what it needs)

Real: Ray; NeMo-RL's example configuration, grpo.setup, clusters, Policy, DTensor v2 policy workers with NeMo Automodel's model and FSDP2,
VllmGeneration, vLLM actors and worker extension, factory of synchronizers and synchronizer; vLLM's engines and workers. Stand-ins: CUDA,
whose devices Ray counts, the group of the policy workers, which is gloo's, what NeMo-RL writes into vLLM's files, and packages that only
training, its data and its logs need; vLLM has no sleep mode, and keeps weights as loaded. NeMo-RL's training does not run: policy workers
make steps of their own model and optimizer.
"""

import os
import pathlib
import sys
import tempfile
import threading

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "engines")]
NODE = "127.0.0.3"  # not the address that Refit would choose
os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
               "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "RAY_DEDUP_LOGS": "0",
               "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1", "TORCHDYNAMO_DISABLE": "1",
               "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], *sys.path[-2:]])}  # fmt: skip

import nemo_rl_cpu

nemo_rl_cpu.set_up()

import nemo_rl
import ray
import torch
import vllm_cpu
from nemo_rl.algorithms import grpo
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.models.generation import configure_generation_config
from nemo_rl.models.generation.vllm import vllm_generation
from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers
from omegaconf import OmegaConf
from ray.exceptions import RayActorError, RayError
from trainer import write_checkpoint, write_tokenizer

import refit
import refit.nemo_rl

TRAINERS = ENGINES = 2
PROMPT = [5, 17, 101, 44, 9]
TRANSPORT = "refit.nemo_rl:CheckpointEngine"


def configuration(checkout, model, work):
    """The example's of NeMo-RL, by the options of docs/integrations/nemo_rl.md and what a CPU and a tiny model need."""
    generation = "policy.generation"
    register_omegaconf_resolvers()
    config = parse_hydra_overrides(load_config(checkout / "examples/configs/grpo_math_1B.yaml"), [
        f"policy.model_name={model}", "policy.sequence_packing.enabled=false",
        "policy.max_total_sequence_length=64", "policy.train_global_batch_size=2", "policy.train_micro_batch_size=1",
        "loss_fn.reference_policy_kl_penalty=0", "grpo.num_prompts_per_step=2", "grpo.val_period=0", "data.num_workers=0",
        f"checkpointing.checkpoint_dir={work}/checkpoints", f"logger.log_dir={work}/logs", "logger.monitor_gpus=false",
        "logger.tensorboard_enabled=false", "cluster.num_nodes=1", f"cluster.gpus_per_node={TRAINERS + ENGINES}",
        f"{generation}.colocated.enabled=false", f"{generation}.colocated.resources.gpus_per_node={ENGINES}",
        f"{generation}.vllm_cfg.enforce_eager=true", f"{generation}.vllm_cfg.gpu_memory_utilization=0.1",
        f"+{generation}.vllm_cfg.enable_prefix_caching=true",
        f"{generation}.max_new_tokens=12", f"+{generation}.vllm_kwargs.worker_cls=nemo_rl_ray_worker.VllmWorker"])  # fmt: skip
    config = OmegaConf.to_container(config, resolve=True)
    config["policy"]["generation"] |= {"refit_transport": TRANSPORT, "refit_cfg": {
        TRANSPORT: {"plan": "auto", "save_to": f"{work}/auto", "check": True, "timeout": 120, "device": "cpu"}}}
    return grpo.MasterConfig(**config)


def in_place_of_theirs(default, _):
    """NeMo-RL's vLLM actor with what a CPU needs."""
    ours = f"nemo_rl_ray_worker.{default.rpartition('.')[2]}"
    ACTOR_ENVIRONMENT_REGISTRY[ours] = PY_EXECUTABLES.SYSTEM
    return ours


def on_all(group, function, *arguments):
    """Has the group's actors run a function, which is given the worker."""
    return ray.get([worker.__ray_call__.remote(function, *arguments) for worker in group.workers])


def train(worker, seed):
    """A step of the worker's own model and optimizer. The values that it leaves are of fp32, and bf16 has none of them."""
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed + worker.rank))
    worker.optimizer.param_groups[0]["lr"] = 1e-2
    worker.optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = worker.model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    worker.optimizer.step()


def save(worker, path):
    """What an engine must hold then, as a checkpoint: written by one worker, gathered by all."""
    from safetensors.torch import save_file

    whole = {name: tensor.full_tensor().bfloat16().contiguous() for name, tensor in worker.model.state_dict().items()}
    if worker.rank == 0:
        save_file(whole, path / "model.safetensors", metadata={"format": "pt"})


def compare(actor, checkpoint):
    """Raises unless every element of the tensors of this actor's vLLM worker is the checkpoint's."""
    def of_worker(worker):
        report = refit.check(worker._refit_executor(), checkpoint, refit=False)
        assert report.ok, str(report)

    actor.llm.collective_rpc(of_worker)


def meeting_of(worker):
    return worker.checkpoint_engine._meeting


def metrics_of(worker):
    return worker.checkpoint_engine.metrics()


def hang(worker, rank):
    """This rank takes no part in the next update, although it is in it."""
    if worker.rank == rank:
        worker.checkpoint_engine._sender.send = lambda *_: threading.Event().wait()


def a_policy_worker_dies(policy, generation):
    """The other is in an update, and hears of it from Refit. NeMo-RL raises, and vLLM's workers answer again."""
    on_all(policy.worker_group, hang, 1)
    death = threading.Timer(5, ray.kill, [policy.worker_group.workers[1]])
    death.start()
    send = generation.weight_synchronizer._run_policy("send_weights_via_checkpoint_engine")
    receive = generation.weight_synchronizer._run_generation("update_weights_from_checkpoint_engine")
    said = []
    for reference in send + receive:
        try:
            said.append(str(ray.get(reference)))
        except (refit.Error, RayError) as error:
            said.append("dead" if isinstance(error, RayActorError) else str(getattr(error, "cause", None) or error))
    death.join()
    assert said.pop(1) == "dead" and all("rank 1 is gone" in of_rank for of_rank in said), said
    assert on_all(generation.worker_group, lambda actor: actor.is_alive()) == [True] * ENGINES
    return said[0].splitlines()[-1]


def run(checkout, work):
    model = work / "model"
    write_checkpoint(model, vllm_cpu.FAMILIES["dense"], vllm_cpu.plan_of("dense"), 1)
    write_tokenizer(model, vllm_cpu.FAMILIES["dense"]["vocab_size"])
    config = configuration(checkout, model, work)
    tokenizer = get_tokenizer(config.policy["tokenizer"])
    config.policy["generation"] = configure_generation_config(config.policy["generation"], tokenizer)
    ACTOR_ENVIRONMENT_REGISTRY["refit.nemo_rl.DTensorPolicyWorkerV2"] = PY_EXECUTABLES.SYSTEM
    vllm_generation.resolve_generation_worker_cls = in_place_of_theirs
    policy, generation, *_ = grpo.setup(config, tokenizer, [{}] * 2, None, policy_factory=refit.nemo_rl.policy)
    policy.shutdown = generation.shutdown = lambda: True  # once Ray has ended, their destructors would start it anew by these

    def tokens():
        prompts = torch.tensor([PROMPT] * (2 * ENGINES))
        data = BatchedDataDict({"input_ids": prompts, "input_lengths": torch.full((len(prompts),), len(PROMPT))})
        answers = set(map(tuple, generation.generate(data, greedy=True)["output_ids"].tolist()))
        generation.finish_generation()  # resets the prefix cache
        assert len(answers) == 1, answers  # the engines agree
        return answers.pop()

    said, meetings = [], set()
    for step in range(4):
        checkpoint = work / f"step-{step}"
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text((model / "config.json").read_text())
        if step:
            on_all(policy.worker_group, train, step)
        grpo.refit_policy_generation(policy, generation, colocated_inference=False)
        on_all(policy.worker_group, save, checkpoint)
        on_all(generation.worker_group, compare, str(checkpoint))
        for metrics in on_all(policy.worker_group, metrics_of):
            assert metrics["refit/checked"] == 1 and metrics["refit/bytes"] > 0, metrics
        said.append(tokens())
        meetings |= set(on_all(policy.worker_group, meeting_of))
    assert len(set(said)) == len(said), said
    (meeting,) = meetings
    assert bytes([len(NODE)]) + NODE.encode() in meeting, meeting
    print(a_policy_worker_dies(policy, generation))
    print(f"| NeMo-RL {nemo_rl.__version__}, ray {ray.__version__} | {TRAINERS} DTensor policy workers, {ENGINES} engines of vLLM | {len(said)} updates by "
          "NeMo-RL's synchronizer | equal |")


def main():
    ray.init(num_cpus=TRAINERS + ENGINES, num_gpus=TRAINERS + ENGINES, include_dashboard=False, _node_ip_address=NODE,
             log_to_driver="-v" in sys.argv, runtime_env={"worker_process_setup_hook": "nemo_rl_cpu.set_up"})
    try:
        with tempfile.TemporaryDirectory(prefix="refit-") as work:
            run(pathlib.Path(sys.argv[1]), pathlib.Path(work))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
