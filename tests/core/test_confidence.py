"""Confidence sequences: the capital against a loop, and false alarms of runs with many looks."""

from __future__ import annotations

import math
import random

import pytest
import torch

from groupwise.core.confidence import gain_interval, log_capital, look_level

PROMPTS, COMPLETIONS, LOOKS = 50, 4, 20
ZERO = torch.tensor([0.5], dtype=torch.float64)  # a gain of 0, on the scale [0, 1]


def capital_loop(values: list[float], mean: float, alpha: float) -> float:
    """Log of the hedged capital, one bet after the other."""
    n, up, down = len(values), 1.0, 1.0
    seen, squares, variance = 0.0, 0.0, 0.25
    for t, x in enumerate(values, 1):
        bet = math.sqrt(2 * math.log(2 / alpha) / (n * variance))
        up *= 1 + min(bet, 0.5 / mean) * (x - mean)
        down *= 1 - min(bet, 0.5 / (1 - mean)) * (x - mean)
        seen += x
        squares += (x - (0.5 + seen) / (t + 1)) ** 2
        variance = (0.25 + squares) / (t + 1)
    return math.log(max(up, down) / 2)


@pytest.mark.parametrize("alpha", [0.05, 0.001])
def test_the_capital_against_a_loop(alpha):
    rng = random.Random(1)
    values = [rng.betavariate(0.3, 0.5) for _ in range(40)]
    means = [0.05, 0.3, 0.5, 0.95]
    got = log_capital(torch.tensor([values]), torch.tensor(means, dtype=torch.float64), alpha)
    expected = [capital_loop(torch.tensor(values).tolist(), mean, alpha) for mean in means]
    assert got.shape == (1, 4) and got[0].tolist() == pytest.approx(expected, abs=1e-9)


def test_the_interval_has_the_means_with_too_little_capital_rounded_outwards():
    rng = random.Random(2)
    gains = [rng.choice([-0.25, 0.0, 0.25, 0.5]) for _ in range(60)]
    low, high = gain_interval(torch.tensor(gains), look=3)
    level, scaled = 0.05 / 12, [(gain + 1) / 2 for gain in gains]
    assert low < sum(gains) / 60 < high
    for end, inwards in ((low, 0.001), (high, -0.001)):
        outside, inside = ((gain + 1) / 2 for gain in (end - inwards / 10, end + 1.1 * inwards))
        assert capital_loop(scaled, outside, level) > math.log(1 / level)
        assert capital_loop(scaled, inside, level) < math.log(1 / level)


def test_levels_add_up_to_the_error_of_the_run():
    assert sum(look_level(look) for look in range(1, 100_000)) == pytest.approx(0.05, rel=1e-4)
    assert gain_interval(torch.zeros(30), 50)[1] > gain_interval(torch.zeros(30), 1)[1]


def test_few_prompts_give_wide_intervals_within_the_range():
    assert gain_interval(torch.tensor([1.0]), 1) == (-1.0, 1.0)
    low, high = gain_interval(torch.ones(200), 1)
    assert 0.9 < low < 1.0 and high == 1.0


@pytest.mark.parametrize("differences", [[], [0.0, 1.5], [math.nan]])
def test_values_outside_the_range_are_refused(differences):
    with pytest.raises(ValueError, match="differences must be"):
        gain_interval(torch.tensor(differences), 1)


def test_looks_are_counted_from_one():
    with pytest.raises(ValueError, match="look=0; evaluations are counted from 1"):
        gain_interval(torch.zeros(3), 0)


def curves(count: int, gain: float, seed: int) -> torch.Tensor:
    """Differences (count, LOOKS, PROMPTS) of runs that are compared with one first evaluation each."""
    generator = torch.Generator().manual_seed(seed)
    chance = torch.rand(count, 1, PROMPTS, generator=generator, dtype=torch.float64).square() * (1 - gain)
    trials = torch.full((), float(COMPLETIONS), dtype=torch.float64)

    def passed(probability: torch.Tensor) -> torch.Tensor:
        return torch.binomial(trials.expand_as(probability).contiguous(), probability, generator=generator)

    later = passed((chance + gain).expand(-1, LOOKS, -1).contiguous())
    return (later - passed(chance)) / COMPLETIONS


def alarms_of_the_sequence(differences: torch.Tensor) -> float:
    """Share of runs with an interval that excludes 0 at any look."""
    alarm = torch.zeros(len(differences), dtype=torch.bool)
    for look in range(1, LOOKS + 1):
        level = look_level(look)
        capital = log_capital((differences[:, look - 1] + 1) / 2, ZERO, level)
        alarm |= capital[:, 0] >= math.log(1 / level)
    return alarm.double().mean().item()


def alarms_of_fixed_intervals(differences: torch.Tensor) -> float:
    half = 1.96 * differences.std(-1) / math.sqrt(PROMPTS)
    return (differences.mean(-1).abs() > half).any(-1).double().mean().item()


def test_looking_at_every_evaluation_raises_few_false_alarms():
    """10,000 runs without any change."""
    unchanged = curves(10_000, 0.0, seed=0)
    assert alarms_of_the_sequence(unchanged) <= 0.05
    assert alarms_of_fixed_intervals(unchanged) > 0.3  # the same check fails for intervals of one look


def test_a_real_gain_is_found():
    assert alarms_of_the_sequence(curves(300, 0.25, seed=1)) > 0.9
