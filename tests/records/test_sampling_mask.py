"""Kept tokens of truncated sampling: parts of sequences, batches and tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.records.sampling_mask import SamplingMask, SamplingMaskTiles, join_sampling_masks

POSITIONS = [[3, 5], [], [4], [0, 1, 6]]


def lists(kept: SamplingMask) -> list[list[int]]:
    return [part.tolist() for part in kept.ids.split(kept.counts.tolist())]


def test_parts_of_a_sequence():
    kept = SamplingMask.from_lists(POSITIONS)
    assert kept.ids.dtype == kept.counts.dtype == torch.int32
    for length in range(6):
        first = kept.first(length)
        assert len(first) == min(length, 4) and lists(first) == POSITIONS[:length]
        assert first.ids.untyped_storage().nbytes() == 4 * len(first.ids)  # holds no memory of the others
    joined = SamplingMask.concatenate([kept.first(2), SamplingMask.whole_vocabulary(2), kept])
    assert lists(joined) == [[3, 5], [], [], [], *POSITIONS]


def test_rows_of_a_batch():
    row = SamplingMask.from_lists(POSITIONS)
    # start 2, width 7: two columns before each sequence, and one after the longest
    joined = join_sampling_masks([row, None, row.first(1)], [7, 7, 7], start=2)
    expected = [[], [], *POSITIONS, []] + [[]] * 7 + [[], [], [3, 5], [], [], [], []]
    assert lists(joined) == expected
    assert lists(join_sampling_masks([row, row.first(1)], [4, 1])) == [*POSITIONS, [3, 5]]
    assert join_sampling_masks([None, SamplingMask.whole_vocabulary(3)], [3, 3]) is None


@pytest.mark.slow
@given(
    positions=st.lists(st.sets(st.integers(0, 10), max_size=11).map(sorted), min_size=1, max_size=9),
    rows=st.integers(1, 9),
    columns=st.integers(1, 11),
)
def test_tiles_are_parts_of_the_mask(positions, rows, columns):
    mask = torch.tensor([[not kept or v in kept for v in range(11)] for kept in positions])
    tiles = SamplingMaskTiles.on(torch.device("cpu"), SamplingMask.from_lists(positions))
    for top in range(0, len(positions), rows):
        for left in range(0, 11, columns):
            part = slice(top, min(top + rows, len(positions))), slice(left, min(left + columns, 11))
            tile = tiles.tile(*part)
            assert torch.equal(tile, mask[part]) and tile.is_contiguous()
