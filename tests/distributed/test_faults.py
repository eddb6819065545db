"""Faults of one of several processes: a run is one history, or ends with a message and resumes.

``make faults`` and ``make faults ARGS=--grid`` run more kills, and all faults at all stages.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import fault_grid, faults

pytestmark = pytest.mark.distributed

#: Faults that need no server, and every stage; `make faults ARGS=--grid` has all.
CELLS = (
    *("SIGKILL/evaluate", "exception/sync", "hang/reward", "full disk/save"),
    *("lost connection/update", "SIGTERM/generate"),
)


@pytest.mark.representative("a killed run goes on with another number of processes")
@pytest.mark.slow
def test_a_killed_run_goes_on_with_other_numbers_of_processes_as_one_history(tmp_path: Path) -> None:
    outcome = faults.run(tmp_path / "runs", kills=2, seed=1)
    assert faults.is_one_history(outcome), "\n".join(outcome.lines)
    assert len(outcome.lines) == 3


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> fault_grid.Grid:
    return fault_grid.Grid(tmp_path_factory.mktemp("grid"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_a_fault_of_one_rank_hangs_nothing_and_changes_nothing(grid: fault_grid.Grid, name: str) -> None:
    (cell,) = (cell for cell in grid.cells if cell.name == name)
    result = grid.run(cell, seed=0)
    assert not result.is_wrong, result
    assert (result.message != "") == (result.outcome != fault_grid.SAME)


def test_the_grid_says_of_each_fault_and_stage_what_is_expected() -> None:
    cells = fault_grid.grid()
    assert len({cell.name for cell in cells}) == len(cells) == 13 * 6
    assert sum(cell.is_run for cell in cells) == 78 - 9
    ends = {cell.fault for cell in cells if cell.is_run and cell.expected != (fault_grid.SAME,)}
    assert ends == set(fault_grid.CAUSES)
