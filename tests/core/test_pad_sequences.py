"""Ragged lists to rectangles.

Files: ``core/padding.py``.
"""

from __future__ import annotations

import pytest
import torch

from groupwise.core.padding import length_mask, pad_sequences


def test_right_and_left():
    rows = [[1, 2, 3], [], [4]]
    assert pad_sequences(rows, 0).tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0]]
    assert pad_sequences(rows, 9, left=True).tolist() == [[1, 2, 3], [9, 9, 9], [9, 9, 4]]


@pytest.mark.parametrize(
    ("longest", "multiple", "width"), [(3, 4, 4), (4, 4, 4), (5, 4, 8), (0, 4, 4), (3, 1, 3), (3, None, 3)]
)
def test_width_is_rounded_up(longest, multiple, width):
    padded = pad_sequences([list(range(longest)), [7][:longest]], -1, multiple_of=multiple)
    assert padded.shape == (2, width)
    assert padded[0].tolist() == [*range(longest), *[-1] * (width - longest)]


def test_rounding_up_on_the_left():
    assert pad_sequences([[1, 2, 3]], 0, left=True, multiple_of=4).tolist() == [[0, 1, 2, 3]]


def test_no_token_at_all_still_has_a_column():
    assert pad_sequences([[], []], 5).tolist() == [[5], [5]]


def test_types():
    padded = pad_sequences([[0.5], torch.tensor([1.5, 2.5])], float("nan"), dtype=torch.float32)
    assert padded.dtype == torch.float32
    assert padded[1].tolist() == [1.5, 2.5]
    assert bool(padded[0, 1].isnan())
    assert pad_sequences([[1]], 0).dtype == torch.long
    assert pad_sequences([[1]], 0, device="cpu").tolist() == [[1]]


def test_length_mask():
    assert length_mask([2, 0, 3], 3).tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
    assert length_mask([2, 0, 3], 3, left=True).tolist() == [[0, 1, 1], [0, 0, 0], [1, 1, 1]]
    assert length_mask([1], 2).dtype == torch.long


def test_mask_and_padding_agree():
    rows = [[5, 6], [7], [8, 9, 1, 2]]
    for left in (False, True):
        padded = pad_sequences(rows, -1, left=left, multiple_of=3)
        mask = length_mask([len(row) for row in rows], padded.shape[1], left=left)
        assert torch.equal(padded != -1, mask.bool())
