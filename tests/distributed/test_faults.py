"""A run that is killed at random moments and goes on with other numbers of processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import faults

pytestmark = pytest.mark.distributed


def test_a_killed_run_goes_on_with_other_numbers_of_processes_as_one_history(tmp_path: Path) -> None:
    outcome = faults.run(tmp_path / "runs", kills=2, seed=1)
    assert faults.is_one_history(outcome), "\n".join(outcome.lines)
    assert len(outcome.lines) == 3
