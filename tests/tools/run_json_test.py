#!/usr/bin/env python3
"""refit-run --json: what it says of each refit.

usage: run_json_test.py BIN_DIR
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

BIN = pathlib.Path(sys.argv.pop(1)).resolve()
# Of each of two layers: q, k, v and o, and the three matrices of the MLP.
ELEMENTS = 2 * 7 * 256 * 512
MODEL = {"model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 512, "vocab_size": 40,
         "tie_word_embeddings": True, "torch_dtype": "bfloat16"}


class RunJsonTest(unittest.TestCase):
    def refits(self, dtype):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            job, plan = folder / "job.json", folder / "plan.refit"
            (folder / "config.json").write_text(json.dumps(MODEL))
            job.write_text(json.dumps({"model": "config.json", "source": {"layout": "megatron"},
                                       "destination": {"layout": "vllm", **dtype}}))
            subprocess.run([BIN / "refitc", job, "-o", plan], check=True, timeout=60)
            done = subprocess.run([BIN / "refit-run", plan, "--check", "--iterations", "2", "--json"],
                                  check=True, capture_output=True, text=True, timeout=60)
        return json.loads(done.stdout)["refits"]

    def test_elements_that_are_quantized_without_scratch_are_counted(self):
        refits = self.refits({"dtype": "fp8_e4m3_block128"})
        self.assertEqual([refit["fused_elements"] for refit in refits], [ELEMENTS, ELEMENTS])

    def test_a_refit_that_quantizes_nothing_fuses_nothing(self):
        self.assertEqual([refit["fused_elements"] for refit in self.refits({})], [0, 0])


if __name__ == "__main__":
    unittest.main()
