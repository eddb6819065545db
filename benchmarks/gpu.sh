#!/usr/bin/env bash
# Training phase, step and head on one GPU, in under 8 minutes and without a network. PYTHON chooses the
# interpreter, the first of CUDA_VISIBLE_DEVICES the GPU; arguments go to gpu_steps.py. Results are written to
# benchmarks/results/gpu_bf16.json.
#
#     benchmarks/gpu.sh weights [--model NAME]
#
# sends weights to a vLLM server instead: over CUDA IPC to one on the same GPU, then over NCCL if
# CUDA_VISIBLE_DEVICES names a second GPU for the server. Expected after the name of each transfer: five log lines, the
# first with staleness 0 and sampling/sampling_logp_difference/mean of the size of bf16 rounding (below 0.03), and
# train_runtime. None of this has run yet.
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
if [[ "${1:-}" != weights ]]; then
  exec "$PYTHON" benchmarks/gpu_steps.py "$@"
fi
shift
unset HF_HUB_OFFLINE
echo "CUDA IPC: trainer and server on one GPU"
"$PYTHON" examples/vllm_server.py --max_steps 5 --output_dir "$(mktemp -d)" "$@"
second=$(cut -s -d, -f2 <<<"$devices")
if [[ -z "$second" ]]; then
  echo "NCCL: left out; set CUDA_VISIBLE_DEVICES to two GPUs"
  exit
fi
echo "NCCL: trainer and server on a GPU each"
model=$("$PYTHON" -c 'import sys; sys.path.insert(0, "examples"); import smollm2
print(smollm2.example_parser("", "").parse_known_args()[0].model)' "$@")
CUDA_VISIBLE_DEVICES=$second "$PYTHON" -m groupwise.cli vllm-serve --model "$model" --port 8766 --max_model_length 256 &
server=$!
trap 'kill "$server"' EXIT
"$PYTHON" examples/vllm_server.py --max_steps 5 --output_dir "$(mktemp -d)" --model "$model" --server http://127.0.0.1:8766
