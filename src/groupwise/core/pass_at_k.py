"""Estimators of evaluation metrics: pass@k, maj@k and confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from statistics import fmean, stdev

#: Half-width of the 95 % interval of a normal distribution, in standard errors.
_NORMAL_95 = 1.959964


def pass_at_k(count: int, passed: int, k: int) -> float:
    """Estimate the probability that at least one of k completions passes (Chen et al. 2021, eq. 1).

    1 − C(n−c, k) / C(n, k), unbiased for n independent completions of which c passed.

    Args:
        count: n, at least k.
        passed: c.
        k: number of completions.
    """
    # Product of k factors ≤ 1: no overflow and no cancellation, unlike the binomials.
    return 1.0 - math.prod(max(count - passed - i, 0) / (count - i) for i in range(k))


def majority_at_k(answers: Sequence[Hashable], passed: Sequence[bool], k: int) -> float:
    """Estimate the probability that the majority vote of k completions passes.

    Mean over the n windows of k consecutive completions, in circular order; each window is a sample of k
    independent completions, so the estimate is unbiased. Ties are averaged over the tied answers. If
    completions with the same answer were judged differently, the answer counts with the share that passed.

    Args:
        answers: n answers, at least k; None does not vote, and a window without votes fails.
        passed: n flags.
        k: number of completions, at most n.
    """
    n = len(answers)
    starts = range(n) if k < n else range(1)  # k = n: one window
    # 0 to 1 per window.
    shares = [_winner_passes([(start + i) % n for i in range(k)], answers, passed) for start in starts]
    return math.fsum(shares) / len(shares)


def _winner_passes(places: Sequence[int], answers: Sequence[Hashable], passed: Sequence[bool]) -> float:
    votes: dict[Hashable, list[bool]] = {}
    for place in places:
        if answers[place] is not None:
            votes.setdefault(answers[place], []).append(passed[place])  # one flag per vote
    if not votes:
        return 0.0
    most = max(len(given) for given in votes.values())  # votes of the winner, or of each tied one
    # Share of its votes that passed.
    winners = [sum(given) / most for given in votes.values() if len(given) == most]
    return math.fsum(winners) / len(winners)


def mean_with_interval(values: Sequence[float]) -> tuple[float, float]:
    """Compute the mean and its 95 % margin of error, 1.96 · s / √P (Miller 2024, section 2.1).

    Args:
        values: one per prompt, not per completion: completions of one prompt are correlated.

    Returns:
        (mean, margin); the mean of no values and the margin of fewer than two are NaN.
    """
    mean = fmean(values) if values else math.nan
    if len(values) < 2:
        return mean, math.nan
    return mean, _NORMAL_95 * stdev(values) / math.sqrt(len(values))
