#!/usr/bin/env bash
# Refits a live SGLang (the release that tests/sglang_venv.sh names) on the CPU, over UCX: needs libucx0. The release preset and
# its package refit_package must be built. SGLang finds refit.sglang by the entry point that pyproject.toml declares.
#
# usage: tests/engines/sglang.sh [--case NAME …]
set -euo pipefail
cd "$(dirname "$0")/../.."
tests/sglang_venv.sh
python=$PWD/build/venv-sglang/bin/python
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" - "$site" <<'PY'
import pathlib
import sys
import tomllib

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
plugins = project["entry-points"]["sglang.srt.plugins"] | {"refit_test": "sglang_worker:register"}
metadata = pathlib.Path(sys.argv[1]) / "refit-0.dist-info"
metadata.mkdir()
(metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: refit\nVersion: 0\n")
(metadata / "entry_points.txt").write_text(
    "[sglang.srt.plugins]\n" + "".join(f"{name} = {value}\n" for name, value in plugins.items()))
PY
export PYTHONPATH="$PWD/build/release/python:$site:$PWD/tests/engines/sglang_site"
export SGLANG_USE_CPU_ENGINE=1 GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
export PYTHONPYCACHEPREFIX=$PWD/build/pycache
"$python" tests/engines/sglang_cpu.py "$@"
