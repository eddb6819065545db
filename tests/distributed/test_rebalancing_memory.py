"""Rebalancing sends a row only to the rank that trains on it: memory does not grow with more ranks.

Files: ``data/exchange.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.workers import rebalancing_worker
from support.workers.launch import run_ranks
from support.workers.rebalancing_worker import PIXELS, ROWS

pytestmark = pytest.mark.distributed

TIMEOUT = 200  # seconds


@pytest.mark.representative("a rank receives only rows that it trains on")
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_receives_at_most_the_rows_that_it_trains_on(tmp_path: Path, world_size: int) -> None:
    done = run_ranks(rebalancing_worker.__file__, tmp_path, world_size=world_size, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world_size)]
    trained = sorted(row for rank in ranks for row in rank["rows"])
    assert trained == list(range(world_size * ROWS))
    for number, rank in enumerate(ranks):
        moved = [row for row in rank["rows"] if row // ROWS != number]
        assert moved
        # The image of a row is 1 MiB; tokens, serialization and the lengths of all rows take the rest.
        images = 4 * PIXELS * len(moved)
        assert images < rank["received"] + rank["lengths"] < 1.05 * images
        assert rank["received"] < 1.05 * rank["window"]
