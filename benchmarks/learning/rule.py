"""The rule of every statement about a difference: which differences count as seen.

A difference d has a half-width h = √(a² + b²) and counts as seen if |d| > h.

- a: half-width of Student's 95 % interval over runs, from three runs on; below it is left out.
- b: error that the runs share. For the gain over the initial model, the 95 % interval over questions, which
  are the same in every run: the mean of the half-widths of the runs, as if their errors were one. For the
  comparison with unchanged runs, the noise floor: the 95 % interval of a difference between unchanged runs.

The noise of sampling is in a and in b, so that h is rather too wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.core.confidence import look_level, student_quantile

#: 97.5 % quantiles of Student's t for 1, 2, 3, … degrees of freedom.
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and half-width of the 95 % interval over seeds; NaN below three seeds.

    Raises:
        ValueError: no value, or more than 21.
    """
    if not 1 <= len(values) <= len(STUDENT) + 1:
        raise ValueError(f"{len(values)} seeds; allowed: 1 to {len(STUDENT) + 1}")
    count, mean = len(values), math.fsum(values) / len(values)
    if count < 3:  # that of two would be ± six times their difference
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, STUDENT[count - 2] * math.sqrt(variance / count)


def run_bounds(mean: float, question_half: float, prompts: int) -> tuple[float, float]:
    """Return ``groupwise.core.confidence.gain_interval`` of a run's only evaluation after the first.

    Args:
        mean, question_half: gain, and half-width of its 95 % interval over ``prompts`` questions.
    """
    # Sums over the questions and the two further observations, -1 and 1.
    variance = (question_half / 1.959964) ** 2 * prompts
    squares, count = (prompts - 1) * variance + prompts * mean**2 + 2, prompts + 2
    center = prompts * mean / count
    error = math.sqrt((squares - count * center**2) / (count - 1) / count)
    half = student_quantile(1 - look_level(1) / 2, count - 1) * error
    return max(center - half, -1.0), min(center + half, 1.0)


@dataclass(frozen=True)
class Difference:
    """A difference with its half-width.

    seen_runs: runs whose own interval over questions excludes 0; runs: all of them.
    """

    mean: float
    half: float
    seen_runs: int = 0
    runs: int = 0

    @property
    def is_seen(self) -> bool:
        return abs(self.mean) > self.half

    @property
    def bound(self) -> int:
        """Percentage points; the interval has no larger change, up or down."""
        return math.ceil(100 * (abs(self.mean) + self.half) - 1e-9)

    def verdict(self) -> str:
        """Return the words of the tables."""
        if self.is_seen:
            return "gain" if self.mean > 0 else "loss"
        if self.seen_runs:
            return f"in {self.seen_runs} of {self.runs} runs"
        return f"none above {self.bound} points"

    def __str__(self) -> str:
        return f"{self.mean:+.1%} ± {self.half:.1%}"


def gain(
    gains: Sequence[float],
    question_halves: Sequence[float],
    bounds: Sequence[tuple[float, float]] = (),
) -> Difference:
    """Decide about the gain of a method in a task.

    Args:
        gains: one per run.
        question_halves: half-width of each run's 95 % interval over questions.
        bounds: confidence sequence of each run.
    """
    mean, over_runs = interval(gains)
    shared = math.fsum(question_halves) / len(question_halves)
    half = math.hypot(0.0 if math.isnan(over_runs) else over_runs, shared)
    return Difference(mean, half, sum(low > 0 or high < 0 for low, high in bounds), len(gains))


@dataclass(frozen=True)
class Noise:
    """Standard deviation of runs that differ only in the seed of sampling, with its degrees of freedom."""

    deviation: float
    freedom: int

    def floor(self, others: Sequence[int]) -> float:
        """Return the 95 % half-width of a mean difference between unchanged runs.

        Args:
            others: by order of questions, the number of runs that one further run is compared with.
        """
        spread = math.sqrt(math.fsum(1 + 1 / count for count in others)) / len(others)
        return STUDENT[self.freedom - 1] * self.deviation * spread


def noise(orders: Sequence[Sequence[float]]) -> Noise:
    """Pool the variance within orders of questions.

    Args:
        orders: by order of questions, one value per run.

    Raises:
        ValueError: no order has two runs.
    """
    freedom = sum(len(values) - 1 for values in orders)
    if freedom < 1:
        raise ValueError("the noise needs two runs of one order of questions")
    squares = [(value - math.fsum(values) / len(values)) ** 2 for values in orders for value in values]
    return Noise(math.sqrt(math.fsum(squares) / freedom), freedom)


def comparison(values: Sequence[float], others: Sequence[Sequence[float]], floor: Noise) -> Difference:
    """Decide about the difference of a changed setting from unchanged runs.

    Args:
        values: one per order of questions.
        others: by the same orders, the values of the unchanged runs.
    """
    pairs = zip(values, others, strict=True)
    differences = [value - math.fsum(unchanged) / len(unchanged) for value, unchanged in pairs]
    mean, over_runs = interval(differences)
    shared = floor.floor([len(unchanged) for unchanged in others])
    return Difference(mean, math.hypot(0.0 if math.isnan(over_runs) else over_runs, shared))
