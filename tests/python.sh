#!/usr/bin/env bash
# Builds the wheel, installs it and runs its tests, as a user would.
#
# usage: tests/python.sh [--with-torch]
#
# Without a flag: what needs numpy alone. With --with-torch also torch, transformers, accelerate and matplotlib are
# installed (5 GB under build/), and the end-to-end runs train and serve small models in processes of their own: minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

tests/install.sh
venv=build/venv-wheel
packages=(pytest numpy ml_dtypes)
case "${1-}" in
  "") ;;
  --with-torch) packages+=(torch transformers accelerate matplotlib tqdm) ;;
  *) sed -n 's/^# usage: /usage: /p' "$0" >&2; exit 2 ;;
esac
python=/usr/bin/python3
if [ ! -x "$python" ]; then python=python3; fi
if [ ! -x "$venv/bin/python" ]; then "$python" -m venv "$venv"; fi

started=$SECONDS
"$venv/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}"
echo "== installed ${packages[*]}: $((SECONDS - started)) s"
started=$SECONDS
"$venv/bin/pip" install --quiet --disable-pip-version-check --force-reinstall --no-deps .
echo "== built and installed the wheel: $((SECONDS - started)) s"
"$venv/bin/refitc" --version
started=$SECONDS
"$venv/bin/python" -m pytest -p no:cacheprovider --durations=5
echo "== tested: $((SECONDS - started)) s"
