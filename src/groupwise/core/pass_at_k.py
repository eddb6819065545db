"""Estimators of how often a policy solves a prompt: pass@k, majority votes, intervals."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

#: Standard errors to either side that hold 95 % of a normal distribution.
_NORMAL_95 = 1.959964


def pass_at_k(count: int, passed: int, k: int) -> float:
    """The chance that at least one of k passes: 1 − C(n−c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    Unbiased for n independent completions of which c passed.

    Args:
        count: n, at least k.
        passed: c.
    """
    if not 1 <= k <= count or not 0 <= passed <= count:
        raise ValueError(f"pass@{k} of {passed} passed out of {count}; needed: 1 <= k <= n and 0 <= c <= n")
    # The quotient is a product of k factors below 1, which neither overflows nor cancels.
    return 1.0 - math.prod(max(count - passed - i, 0) / (count - i) for i in range(k))


def majority_at_k(answers: Sequence[Hashable], passed: Sequence[bool], k: int) -> float:
    """The chance that the most frequent answer of k completions passes.

    The mean over the n runs of k neighbouring completions (the first follows the last), each of which is a
    sample of k independent ones: unbiased. Among equally frequent answers one is drawn; where completions
    with the same answer were judged differently, the share that passed counts. None is no answer: it has no
    vote, and without any vote nothing passes.

    Args:
        answers, passed: n entries, at least k.
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"maj@{k} of {len(answers)} answers; needed: 1 <= k <= n")
    n = len(answers)
    starts = range(n) if k < n else range(1)
    shares = [_winner_passes([(start + i) % n for i in range(k)], answers, passed) for start in starts]
    return math.fsum(shares) / len(shares)


def _winner_passes(places: Sequence[int], answers: Sequence[Hashable], passed: Sequence[bool]) -> float:
    votes: dict[Hashable, list[bool]] = {}
    for place in places:
        if answers[place] is not None:
            votes.setdefault(answers[place], []).append(passed[place])
    if not votes:
        return 0.0
    most = max(len(given) for given in votes.values())
    winners = [sum(given) / most for given in votes.values() if len(given) == most]
    return math.fsum(winners) / len(winners)


def mean_with_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95 % interval: 1.96 · s / √P (Miller 2024, section 2.1).

    Args:
        values: one per prompt: completions of a prompt are no independent observations of the prompts.

    Returns:
        NaN where it is not known: a mean of nothing, the interval of fewer than two.
    """
    count = len(values)
    if count == 0:
        return math.nan, math.nan
    mean = math.fsum(values) / count
    if count == 1:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, _NORMAL_95 * math.sqrt(variance / count)
