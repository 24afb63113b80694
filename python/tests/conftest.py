import json
import pathlib

import pytest


@pytest.fixture
def tiny_job():
    """Two source ranks that cut rows, two destination ranks that cut columns; a norm that all hold."""
    return {
        "model": [{"name": "layers.0.weight", "shape": [8, 6], "dtype": "fp32"},
                  {"name": "layers.1.weight", "shape": [8, 6], "dtype": "fp32"},
                  {"name": "norm.weight", "shape": [6], "dtype": "fp32"}],
        "source": {"layout": "generic", "meshes": {"m": {"axes": {"dp": 2}}},
                   "tensors": [{"match": "layers.*", "mesh": "m", "placements": ["Shard(0)"]},
                               {"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
        "destination": {"layout": "generic", "meshes": {"m": {"axes": {"tp": 2}}},
                        "tensors": [{"match": "layers.*", "mesh": "m", "placements": ["Shard(1)"]},
                                    {"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
    }


@pytest.fixture
def job_file(tiny_job, tmp_path):
    """The same job as a file would say it."""
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**tiny_job, "model": {"parameters": tiny_job["model"]}}))
    return path


@pytest.fixture
def models():
    return pathlib.Path(__file__).resolve().parents[2] / "examples" / "models"


@pytest.fixture
def tower_job():
    """Moves a model with its vision tower into vLLM."""
    config = {
        "model_type": "qwen3_vl", "dtype": "float32", "tie_word_embeddings": False,
        "text_config": {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 64,
                        "num_hidden_layers": 1, "intermediate_size": 8},
        "vision_config": {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "patch_size": 2, "out_hidden_size": 8,
                          "num_position_embeddings": 4, "deepstack_visual_indexes": []},
    }  # fmt: skip
    return {"model": config, "source": {"layout": "fsdp", "vision": True}, "destination": {"layout": "vllm"}}
