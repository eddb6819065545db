"""The training phase of both libraries is measured on given completions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.workers.launch import run

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "train_phase.py"
TINY = {"model": "random:2,32,2,1,64,64", "prompt_tokens": 16, "completion_tokens": 16, "windows": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "layout"), [("auto", "shared_prefix"), ("trl", "padded")])
def test_a_window_of_each_library_is_measured(method, layout, tmp_path):
    done = run(SCRIPT, "--worker", method, "--spec", json.dumps(TINY), directory=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    measured = json.loads(done.stdout.split("RESULT ")[1])
    assert measured["layout"] == layout and len(measured["seconds"]) == 1 and measured["seconds"][0] > 0
