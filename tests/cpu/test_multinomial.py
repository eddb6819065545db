"""Random numbers of rows, which do not depend on the other rows of a batch. File: ``cpu/multinomial.py``."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.cpu.multinomial import RowStreams
from groupwise.errors import BackendError
from groupwise.random_state import DrawnFrom

WORD = 2**64


def split_mix(seed: int, count: int) -> list[float]:
    """Numbers below 1 of Steele and others, Fast splittable pseudorandom number generators, in integers."""
    state, numbers = seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % WORD
        bits = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % WORD
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % WORD
        numbers.append(((bits ^ bits >> 31) >> 11) / 2**53)
    return numbers


def test_rows_draw_the_numbers_of_their_seeds_in_any_batch() -> None:
    seeds = [0, 1, 2, 2**62 - 1, 2**62]
    streams = RowStreams(seeds)
    expected = torch.tensor([split_mix(seed, 3) for seed in seeds], dtype=torch.float64)
    assert torch.equal(streams.draw(), expected[:, :1])
    assert torch.equal(streams.draw(torch.tensor([3, 1])), expected[[3, 1], 1:2])
    assert torch.equal(streams.draw(torch.tensor([4])), expected[4:, 2:])


def test_numbers_of_neighbouring_seeds_are_uniform_and_independent() -> None:
    streams = RowStreams(range(200))
    drawn = torch.cat([streams.draw() for _ in range(200)], dim=1)
    counts = (drawn * 16).long().flatten().bincount(minlength=16)
    mean = drawn.numel() / 16
    assert ((counts - mean) ** 2 / mean).sum() < 37.7  # 99.9 % of chi-square with 15 degrees of freedom
    for one, other in ((drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1])):
        correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(one.numel())


def test_a_row_without_probabilities_is_an_error() -> None:
    probabilities = torch.rand(4, 600).softmax(-1)
    probabilities[2, 7] = torch.nan
    with pytest.raises(BackendError, match="NaN or infinite"):
        RowStreams([1, 2, 3, 4]).sample(probabilities)


def test_several_draws_of_a_row_are_without_replacement() -> None:
    """P(i, j) = p_i p_j / (1 - p_i), for rows in any batch; a row with two tokens left draws others last."""
    p = [0.5, 0.3, 0.2, 0.0]
    with DrawnFrom(RowStreams(range(6000))):
        pairs = torch.multinomial(torch.tensor([p]).repeat(6000, 1), num_samples=2)
    for i in range(4):
        for j in range(4):
            expected = 0.0 if i == j else p[i] * p[j] / (1 - p[i])
            share = (pairs == torch.tensor([i, j])).all(1).double().mean().item()
            # Four standard errors of a share of 6,000.
            assert abs(share - expected) <= 4 * math.sqrt(expected * (1 - expected) / 6000), (i, j)
    with DrawnFrom(RowStreams([41, 7])):
        assert torch.equal(torch.tensor([p, p]).multinomial(2), pairs[[41, 7]])
    with DrawnFrom(RowStreams(range(50))):
        drawn = torch.multinomial(torch.tensor([[0.0, 0.0, 0.6, 0.4]]).repeat(50, 1), 4)
    assert torch.equal(drawn.sort().values, torch.arange(4).expand(50, 4))
    assert set(drawn[:, :2].flatten().tolist()) == {2, 3}
