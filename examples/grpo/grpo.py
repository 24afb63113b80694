#!/usr/bin/env python3
"""A real RL loop: TRL's GRPOTrainer trains a tiny model, a vLLM server generates, and Refit moves the weights between them.

The model learns to repeat the first word of its prompt. README.md beside this file tells what is shown, and how to break it;
run.sh installs what this file imports. What a loop with Refit needs is in `ByRefit` and `Run.compile`.
"""
import argparse
import contextlib
import json
import logging
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings

from others import ByFile, ByIpc, ByNccl
from show import HEADER, line_of, show, waiting

HERE, BUILD = pathlib.Path(__file__).parent.resolve(), pathlib.Path("build/grpo").resolve()
RANK, PROCESSES = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # of the trainer, as torchrun says
WORDS, ANSWER, BATCH = 64, 8, 64
MODEL = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": WORDS, "hidden_size": 256, "intermediate_size": 512,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128,
         "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
         "bos_token_id": 1, "eos_token_id": 2}


class ByRefit:
    backend, how = "refit", "refit.trl, from the trainer's tensors into vLLM's; digests of both are compared"

    def __init__(self, run):
        import refit.trl

        self.run = run
        self.updates = refit.trl.install(run.work / "plan.refit", check=True, version=run.version, timeout=120)
        self.send = refit.trl.VLLMGeneration.sync_weights

    def facts(self):
        held = sum(map(int, self.run.server.call("digest"))) % (2**61 - 1)
        return {"bytes": self.updates.stats["bytes_sent"], "digest": f"{held:016x}"}


def way_of(name, gpus):
    return {"refit": ByRefit, "file": ByFile, "framework": ByIpc if gpus == 1 else ByNccl}[name]


class Server:
    """vLLM's own server, of the checkpoint in `model`."""

    def __init__(self, model, log, backend, gpus):
        self.log, self.gpus = log, gpus
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        self.command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1", "--port", port,
            "--skip-tokenizer-init", "--worker-extension-cls", "worker.Extension", "--logprobs-mode", "processed_logprobs",
            "--max-logprobs", "-1", "--max-model-len", "64", "--max-num-seqs", str(BATCH),
            *(["--weight-transfer-config", json.dumps({"backend": backend})] if backend else []),
            *(["--gpu-memory-utilization", "0.3"] if gpus else ["--enforce-eager", "--block-size", "32"]),
            *(["--tensor-parallel-size", "2"] if gpus == 4 else [])]

    def launch(self):
        others = {name: value for name, value in os.environ.items()  # but what torchrun says to the trainer
                  if name not in ("RANK", "WORLD_SIZE") and not name.startswith(("MASTER_", "LOCAL_", "TORCHELASTIC_"))}
        visible = {1: {"CUDA_VISIBLE_DEVICES": "0"}, 4: {"CUDA_VISIBLE_DEVICES": "2,3,0,1"}}.get(self.gpus, {})
        with open(self.log, "a") as file:
            self.process = subprocess.Popen(self.command, stdout=file, stderr=file, start_new_session=True, env={
                **others, **visible, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
                "GRPO_GPUS": str(self.gpus), "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"})

    def wait(self):
        with waiting("vLLM's server loads", 30):
            while self.process.poll() is None:
                with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/health", timeout=10):
                    return
                time.sleep(0.2)
        sys.exit(f"grpo.py: vLLM's server ended with status {self.process.returncode}; {self.log} ends with\n"
                 + self.log.read_text()[-3000:])

    def start(self):
        self.launch()
        self.wait()

    def stop(self):
        with contextlib.suppress(AttributeError, ProcessLookupError):  # where none was launched, or all has ended
            os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            os.killpg(self.process.pid, signal.SIGKILL)

    def _ask(self, path, data=None):
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.loads(response.read() or b"{}")

    def post(self, path, **body):
        return self._ask(path, json.dumps(body).encode())

    def version(self):
        return self._ask("/weight_info")["weight_version"]

    def call(self, method, *arguments):
        """The answer of each worker to a method of worker.Extension."""
        return self.post("/collective_rpc", method=method, args=list(arguments))["results"]


