#!/usr/bin/env python3
"""refit.trl with TRL's own GRPOTrainer and vLLM's own server: training processes and workers that meet over UCX.

usage: trl_test.py [--case NAME …]      (trl.sh installs what it needs)

Each case trains two steps. After every update the server's tensors and tokens must equal those of another engine, which loads a
checkpoint of what the trainer holds then: fresh after the last update, by vLLM's own reload_weights after the others. Real: all of
TRL, accelerate, DDP, FSDP 2 and vLLM. Two things differ on a CPU: accelerate is made to take FSDP there, and vLLM to keep weights
as it loads them.
"""
import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TRL_EXPERIMENTAL_SILENCE": "1"}

import vllm_workers  # noqa: E402  its environment comes before that of vllm_cpu
import vllm_cpu  # noqa: E402, I001
from trainer import TIMEOUT_SECONDS, check_equal, write_checkpoint  # noqa: E402
from trl_parts import end_of, free_port, get, grpo_trainer, post, server_of, tokens_of, world_of  # noqa: E402

CONFIG = vllm_cpu.FAMILIES["dense"]
# Training processes, the server's workers, and options of the job.
CASES = {
    "one": (1, 1, {}),
    "ddp": (2, 1, {}),
    "fsdp2": (2, 2, {"delta": {"dense_every": 0}, "peer": "staged", "bucket_bytes": 1 << 16}),
}


def job_of(case, **destination):
    processes, workers, options = CASES[case]
    copies = "replicas" if case == "ddp" else "data_parallel"
    return {"model": CONFIG, "source": {"layout": "fsdp", "dtype": "fp32", copies: processes},
            "destination": {"layout": "vllm", "tensor_parallel": workers, "dtype": "bf16", **destination}, "options": options}


# The training processes.


