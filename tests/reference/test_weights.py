"""Normalisers over windows of several micro-batches and ranks, against the loops."""

from __future__ import annotations

import pytest
import torch
from support.oracles import cases
from support.oracles.oracle import NORMALISER_OF, update_weights

from groupwise.core.objectives import OBJECTIVES
from groupwise.core.weights import WindowCounts

BUILT_IN = sorted(set(NORMALISER_OF.values()))  # test_variants.py has the others
A = [[1.0, 1, 1, 0], [1, 0, 1, 0]]
B = [[0.0, 0, 0, 0], [1, 1, 1, 1]]
C = [[1.0, 0, 0, 0], [0, 0, 0, 0]]
WINDOWS = {
    "one": [[A]],
    "accumulated": [[A, B, C]],
    "ranks": [[A], [C]],
    "both": [[A, B], [C, B], [C, C]],
    "uneven": [[A, B[:1]], [C, B[1:]]],
    "nothing to learn from": [[C[1:], B[:1]]],
}


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("normaliser", BUILT_IN)
def test_normalisers(normaliser, window):
    masks = [row for rank in window for micro in rank for row in micro]
    expected = update_weights(normaliser, window, 7)
    for r, rank in enumerate(window):
        for m, micro in enumerate(rank):
            counts = WindowCounts(len(masks), int(sum(map(sum, masks))), len(rank), len(window), 7)
            weights = cases.weights(normaliser, torch.tensor(micro, dtype=torch.float64), counts)
            # Gradients are averaged over ranks after this.
            averaged = weights / len(window)
            torch.testing.assert_close(
                averaged, torch.tensor(expected[r][m], dtype=torch.float64), rtol=1e-14, atol=0.0
            )


@pytest.mark.parametrize("window", [WINDOWS["one"], WINDOWS["accumulated"], WINDOWS["both"]])
def test_a_mean_adds_up_to_one(window):
    """Token means sum to 1; sequence means to the share of sequences that have a token."""
    masks = [row for rank in window for micro in rank for row in micro]
    counts = WindowCounts(len(masks), int(sum(map(sum, masks))), len(window[0]), len(window), 7)
    total = dict.fromkeys(BUILT_IN, 0.0)
    for rank in window:
        for micro in rank:
            for name in BUILT_IN:
                total[name] += cases.weights(name, torch.tensor(micro), counts).sum().item() / len(window)
    filled = sum(any(row) for row in masks) / len(masks)
    assert total["token_mean"] == pytest.approx(1.0)
    assert total["local_token_mean"] == pytest.approx(1.0)
    assert total["sequence_mean"] == pytest.approx(filled)
    assert total["sequence_sum"] == pytest.approx(counts.tokens / counts.sequences)
    assert total["constant_length"] == pytest.approx(counts.tokens / counts.sequences / 7)


@pytest.mark.parametrize("name", sorted(NORMALISER_OF))
def test_each_loss_has_its_normaliser(name):
    assert OBJECTIVES[name].normalizer == NORMALISER_OF[name]


@pytest.mark.parametrize("normaliser", BUILT_IN)
def test_truncated_rows_weigh_nothing_and_still_count(normaliser):
    """A truncated completion loses its tokens, not its place among the sequences."""
    whole = torch.tensor(A, dtype=torch.float64)
    truncated = whole * torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    weights = cases.weights(normaliser, truncated, WindowCounts(2, 2, 1, 1, 4))
    assert weights[0].tolist() == [0.0] * 4
    # Second row, per token: 1/(2·2), 1/2, 1/(2·4), 1/2, 1/2.
    expected = {
        "sequence_mean": 0.25,
        "local_token_mean": 0.5,
        "constant_length": 0.125,
        "token_mean": 0.5,
        "sequence_sum": 0.5,
    }[normaliser]
    assert weights[1].tolist() == [expected, 0.0, expected, 0.0]
