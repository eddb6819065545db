#!/usr/bin/env bash
# Training phase, step and head on one GPU, in under 8 minutes and without a network. PYTHON chooses the
# interpreter, the first of CUDA_VISIBLE_DEVICES the GPU; arguments go to gpu_steps.py. Results are written to
# benchmarks/results/gpu_bf16.json.
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ -z "${PYTHON:-}" ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
devices="${CUDA_VISIBLE_DEVICES-0}"
export HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="${devices%%,*}" # one, or Trainer would use them all
"$PYTHON" - <<'CHECK'
import sys
from importlib.util import find_spec

needed = ("torch", "transformers", "accelerate", "datasets", "tokenizers")
missing = [name for name in needed if find_spec(name) is None]
if missing:
    sys.exit(f"{sys.executable} lacks {', '.join(missing)}; set PYTHON to an interpreter that has them")
CHECK
exec "$PYTHON" benchmarks/gpu_steps.py "$@"