class Run:
    """One run of the loop, by one way."""

    def __init__(self, arguments):
        self.gpus, self.steps, self.broken, self.way = arguments.gpus, arguments.steps, arguments.broken, arguments.way
        self.work, self.rows, self.trainer = BUILD / "work", [], None
        self.server = Server(self.work / "model", BUILD / "server.log", way_of(self.way, self.gpus).backend, self.gpus)

    def prepare(self):
        with waiting("torch and transformers load", 8) if RANK == 0 else contextlib.nullcontext():
            import torch
            import transformers
        transformers.utils.logging.disable_progress_bar()
        if not self.gpus:
            torch.set_num_threads(1)

        def model_of(seed):
            torch.manual_seed(seed)
            return transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**MODEL), dtype=torch.float32)

        if RANK == 0:
            shutil.rmtree(self.work, ignore_errors=True)
            model_of(1).save_pretrained(self.work / "model")  # vLLM begins with other weights than the trainer
            (self.work / "model" / "config.json").write_text(json.dumps(MODEL))
            (BUILD / "server.log").unlink(missing_ok=True)
            self.server.launch()
            if self.way == "refit":
                self.compile()
        with waiting("TRL loads", 12) if RANK == 0 else contextlib.nullcontext():
            from trl import GRPOTrainer  # noqa: F401
        if RANK == 0:
            self.server.wait()
        if PROCESSES > 1:
            import accelerate

            accelerate.PartialState()
            self.server.url = accelerate.utils.broadcast_object_list([self.server.url])[0]
        self.model = model_of(0)
        self.sender = way_of(self.way, self.gpus)(self)
        self.trainer = self.trainer_of(torch)
        generation = self.trainer.vllm_generation
        generation.sync_weights = lambda: self.sync(generation)

    def compile(self):
        """The plan: what goes from which tensor of which trainer into which tensor of which worker. It is proved here, once."""
        import refit

        refit.compile({
            "model": MODEL, "colocated": self.gpus == 1,
            "source": {"layout": "fsdp", "dtype": "fp32", "replicas": PROCESSES},
            "destination": {"layout": "vllm", "dtype": "bf16", "tensor_parallel": 2 if self.gpus == 4 else 1},
            # A refit that sends all mends what --break breaks before anyone sees it; one that sends what changed does not.
            "options": {"delta": {"dense_every": 0}, "peer": "staged"} if self.broken else {},
        }).save(self.work / "plan.refit")

    def trainer_of(self, torch):
        from datasets import Dataset
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
        from transformers.trainer_callback import PrinterCallback
        from trl import GRPOConfig, GRPOTrainer

        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        first = torch.randint(3, 11, (8000,), generator=torch.Generator().manual_seed(1)).tolist()
        trainer = GRPOTrainer(
            model=self.model, reward_funcs=self.reward, train_dataset=Dataset.from_list([{"prompt": f"w{i} w20 w20 w20"} for i in first]),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2",
                                                     padding_side="left"),
            args=GRPOConfig(
                output_dir=str(self.work / "out"), use_cpu=not self.gpus, bf16=False, learning_rate=8e-4, lr_scheduler_type="constant",
                per_device_train_batch_size=BATCH, num_generations=8, max_completion_length=ANSWER, max_steps=self.steps, beta=0.0,
                gradient_checkpointing=False, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, use_vllm=True,
                vllm_mode="server", vllm_server_base_url=self.server.url))
        trainer.remove_callback(PrinterCallback)
        return trainer

    def version(self):
        return str(self.trainer.state.global_step)

    def sync(self, generation):
        """TRL calls it before it generates with new weights."""
        if self.broken:
            import breaks

            if self.trainer.state.global_step == self.steps // 2 - breaks.BEHIND:
                self.model.save_pretrained(self.work / "older")
            if self.trainer.state.global_step == self.steps // 2:
                breaks.BREAKS[self.broken](self, lambda: self.sender.send(generation))
        start = time.perf_counter()
        self.sender.send(generation)
        seconds = time.perf_counter() - start
        if RANK == 0:
            self.rows.append({"step": self.trainer.state.global_step, "seconds": seconds, "version": self.server.version(),
                              **self.sender.facts()})

    def reward(self, prompts, completion_ids, **_):
        """The share of an answer that is the first word of the prompt."""
        rewards = [sum(f"w{word}" == prompt.split()[0] for word in answer) / ANSWER for prompt, answer in zip(prompts, completion_ids)]
        if RANK == 0:
            self.rows[-1]["reward"] = sum(rewards) / len(rewards)
            print(*([HEADER] if len(self.rows) == 1 else []), line_of(self.rows[-1]), sep="\n", flush=True)
        return rewards


