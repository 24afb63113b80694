#!/usr/bin/env bash
# Sourced by the benchmarks: exits with 2 unless each of these programs is in a
# folder.
#
# usage: . examples/find-programs.sh FOLDER PROGRAM...
folder=$1
shift
for program in "$@"; do
  if [ ! -x "$folder/$program" ]; then
    echo "$(basename "$0"): no $program in $folder; build first: cmake --preset release && cmake --build --preset release --target refit_tools" >&2
    exit 2
  fi
done
