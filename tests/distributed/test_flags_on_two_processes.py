"""A callback or a full disk that acts on one of two processes acts on both: none waits for the other.

Files: ``hf/callbacks.py``, ``hf/run_directory.py``, ``distributed.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.workers import flags_worker
from support.workers.launch import run_ranks

pytestmark = pytest.mark.distributed


#: Saved steps, evaluated steps and the last of at most three steps, as on one process.
EXPECTED = {
    "stop at the end of a step": [[], [], 1],
    "stop at the beginning of a step": [[], [], 1],
    "stop within a step": [[], [], 1],
    "save, evaluate after a log, stop after an evaluation": [[1], [2], 2],
    "save after a log, stop after a save": [[1], [], 1],
}


@pytest.mark.slow
def test_flags_and_errors_of_a_rank_reach_the_other(tmp_path: Path) -> None:
    done = run_ranks(flags_worker.__file__, tmp_path, timeout=200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        errors = found.pop("errors")
        assert found.pop("logs") == [1, 2, 3]
        assert found == EXPECTED
        assert "checkpoint-1" in errors[rank] and "the disk is full" in errors[rank]
        assert f"TrainingError: rank {1 - rank}: RuntimeError('the disk is full')" in errors[1 - rank]