def train(arguments):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # so that the server ends, too
    run = Run(arguments)
    try:
        run.prepare()
        start = time.monotonic()
        run.trainer.train()
        if RANK == 0:
            print(f"{len(run.rows)} steps in {time.monotonic() - start:.0f} s", flush=True)
            (BUILD / f"{arguments.way}.json").write_text(json.dumps(run.rows, indent=1))
    except KeyboardInterrupt:
        sys.exit(2)
    finally:
        if RANK == 0:
            run.server.stop()


def arguments_of():
    parser = argparse.ArgumentParser(prog="grpo.py", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120, help="default 120")
    parser.add_argument("--sync", nargs="+", choices=("refit", "file", "framework"), default=["refit"],
                        help="how new weights reach vLLM; several run one after the other, and are shown beside each other")
    parser.add_argument("--break", choices=("worker", "bit", "version"), dest="broken", help="what happens halfway")
    parser.add_argument("--gpus", type=int, choices=(1, 4), default=0,
                        help="1: trainer and server share it; 4: two trainers, and a server on two; default: the CPU")
    parser.add_argument("--check-arguments", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps < 8:
        refuse(f"--steps is {arguments.steps}; wanted 8 or more")
    if arguments.broken and (arguments.sync != ["refit"] or arguments.gpus):
        refuse("--break shows what Refit says, on the CPU: leave out --sync and --gpus")
    if "framework" in arguments.sync and not arguments.gpus:
        refuse("--sync framework: TRL sends by vLLM's nccl backend, which needs GPUs: --gpus 4, or --gpus 1 for vLLM's ipc backend")
    if arguments.gpus > (found := len(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))):
        refuse(f"--gpus is {arguments.gpus}; this host has {found}")
    return arguments


def refuse(why):
    print(f"grpo.py: {why}", file=sys.stderr)
    sys.exit(2)


def main():
    arguments = arguments_of()
    if arguments.check_arguments:
        return 0
    BUILD.mkdir(parents=True, exist_ok=True)
    if arguments.way:
        train(arguments)
        return 0
    runs, how = {}, {way: way_of(way, arguments.gpus).how for way in arguments.sync}
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if arguments.gpus == 4 else []
    for way in arguments.sync:  # each in a process of its own: refit.trl replaces methods of TRL
        print(f"\nweights by {way}: {how[way]}", flush=True)
        process = subprocess.Popen([sys.executable, *launcher, __file__, *sys.argv[1:], "--way", way])
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for that process, which then ends its server
        status = process.wait()
        signal.signal(signal.SIGINT, before)  # the next process would inherit that it is ignored
        if status != 0:
            return 2
        runs[way] = json.loads((BUILD / f"{way}.json").read_text())
    show(runs, how, BUILD / "reward.svg")
    flat = [way for way, rows in runs.items() if len(rows) >= 30 and rows[-1]["reward"] < 0.3]
    if flat:
        print(f"grpo.py: weights by {' and '.join(flat)}: the last reward is below 0.3", file=sys.stderr)
    return 1 if flat else 0


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
                   "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    sys.exit(main())
