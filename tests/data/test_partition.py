"""Parts of about equal cost: every index once, and close to the best possible split."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from groupwise.data.rebalancing import balanced_parts


@given(st.lists(st.integers(0, 50), min_size=0, max_size=7), st.integers(1, 3))
def test_every_index_once_and_within_four_thirds_of_the_best(costs, parts):
    found = balanced_parts(costs, parts)
    assert sorted(itertools.chain(*found)) == list(range(len(costs))) and len(found) == parts
    best = min(
        max(sum(c for c, p in zip(costs, choice, strict=True) if p == part) for part in range(parts))
        for choice in itertools.product(range(parts), repeat=len(costs))
    )
    assert max(sum(costs[i] for i in part) for part in found) <= 4 / 3 * best


def test_the_largest_goes_first():
    assert balanced_parts([1, 5, 4, 2], 2) == [[0, 1], [2, 3]]


def test_fewer_costs_than_parts_leave_lists_empty():
    assert balanced_parts([3], 3) == [[0], [], []]
