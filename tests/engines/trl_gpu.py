"""TRL's own GRPOTrainer on GPUs refits vLLM's own server, by refit.trl.

    python trl_gpu.py [--case NAME …] [--by refit|nccl …] [--updates N] [--blocks N]

TRL trains two steps. Then every tensor of the server's workers and every token that it generates must equal those of a fresh engine,
which loads a checkpoint of what the trainer holds. The server's CUDA graphs are captured before the first update. Prints the time of
an update as the trainer sees it. "nccl" is TRL's own way, without Refit. Needs a GPU for each training process and for each worker.
Checkpoints lie under TMPDIR: a folder in memory saves time.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import warnings

import refit
import vllm_gpu
from trainer import TIMEOUT_SECONDS
from trl_parts import end_of, free_port, grpo_trainer, post, server_of, tokens_of, world_of
from vllm_gpu import MODELS, check_equal, digests, engine_options, generated, spread, visible_devices

warnings.filterwarnings("ignore")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

# Training processes on GPUs 0, 1, …, by DDP; the server on the GPUs after theirs.
CASES = {
    "dense": {"model": "dense", "dtype": "fp32", "processes": 1, "engine": {"tensor_parallel": 1}, "learning_rate": 1e-2},
    "dense-2": {"model": "dense", "dtype": "fp32", "processes": 2, "engine": {"tensor_parallel": 2}, "learning_rate": 1e-2},
    "4b": {"model": "4b", "dtype": "bf16", "processes": 1, "engine": {"tensor_parallel": 1}, "learning_rate": 1e-3},
}


def job_of(case):
    spec = CASES[case]
    return {"model": MODELS[spec["model"]], "source": {"layout": "fsdp", "dtype": spec["dtype"], "replicas": spec["processes"]},
            "destination": {"layout": "vllm", "version": vllm_gpu.version_of_vllm(), "dtype": "bf16", **spec["engine"]}}


class Extension:
    def digests(self):
        return digests(self)


# The training processes.


def trainer_of(case, work, server):
    import torch
    from transformers import AutoModelForCausalLM

    spec = CASES[case]
    vocabulary = MODELS[spec["model"]]["vocab_size"]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[spec["dtype"]]
    model = AutoModelForCausalLM.from_pretrained(work / "a", dtype=dtype, attn_implementation="eager")

    def reward(completion_ids, **_):
        return [sum(ids) / len(ids) / vocabulary for ids in completion_ids]

    return grpo_trainer(model, vocabulary, reward, work / "out", server, {"learning_rate": spec["learning_rate"]})


def train(case, work, by, server, updates):
    """Leaves a checkpoint of what it holds at the end, and what the server holds."""
    import torch
    from safetensors.torch import save_file

    if by == "refit":
        import refit.trl

        refit.trl.install(work / "plan.refit", timeout=TIMEOUT_SECONDS)
    trainer = trainer_of(case, work, server)
    generation, main = trainer.vllm_generation, trainer.accelerator.is_main_process
    generation.sync_weights()
    before = tokens_of(generation.vllm_client) if main else None
    trainer.train()
    seconds = []
    for _ in range(updates):
        trainer.accelerator.wait_for_everyone()
        start = time.perf_counter()
        generation.sync_weights()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    if main:
        held = work / by
        held.mkdir()
        (held / "config.json").write_text(json.dumps(MODELS[CASES[case]["model"]]))
        model = trainer.accelerator.unwrap_model(trainer.model)
        save_file({name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}, held / "model.safetensors",
                  metadata={"format": "pt"})
        (held / "server.json").write_text(json.dumps({
            "digests": post(server, "/collective_rpc", method="digests")["results"], "tokens": tokens_of(generation.vllm_client),
            "before": before, "seconds": seconds}))
    trainer.accelerator.wait_for_everyone()


# The test.


def start(role, case, work, *options, **environment):
    return subprocess.Popen([sys.executable, __file__, "--role", role, "--case", case, "--work", str(work), *options],
                            env={**os.environ, **environment})


def fresh(case, work, by, blocks):
    from vllm import LLM

    llm = LLM(model=str(work / by), **engine_options(CASES[case], blocks))
    (work / by / "fresh.json").write_text(json.dumps({"digests": llm.collective_rpc(digests), "tokens": generated(llm)}))


def run_by(by, case, work, updates, blocks):
    processes = CASES[case]["processes"]
    options = {**engine_options(CASES[case], blocks), "weight_transfer_config": {"backend": by},
               "worker_extension_cls": "trl_gpu.Extension"}
    paths = os.pathsep.join([str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    log = work / "server.log"
    with server_of(work / "a", log, options, PYTHONPATH=paths, CUDA_VISIBLE_DEVICES=visible_devices(processes)) as server:
        port = free_port()
        # One process, too, is a rank of DDP: transformers else takes all GPUs that it sees.
        ranks = [start("train", case, work, "--by", by, "--server", server, "--updates", str(updates),
                       CUDA_VISIBLE_DEVICES=visible_devices(0), **world_of(processes, rank, port)) for rank in range(processes)]
        if failed := [rank for rank, process in enumerate(ranks) if process.wait() != 0]:
            sys.exit(f"{case}, {by}: training processes {failed} failed\n{end_of(log)}")
    if start("fresh", case, work, "--by", by, "--blocks", str(blocks),
             CUDA_VISIBLE_DEVICES=visible_devices(processes)).wait() != 0:
        sys.exit(f"{case}, {by}: no fresh engine loads what the trainer held")
    served, wanted = (json.loads((work / by / name).read_text()) for name in ("server.json", "fresh.json"))
    check_equal(case, served, served["before"], wanted)
    print(f"{case}, {by}: equal to a fresh engine; update as the trainer sees it: {spread(served['seconds'])}\n"
          f"  in order: {' '.join(f'{1e3 * each:.1f}' for each in served['seconds'])}", flush=True)


def run(case, ways, updates, blocks):
    needed, count = CASES[case]["processes"] + CASES[case]["engine"]["tensor_parallel"], len(vllm_gpu.usable_gpus())
    if count < needed:
        print(f"{case}: skipped, wants {needed} GPUs, found {count}")
        return
    with tempfile.TemporaryDirectory(prefix="refit-trl-") as scratch:
        work = pathlib.Path(scratch)
        refit.compile(job_of(case)).save(work / "plan.refit")
        if start("checkpoint", case, work).wait() != 0:
            sys.exit(f"{case}: no checkpoint")
        for by in ways:
            run_by(by, case, work, updates, blocks)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--by", nargs="+", choices=("refit", "nccl"), default=["refit", "nccl"])
    parser.add_argument("--updates", type=int, default=10, help="updates that are timed")
    parser.add_argument("--blocks", type=int, default=0, help="blocks of the KV cache; default: what vLLM fits into 40 %% of a GPU")
    parser.add_argument("--role", choices=("checkpoint", "train", "fresh"), help=argparse.SUPPRESS)
    parser.add_argument("--server", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role is None:
        for case in arguments.case:
            run(case, arguments.by, arguments.updates, arguments.blocks)
        return
    (case,) = arguments.case
    if arguments.role == "checkpoint":
        vllm_gpu.write_checkpoint(arguments.work / "a", CASES[case]["model"], 0)
    elif arguments.role == "train":
        train(case, arguments.work, arguments.by[0], arguments.server, arguments.updates)
    else:
        fresh(case, arguments.work, arguments.by[0], arguments.blocks)


if __name__ == "__main__":
    main()
