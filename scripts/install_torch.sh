#!/usr/bin/env bash
# Installs the pinned torch into the given virtual environment, without CUDA packages where there is no NVIDIA GPU.
# There --with-triton adds Triton, which Liger and the tests of the kernels need; CUDA builds of torch bring their own.
set -euo pipefail
python=$1/bin/python
version=$(sed -n 's/^torch==//p' constraints.txt)

if [ "${2:-}" = --with-triton ] && [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then
    "$python" -m pip install -q triton==3.9.0
fi
if "$python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$version')" 2>/dev/null; then
    exit 0
fi
if command -v nvidia-smi >/dev/null || [ "$(uname -s)" != Linux ]; then
    exec "$python" -m pip install --no-compile "torch==$version"
fi
# A local or configured source may have the CPU build; PyTorch's own index has it for everybody else.
"$python" -m pip install --no-compile "torch==$version+cpu" 2>/dev/null ||
    "$python" -m pip install --no-compile "torch==$version" --index-url https://download.pytorch.org/whl/cpu || {
    echo "No CPU build of torch $version was found for $("$python" --version). Install one into $1, then run make again." >&2
    exit 1
}
