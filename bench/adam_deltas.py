#!/usr/bin/env python3
"""What refits send of a model that Adam trains: rate of change, rung and bytes at each refit, by learning rate.

usage: adam_deltas.py [--rates LR,LR,…] [--config FILE] [--refits N] [--steps N] [--bucket-megabytes N]

A small Qwen3 (or --config's model) of transformers with random weights is trained by policy gradients: random tokens with random
advantages, fp32 master weights under AdamW, 10 steps before the first refit. Two FSDP ranks feed two vLLM ranks in bf16 on
another host: threads of this process. A plan with options.delta finds what changed of the bf16 copies. The check of digests ends
each refit, so what is printed was also moved right.

Prints which share of all bf16 elements changed; of the share of each tensor the percentiles and the largest; the rung, and that of
as many changes if they were scattered evenly. Needs the package refit, PyTorch and transformers.
"""
import argparse
import concurrent.futures
import json
import pathlib
import warnings

import numpy as np
import torch
import transformers

import refit

EXAMPLE = pathlib.Path(__file__).resolve().parents[1] / "examples" / "models" / "qwen3-0.6b.json"
SMALLER = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
           "num_key_value_heads": 4, "head_dim": 64, "layer_types": None, "tie_word_embeddings": False}
TRAINERS = WORKERS = 2
WARM_STEPS = 10
SEQUENCES, TOKENS = 8, 64  # of a batch
RUNGS = (128, 64, 32, 16, 8, 4, 2)
TIMEOUT_SECONDS = 600.0


def compile_plan(config, bucket_bytes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", refit.JobWarning)
        return refit.compile({
            "model": config,
            "source": {"layout": "fsdp", "data_parallel": TRAINERS, "dtype": "fp32"},
            "destination": {"layout": "vllm", "tensor_parallel": WORKERS, "dtype": "bf16"},
            "topology": {"gpus_per_host": 2},
            "options": {"delta": True, "bucket_bytes": bucket_bytes}})


class Trained:
    """A model, its optimizer, and batches."""

    def __init__(self, config, learning_rate):
        torch.manual_seed(1)
        numbers = dict(config)
        numbers = transformers.AutoConfig.for_model(numbers.pop("model_type"), **numbers)
        self.model = transformers.AutoModelForCausalLM.from_config(numbers, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.01)
        self.vocabulary = numbers.vocab_size

    def step(self):
        tokens = torch.randint(self.vocabulary, (SEQUENCES, TOKENS))
        advantages = torch.randn(SEQUENCES)
        log_probs = torch.log_softmax(self.model(tokens).logits[:, :-1], dim=-1)
        taken = log_probs.gather(2, tokens[:, 1:, None]).sum(dim=(1, 2))
        loss = -(advantages * taken).mean() / TOKENS
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def shards(self, rank):
        """What FSDP2's `rank` holds: views of the parameters."""
        chunks = {name: parameter.detach().chunk(TRAINERS) for name, parameter in self.model.named_parameters()}
        return {name: chunk[rank] for name, chunk in chunks.items() if rank < len(chunk)}


class Ranks:
    """All ranks of the plan, as threads."""

    def __init__(self, plan, trained):
        fabric = refit.LocalFabric(plan.world_size)
        self.executors = [refit.Executor(plan, rank, fabric=fabric) for rank in range(plan.world_size)]
        workers = [{name: torch.zeros(info.shape, dtype=torch.bfloat16) for name, info in plan.tensors(rank).items()}
                   for rank in range(TRAINERS, plan.world_size)]
        tensors = [trained.shards(rank) for rank in range(TRAINERS)] + workers
        self.threads = concurrent.futures.ThreadPoolExecutor(plan.world_size)
        self._all(lambda rank: self.executors[rank].bind(tensors[rank], timeout=TIMEOUT_SECONDS))

    def _all(self, call):
        return list(self.threads.map(call, range(len(self.executors))))

    def refit(self):
        """The reports of the trainers."""
        self._all(lambda rank: self.executors[rank].run(timeout=TIMEOUT_SECONDS))
        return [executor.delta_report for executor in self.executors[:TRAINERS]]

    def close(self):
        self._all(lambda rank: self.executors[rank].close())
        self.threads.shutdown()


def bf16_bits(trained):
    """Of each parameter's bf16 copy."""
    return [parameter.detach().bfloat16().view(torch.int16) for parameter in trained.model.parameters()]


def rung_text(rung):
    return {0: "dense", 1: "whole"}.get(rung, f"1/{rung}")


def rung_evenly(changed):
    """The first rung with room for this share of each message."""
    return next((rung for rung in RUNGS if changed * rung <= 1), 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=lambda text: [float(rate) for rate in text.split(",")], default=[1e-7, 1e-6, 3e-6, 1e-5])
    parser.add_argument("--config", type=pathlib.Path, help="a config.json of transformers")
    parser.add_argument("--refits", type=int, default=4, help="behind the first, which is dense")
    parser.add_argument("--steps", type=int, default=1, help="of the optimizer before each refit")
    parser.add_argument("--bucket-megabytes", type=int, default=4, help="of a message, at most")
    options = parser.parse_args()
    config = json.loads(options.config.read_text()) if options.config else {**json.loads(EXAMPLE.read_text()), **SMALLER}
    plan = compile_plan(config, options.bucket_megabytes << 20)
    print("learning rate  changed %     10%    50%    90%   most    rung  evenly  MB sent  of dense", flush=True)
    for learning_rate in options.rates:
        trained = Trained(config, learning_rate)
        for _ in range(WARM_STEPS):
            trained.step()
        ranks = Ranks(plan, trained)
        ranks.refit()
        for _ in range(options.refits):
            before = bf16_bits(trained)
            for _ in range(options.steps):
                trained.step()
            reports = ranks.refit()
            rates = np.array([100 * (now != then).float().mean().item() for now, then in zip(bf16_bits(trained), before)])
            changed = sum(report.changed_elements for report in reports) / sum(report.elements for report in reports)
            sent, dense = (sum(getattr(report, of) for report in reports) for of in ("stored_bytes", "dense_bytes"))
            spread = " ".join(f"{share:6.2f}" for share in (*np.percentile(rates, (10, 50, 90)), rates.max()))
            print(f"{learning_rate:13.0e} {100 * changed:10.3f}  {spread}  {rung_text(max(report.rung for report in reports)):>6}"
                  f"  {rung_text(rung_evenly(changed)):>6}  {sent / 1e6:7.2f}  {sent / dense:8.3f}", flush=True)
        ranks.close()


if __name__ == "__main__":
    main()
