"""Rows of a rank, and agreement of ranks in one process; several processes are in tests/distributed."""

from __future__ import annotations

import pytest
from accelerate import Accelerator

from groupwise.distributed import RankSlice, any_rank, broadcast_from_first, is_sharded, rows_of_rank


def test_the_rows_of_all_ranks_are_disjoint_and_in_rank_order():
    assert [list(range(6))[rows_of_rank(rank, 2)] for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("rank", "rows", "prompts"), [(0, range(0, 2), [0]), (1, range(2, 4), [0, 1]), (2, range(4, 6), [1])]
)
def test_a_group_may_be_split_over_ranks(rank, rows, prompts):
    """Two prompts of three completions: six rows, of which each of three ranks has two."""
    own = RankSlice(num_generations=3, rank=rank, world_size=3)
    assert own.rows(2) == rows and own.prompts(2) == prompts


def test_one_process_agrees_with_itself_and_shards_nothing():
    accelerator = Accelerator(cpu=True)
    assert any_rank(accelerator, True) and not any_rank(accelerator, False)
    assert not is_sharded(accelerator)
    with pytest.raises(ZeroDivisionError):
        broadcast_from_first(lambda: 1 / 0, True, 1)
