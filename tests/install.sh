#!/usr/bin/env bash
# Installs what a build of Refit needs on Debian 12 or Ubuntu 24.04, and only
# what is missing. Needs root or sudo for that; nothing else here does.
set -euo pipefail

packages=(g++ cmake ninja-build pkg-config python3 python3-numpy python3-dev python3-venv libabsl-dev llvm-14-dev libflatbuffers-dev
  flatbuffers-compiler rapidjson-dev libxxhash-dev libsodium-dev libgtest-dev libucx-dev
  iproute2)
missing=()
for package in "${packages[@]}"; do
  if ! dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed'; then
    missing+=("$package")
  fi
done
if [ ${#missing[@]} -eq 0 ]; then exit 0; fi

echo "installing: ${missing[*]}" >&2
as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo); fi
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
  "${missing[@]}" >/dev/null
