"""A transformers model trained under FSDP2 and served tensor-parallel, all in processes of their own on the CPU."""
import os
import pathlib
import subprocess
import sys

import pytest

for needed in ("torch", "transformers", "accelerate"):
    pytest.importorskip(needed)

import refit

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python" / "end_to_end.py"


@pytest.mark.parametrize("model, destination_ranks, flags", [
    ("qwen3", 2, ["--colocated"]), ("qwen3_moe", 2, []), ("shapes", 2, [])])
def test_what_was_trained_is_what_is_served_to_the_bit(model, destination_ranks, flags):
    package = pathlib.Path(refit.__file__).parent.parent
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--model", model, "--destination-ranks", str(destination_ranks), *flags,
         "--iterations", "1"],
        capture_output=True, text=True, timeout=1200, env={**os.environ, "PYTHONPATH": str(package)})
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert f"{model}: 2 FSDP2 ranks -> {destination_ranks} tensor-parallel ranks" in ended.stdout
    assert "equal to the bit" in ended.stdout