def take_fsdp_on_cpus():
    """accelerate has FSDP for the ranks of accelerators alone; torch's runs on gloo, too."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    made = AcceleratorState.__init__

    def with_fsdp(state, *args, fsdp_plugin=None, **more):
        made(state, *args, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None:
            state.fsdp_plugin, state.distributed_type = fsdp_plugin, DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = with_fsdp


def trainer_of(arguments, reward, **more):
    import torch
    from transformers import AutoModelForCausalLM

    fsdp = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"],
                                          "activation_checkpointing": True}}
    model = AutoModelForCausalLM.from_pretrained(arguments.work / "a", dtype=torch.float32)
    return grpo_trainer(model, CONFIG["vocab_size"], reward, arguments.work / "out", arguments.server,
                        {"use_cpu": True, "learning_rate": 1e-2, **(fsdp if arguments.case == "fsdp2" else {})}, **more)


class Record:
    """What the server and the trainer hold after each update."""

    def __init__(self, arguments, trainer):
        self._arguments, self._trainer, self.names = arguments, trainer, []

    def add(self, name):
        """Collective over the training processes."""
        import torch
        from safetensors.torch import save_file

        model, directory = self._trainer.accelerator.unwrap_model(self._trainer.model), self._arguments.work / name
        weights = {}
        for path, parameter in model.named_parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            weights[path.replace("_checkpoint_wrapped_module.", "")] = whole.detach().clone().contiguous()
        if self._trainer.accelerator.is_main_process:
            directory.mkdir()
            (directory / "config.json").write_text(json.dumps(CONFIG))
            save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
            files = post(self._arguments.server, "/collective_rpc", method="save_state", args=[str(directory)])["results"]
            tokens = tokens_of(self._trainer.vllm_generation.vllm_client, vllm_cpu.ALL_PROMPTS)
            torch.save({"states": [torch.load(file) for file in files], "tokens": tokens}, directory / "server.pt")
        self.names.append(name)


@contextlib.contextmanager
def refused(error, *texts):
    try:
        yield
    except error as raised:
        assert all(text in str(raised) for text in texts), raised
    else:
        raise AssertionError(f"nothing was refused; wanted {texts}")


def train(arguments):
    import torch

    torch.set_num_threads(1)
    import refit.trl

    if arguments.case == "fsdp2":
        take_fsdp_on_cpus()
    plan = "auto" if arguments.case == "ddp" else arguments.work / "plan.refit"
    updates = refit.trl.install(plan, save_to=arguments.work / "auto", check=True, timeout=TIMEOUT_SECONDS,
                                version=lambda: f"version {trainer.state.global_step}")
    assert updates.stats is None, updates.stats

    def reward(completion_ids, **_):
        # TRL has sent its weights and generated; no step was made since.
        record.add(f"step-{trainer.state.global_step}")
        if trainer.accelerator.is_main_process:
            held = get(arguments.server, "/weight_info")["weight_version"]
            assert held == f"version {trainer.state.global_step}", held
            assert updates.stats["bytes_sent"] > 0, updates.stats
        return [sum(ids) / len(ids) / CONFIG["vocab_size"] for ids in completion_ids]

    trainer = trainer_of(arguments, reward)
    record = Record(arguments, trainer)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    record.add("step-2")
    assert record.names == ["step-0", "step-1", "step-2"], record.names
    if more := {"one": refusals, "ddp": alone, "fsdp2": deltas}.get(arguments.case):
        more(arguments, trainer, record, updates)
    if trainer.accelerator.is_main_process:
        (arguments.work / "names.json").write_text(json.dumps(record.names))
    trainer.accelerator.wait_for_everyone()


def refusals(arguments, trainer, record, updates):
    """Of one process. A failed update is followed by one that meets anew."""
    import torch
    from peft import LoraConfig
    from trl.generation.vllm_generation import VLLMGeneration

    import refit
    import refit.trl

    generation, weight = trainer.vllm_generation, trainer.model.lm_head.weight
    weight.data = -weight.data  # elsewhere
    with refused(refit.FailedPrecondition, '"lm_head.weight" is at another address', "FSDP without cpu_offload",
                 "the engine: WorkerError: http://127.0.0.1:", "/update_weights answers 500: "):
        generation.sync_weights()
    generation.sync_weights()
    record.add("moved")
    # The workers' own words arrive.
    refit.compile(job_of("one", dtype="fp32")).save(arguments.work / "fp32.refit")
    refit.trl.install(arguments.work / "fp32.refit", timeout=TIMEOUT_SECONDS)
    with refused(refit.Error, "/init_weight_transfer_engine answers 500: ", "bf16", "fp32"):
        generation.sync_weights()
    refit.compile(job_of("one", tensor_parallel=2)).save(arguments.work / "two.refit")
    with refused(refit.InvalidArgument, "has 1 workers; the plan has 2 destination ranks"):
        refit.trl.install(arguments.work / "two.refit").check_server(generation.vllm_client)
    refit.compile(job_of("fsdp2")).save(arguments.work / "two.refit")
    refit.trl.install(arguments.work / "two.refit")
    with refused(refit.InvalidArgument, "TRL has 1 training processes; the plan has 2 source ranks"):
        generation.sync_weights()
    refit.trl.install(arguments.work / "plan.refit", timeout=TIMEOUT_SECONDS)
    with refused(refit.FailedPrecondition, "train without peft_config"):
        trainer_of(arguments, lambda completion_ids, **_: [0.0] * len(completion_ids),
                   peft_config=LoraConfig(task_type="CAUSAL_LM")).train()
    generation.mode = "colocate"
    with refused(refit.FailedPrecondition, 'vllm_mode is "colocate"'):
        generation.sync_weights()
    generation.mode = "server"
    with torch.no_grad():
        weight.mul_(-1)
    generation.sync_weights()
    record.add("after refusals")
    VLLMGeneration.sync_weights = lambda self, step: None
    with refused(refit.FailedPrecondition, "has another VLLMGeneration.sync_weights(self, step); wanted (self), as of TRL 1.16"):
        refit.trl.install(arguments.work / "plan.refit")


def alone(arguments, trainer, record, updates):
    """What one process alone fails at ends on both; and the plan is that of what runs."""
    import torch

    import refit

    made, wanted = refit.Plan.load(arguments.work / "auto" / "plan.refit"), refit.Plan.load(arguments.work / "plan.refit")
    assert [made.tensors(rank) for rank in range(made.world_size)] == [wanted.tensors(rank) for rank in range(wanted.world_size)]

    def fails(generation):
        raise refit.Unavailable("only here")

    if trainer.accelerator.process_index == 1:
        updates._prepared = fails
    with refused(refit.Error, "only here"):
        trainer.vllm_generation.sync_weights()
    vars(updates).pop("_prepared", None)
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(-1)
    trainer.vllm_generation.sync_weights()
    record.add("after one failed")


def deltas(arguments, trainer, record, updates):
    import torch

    assert updates.delta_report.is_delta, updates.delta_report
    with torch.no_grad():
        trainer.model.lm_head.weight.to_local()[::2] *= -1
    trainer.vllm_generation.sync_weights()
    report = updates.delta_report
    assert report.is_delta and 0 < report.change_rate < 0.1, report
    record.add("a part")
    if trainer.accelerator.process_index == 1:
        updates.ask_dense()
    trainer.vllm_generation.sync_weights()
    assert updates.delta_report.why_dense == "rank 1 asked for it", updates.delta_report


# The test.


def fresh(arguments):
    import torch

    *others, last = json.loads((arguments.work / "names.json").read_text())
    llm = vllm_workers.engine_of(arguments.work / last, CASES[arguments.case][1])
    for name in (last, *others):
        directory = arguments.work / name
        if name != last:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
            llm.reset_prefix_cache()
        torch.save({"states": vllm_workers.states_of(llm, directory), "tokens": vllm_workers.tokens_of(llm)}, directory / "fresh.pt")


def start(role, arguments, **environment):
    return subprocess.Popen([sys.executable, __file__, "--role", role, "--case", arguments["case"],
                             *[f"--{name}={value}" for name, value in arguments.items() if name != "case"]],
                            env={**os.environ, **environment})


def run(case):
    import torch

    import refit

    processes, workers, _ = CASES[case]
    with tempfile.TemporaryDirectory(prefix="refit-trl-") as scratch:
        work = pathlib.Path(scratch)
        plan = refit.compile(job_of(case))
        plan.save(work / "plan.refit")
        write_checkpoint(work / "a", CONFIG, vllm_cpu.plan_of("dense"), 1)
        options = {"weight_transfer_config": {"backend": "refit"}, "tensor_parallel_size": workers,
                   "worker_extension_cls": "worker.Extension", "enforce_eager": True, "max_model_len": 64, "max_num_seqs": 4,
                   "block_size": vllm_cpu.BLOCK}
        log = work / "server.log"
        with server_of(work / "a", log, options) as server:
            port = free_port()
            ranks = [start("train", {"case": case, "work": work, "server": server},
                           **({} if processes == 1 else world_of(processes, rank, port))) for rank in range(processes)]
            if failed := [rank for rank, process in enumerate(ranks) if process.wait() != 0]:
                sys.exit(f"{case}: training processes {failed} failed\n{end_of(log)}")
        if start("fresh", {"case": case, "work": work}).wait() != 0:
            sys.exit(f"{case}: no other engine loads what the trainer held")
        before = None
        for name in json.loads((work / "names.json").read_text()):
            served, wanted = torch.load(work / name / "server.pt"), torch.load(work / name / "fresh.pt")
            print(f"{case}, {name}: {check_equal(served['states'], served['tokens'], wanted, before)}", flush=True)
            before = served["tokens"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    for name in ("role", "server"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=pathlib.Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.role is None:
        for case in parsed.case:
            run(case)
    else:
        (parsed.case,) = parsed.case
        {"train": train, "fresh": fresh}[parsed.role](parsed)
