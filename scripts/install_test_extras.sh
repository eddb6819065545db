#!/usr/bin/env bash
# Installs the optional packages that tests use into the given virtual environment; a test of what is left out is skipped.
set -euo pipefail
list=$(dirname "$0")/test_extras.txt
left_out='^$'
if ! command -v cc >/dev/null; then
    echo "No C compiler: pycosat cannot be built, tests of reasoning-gym are skipped." >&2
    left_out='^(pycosat|reasoning-gym)=='
fi
# DeepSpeed's operators are compiled when they are used, and the tests use none.
options=(--no-deps --no-build-isolation --no-compile)
grep -Ev "$left_out" "$list" | DS_BUILD_OPS=0 "$1/bin/python" -m pip install -q "${options[@]}" -r /dev/stdin
for library in openenv verifiers; do
    "$1/bin/python" -m pip install -q --no-deps --no-compile --upgrade --target "$1/$library" -r "$(dirname "$0")/$library.txt"
done
