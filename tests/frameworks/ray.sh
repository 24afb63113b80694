#!/usr/bin/env bash
# Refits between actors of a real Ray on this machine, without GPUs, and lets actors die. Installs Ray and numpy (0.5 GB,
# build/venv-ray). The release preset and its package refit_package must be built; it needs libucx0.
#
# usage: tests/frameworks/ray.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

release=2.60.0 # the one number to raise for a new release

venv=build/venv-ray
. tests/frameworks/packages.sh
if ! "$venv/bin/python" -c "import importlib.metadata as metadata, numpy; assert metadata.version('ray') == '$release'" 2>/dev/null; then
  make_venv
  fetch "ray==$release" numpy
fi
# Ray gives its processes 30 s to start, which a loaded machine exceeds.
export RAY_raylet_start_wait_time_s=180 RAY_worker_register_timeout_seconds=180
PYTHONPATH=build/release/python:examples/python exec "$venv/bin/python" -B tests/frameworks/ray_test.py
