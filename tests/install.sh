#!/usr/bin/env bash
# Installs what a build of Refit needs on Debian 12 or Ubuntu 24.04, and only
# what is missing. Needs root or sudo for that; nothing else here does.
#
# usage: tests/install.sh [PACKAGE…]     these too
set -euo pipefail

packages=(g++ cmake ninja-build pkg-config python3 python3-numpy python3-dev python3-venv libabsl-dev llvm-14-dev libflatbuffers-dev
  flatbuffers-compiler rapidjson-dev libxxhash-dev libsodium-dev libgtest-dev libucx-dev
  iproute2 "$@")
missing=()
for package in "${packages[@]}"; do
  if ! dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed'; then
    missing+=("$package")
  fi
done
as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo); fi
update() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq
}
install() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

updated=false
if [ ${#missing[@]} -ne 0 ]; then
  echo "installing: ${missing[*]}" >&2
  update
  updated=true
  install "${missing[@]}"
fi

# The browser that looks at refit-report's pages. Ubuntu has it as a snap alone, which cannot read files of tests.
browser=chromium-headless-shell
if ! python3 "$(dirname "$0")/report/browser.py"; then
  echo "installing: $browser" >&2
  # It may be left out, so nobody is asked for a password.
  if [ ${#as_root[@]} -ne 0 ]; then as_root=(sudo -n); fi
  "$updated" || update || true
  install "$browser" 2>/dev/null ||
    echo "browser: $browser cannot be installed; the browser test of refit-report is left out" >&2
fi
