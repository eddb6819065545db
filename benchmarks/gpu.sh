#!/usr/bin/env bash
# The first 30 minutes on a GPU: three calls of at most 10 minutes, without a network. PYTHON chooses the interpreter,
# the first of CUDA_VISIBLE_DEVICES the GPU. Each call writes its verdicts to benchmarks/results/gpu_CALL.json, or to
# the file after --output, and exits with 1 if a part failed.
#
#     benchmarks/gpu.sh check     # kernels against float64, two steps CPU against CUDA, waits per token
#     benchmarks/gpu.sh phases    # head, training phase, attention, decoding, memory, LoRA on a 7B shape
#     benchmarks/gpu.sh steps     # whole steps beside TRL, where it is installed
#     benchmarks/gpu.sh weights [--model NAME]
#
# The last sends weights to a vLLM server: over CUDA IPC to one on the same GPU, then over NCCL if
# CUDA_VISIBLE_DEVICES names a second GPU for the server. Expected after the name of each transfer: five
# log lines, the first with staleness 0 and sampling/sampling_logp_difference/mean of the size of bf16 rounding (below
# 0.03), and train_runtime. vllm_weight_check compares all values after every transfer: "does not compute with the
# trainer's weights" would name a tensor that arrived wrong. None of this has run yet.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in check | phases | steps | weights) ;; *)
  echo "usage: benchmarks/gpu.sh check | phases | steps [--output FILE], or weights [--model NAME]" >&2
  exit 2
  ;;
esac
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

needed = ("torch", "transformers", "accelerate", "tokenizers", "filelock", "yaml", "rich", "psutil")
missing = [name for name in needed if find_spec(name) is None]
if missing:
    sys.exit(f"{sys.executable} lacks {', '.join(missing)}; set PYTHON to an interpreter that has them")
for name, lacking in (("datasets", "the trainer works without"), ("peft", "LoRA"), ("trl", "steps beside TRL")):
    if find_spec(name) is None:
        print(f"{name} is not installed ({lacking})")
CHECK
if [[ "$1" != weights ]]; then
  exec "$PYTHON" benchmarks/gpu.py "$@"
fi
shift
unset HF_HUB_OFFLINE
export PYTHONPATH="examples:$PYTHONPATH"
five_steps() { # with the log of groupwise at INFO
  "$PYTHON" -c '
import logging, runpy
logging.basicConfig()
logging.getLogger("groupwise").setLevel("INFO")
runpy.run_path("examples/vllm_server.py", run_name="__main__")' --max_steps 5 --output_dir "$(mktemp -d)" "$@"
}
echo "CUDA IPC: trainer and server on one GPU"
five_steps "$@"
second=$(cut -s -d, -f2 <<<"$devices")
if [[ -z "$second" ]]; then
  echo "NCCL: left out; set CUDA_VISIBLE_DEVICES to two GPUs"
  exit
fi
model=$("$PYTHON" -c 'import smollm2
print(smollm2.example_parser("", "").parse_known_args()[0].model)' "$@")
port=8766
echo "NCCL: trainer and server on a GPU each"
CUDA_VISIBLE_DEVICES=$second "$PYTHON" -m groupwise.cli vllm-serve --model "$model" --port "$port" \
  --max_model_length 256 --weight_transfer nccl &
trap 'kill "$!"' EXIT
five_steps --model "$model" --server "http://127.0.0.1:$port"
