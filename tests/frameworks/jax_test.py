#!/usr/bin/env python3
"""examples/jax: a JAX trainer without torch feeds an engine by the C library and the 128-byte id.

usage: jax_test.py --jax PYTHON [--engine torch|vllm]      (jax.sh installs JAX)

The trainer is the example, in JAX's environment. The engine is this process: a real vLLM, or a torch module with the tensors of vLLM's
workers. After each update the trainer has the digests of both sides compared. After the last the engine's tensors are compared with the
checkpoint that the trainer wrote; and a vLLM generates other tokens than before.
"""
import argparse
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS, TIMEOUT_SECONDS = 3, 120
CONFIG = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512, "vocab_size": 512, "tie_word_embeddings": False,
          "dtype": "bfloat16", "torch_dtype": "bfloat16", "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
          "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


class Torch:
    """A module with a worker's tensors."""

    def __init__(self, work, plan):
        import torch

        self.plan, dtypes = plan, {"bf16": torch.bfloat16}
        self.tensors = {name: torch.zeros(info.shape, dtype=dtypes[info.dtype]) for name, info in plan.tensors(1).items()}
        self.name = f"torch {torch.__version__}"

    def join(self, unique_id):
        import refit

        self.executor = refit.join(self.plan, 1, self.tensors, unique_id=unique_id, device="cpu", timeout=TIMEOUT_SECONDS)

    def update(self):
        self.executor.run(check=True, timeout=TIMEOUT_SECONDS)

    def compare(self, checkpoint):
        import refit

        return refit.check(self.executor, checkpoint, refit=False)


class Vllm:
    """A vLLM in this process, by the worker extension."""

    def __init__(self, work, plan):
        sys.path.append(str(ROOT / "tests" / "engines"))
        import json

        import vllm_cpu

        (work / "config.json").write_text(json.dumps(CONFIG))
        self.plan, self.generated = plan, vllm_cpu.generated
        self.llm = vllm_cpu.engine_of(work, worker_extension_cls="refit.vllm.WorkerExtension", load_format="dummy")
        self.before = [list(tokens) for tokens in self.generated(self.llm)]
        import vllm

        self.name = f"vLLM {vllm.__version__}"

    def join(self, unique_id):
        import refit.vllm

        refit.vllm.init(self.llm, self.plan, unique_id, check_backends=False, timeout=TIMEOUT_SECONDS)

    def update(self):
        import refit.vllm

        refit.vllm.update(self.llm, check=True, timeout=TIMEOUT_SECONDS)

    def compare(self, checkpoint):
        import refit.vllm

        assert [list(tokens) for tokens in self.generated(self.llm)] != self.before
        return refit.vllm.compare(self.llm, checkpoint, refit=False)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jax", required=True, help="a Python with JAX")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    arguments = parser.parse_args()
    import refit

    with tempfile.TemporaryDirectory(prefix="refit-") as scratch:
        work = pathlib.Path(scratch)
        plan = refit.compile({"model": CONFIG, "source": {"layout": "fsdp"}, "destination": {"layout": "vllm"}})
        plan.save(work / "plan.refit")
        engine = (Vllm if arguments.engine == "vllm" else Torch)(work, plan)
        library = ROOT / "build" / "release" / "executor" / "librefit.so"
        trainer = subprocess.Popen([arguments.jax, ROOT / "examples" / "jax" / "train.py", "--library", library, "--plan", work / "plan.refit",
                                    "--id", work / "id", "--steps", str(STEPS), "--save", work / "checkpoint"], stdout=subprocess.PIPE, text=True)
        began = time.monotonic()
        while not (work / "id").exists():
            assert trainer.poll() is None and time.monotonic() - began < TIMEOUT_SECONDS, "the trainer made no id"
            time.sleep(0.05)
        engine.join((work / "id").read_bytes())
        for _ in range(STEPS):
            engine.update()
        said, _ = trainer.communicate(timeout=TIMEOUT_SECONDS)
        assert trainer.returncode == 0 and said.count("checked") == STEPS, said
        report = engine.compare(work / "checkpoint")
        assert report.ok, report
        print(said, end="")
        print(f"| JAX | a trainer without torch, {engine.name} | {STEPS} updates, checked | {report.elements} elements equal |")


if __name__ == "__main__":
    sys.exit(main())
