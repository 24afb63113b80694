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
