#!/usr/bin/env bash
# Tests private symbols of other libraries (tests/compat) in a fresh virtual environment, then trains for two steps.
#   scripts/compat.sh PYTHON oldest|newest
# "oldest" installs the lower bounds of pyproject.toml, "newest" what the package index has.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=build/compat/$2
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
