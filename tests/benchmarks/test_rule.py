"""The rule of the learning benchmarks: decisions about given cells, and false alarms of simulated runs."""

from __future__ import annotations

import math

import figures
import pytest
import rule
import run
import torch

from groupwise.core.confidence import gain_interval
from groupwise.core.pass_at_k import mean_with_interval


@pytest.mark.parametrize(
    ("gains", "halves", "verdict"),
    [
        # Mean 0.4, deviation 0.2: Student 4.303 · 0.2 / √3 = 0.497; with 0.1 over questions h = 0.507.
        ([0.2, 0.4, 0.6], [0.1, 0.1, 0.1], "none above 91 points"),
        # Deviation 0: h is the mean of the half-widths over questions, 0.2.
        ([0.21, 0.21, 0.21], [0.1, 0.2, 0.3], "gain"),
        ([-0.21, -0.21, -0.21], [0.1, 0.2, 0.3], "loss"),
        ([0.2, 0.2, 0.2], [0.2, 0.2, 0.2], "none above 40 points"),  # a difference of h is not seen
        # Deviation 0.01: Student 0.02484; h = √(0.02484² + 0.03²) = 0.03895 < 0.04.
        ([0.03, 0.04, 0.05], [0.03, 0.03, 0.03], "gain"),
        ([0.028, 0.038, 0.048], [0.03, 0.03, 0.03], "none above 8 points"),
        # Two runs have no interval over runs.
        ([0.1, 0.3], [0.15, 0.15], "gain"),
    ],
)
def test_decisions_about_given_gains(gains, halves, verdict):
    assert rule.gain(gains, halves).verdict() == verdict


def test_runs_with_intervals_that_exclude_0_are_counted_if_no_gain_is_seen():
    bounds = [(0.1, 0.4), (-0.1, 0.3), (0.2, 0.6)]
    assert rule.gain([0.0, 0.2, 0.7], [0.1] * 3, bounds).verdict() == "in 2 of 3 runs"
    assert rule.gain([0.5, 0.5, 0.5], [0.1] * 3, bounds).verdict() == "gain"
    assert rule.gain([0.0, 0.2, 0.7], [0.1] * 3, [(-0.4, -0.1)] * 3).verdict() == "in 3 of 3 runs"


@pytest.mark.parametrize(
    ("cell", "task", "shown"),
    [
        # From the files: gains 10.94, 16.67, 15.10, half-widths over questions 7.02, 7.92, 8.40 points:
        # mean 14.24, Student 7.37, questions 7.78, h = 10.72.
        ("grpo_outcome", "chain_sum", "+14.2% ± 10.8%: gain"),
        ("grpo_outcome", "letter_counting", "-4.0% ± 6.4%: none above 11 points"),
        ("trl", "chains", "+40.8% ± 51.7%: in 3 of 3 runs"),
        ("sft", "chains", "+74.1% ± 14.2%: gain"),
    ],
)
def test_decisions_about_cells_of_the_page(cell, task, shown):
    decided = figures.decided_gains(figures.load(run.RESULTS))[cell, task]
    assert f"{decided}: {decided.verdict()}" == shown


def test_the_interval_of_a_run_is_that_of_its_questions():
    generator = torch.Generator().manual_seed(0)
    gains = torch.randint(-2, 5, (48,), generator=generator).double() / 4
    half = mean_with_interval(gains.tolist())[1]
    expected = gain_interval(gains, 1)
    assert rule.run_bounds(gains.mean().item(), half, 48) == pytest.approx(expected, abs=1e-9)


def test_noise_is_pooled_within_orders_of_questions():
    """Deviations of ± 1 and ± 2: (2 + 8) / 2; the distance between the orders does not count."""
    noise = rule.noise([[10.0, 12.0], [100.0, 104.0], [7.0]])
    assert noise == rule.Noise(math.sqrt(5), 2)
    assert noise.floor([1]) == pytest.approx(4.303 * math.sqrt(5) * math.sqrt(2))
    assert noise.floor([2, 4]) == pytest.approx(4.303 * math.sqrt(5) * math.sqrt(1.5 + 1.25) / 2)
    with pytest.raises(ValueError, match="needs two runs"):
        rule.noise([[1.0], [2.0]])


def test_the_quantiles_are_those_of_student():
    """Numerical integral of the density up to each quantile."""
    for freedom, quantile in enumerate(rule.STUDENT, 1):
        x = torch.linspace(0, quantile, 200_001, dtype=torch.float64)
        scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(
            math.pi * freedom
        )
        density = scale * (1 + x.square() / freedom) ** (-(freedom + 1) / 2)
        assert torch.trapezoid(density, x).item() == pytest.approx(0.475, abs=4e-5)


def simulated(count: int, runs: int, change: float, of_runs: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Gains and half-widths over questions (count, runs) of 48 questions with 4 samples.

    The change of a question is ± 0.15 at random around ``change``; that of a run has deviation ``of_runs``.
    """
    generator = torch.Generator().manual_seed(0)
    size, four = (count, runs, 48), torch.tensor(4.0, dtype=torch.float64)
    chance = 0.2 + 0.3 * torch.rand(count, 1, 48, generator=generator, dtype=torch.float64)
    sign = (
        2 * torch.randint(2, (count, 1, 48), generator=generator) - 1
    )  # the questions of all runs are the same
    shift = of_runs * torch.randn(count, runs, 1, generator=generator, dtype=torch.float64)
    after = (chance + 0.15 * sign + change + shift).clamp(0, 1)

    def samples(probability: torch.Tensor) -> torch.Tensor:
        probability = probability.expand(size).contiguous()
        return torch.binomial(four.expand(size).contiguous(), probability, generator=generator) / 4

    differences = samples(after) - samples(chance)
    return differences.mean(-1), 1.96 * differences.std(-1) / math.sqrt(48)


@pytest.mark.parametrize("of_runs", [0.0, 0.03, 0.1])
def test_runs_without_a_change_raise_few_false_alarms(of_runs):
    gains, halves = simulated(4000, 3, 0.0, of_runs)
    pairs = list(zip(gains.tolist(), halves.tolist(), strict=True))
    assert sum(rule.gain(*pair).is_seen for pair in pairs) / 4000 < 0.05
    student = [rule.interval(one) for one, _ in pairs]
    assert sum(abs(mean) > half for mean, half in student) / 4000 > 0.05  # Student's interval alone has more


def test_a_gain_is_found():
    gains, halves = simulated(300, 3, 0.25, 0.03)
    pairs = zip(gains.tolist(), halves.tolist(), strict=True)
    assert sum(rule.gain(*pair).verdict() == "gain" for pair in pairs) / 300 > 0.9
