"""Confidence sequences: intervals of gains for runs of which every evaluation is looked at.

With one 95 % interval per evaluation, far more than 5 % of long runs have an interval without the true gain.
Here look k = 1, 2, … uses the level α / (k (k + 1)). The levels add up to α: if each interval keeps its
level, all intervals of a run contain their gains with probability 1 − α, for any number of looks and any rule
to stop.

The intervals keep their levels approximately. In simulated runs without a change, from :data:`LEAST_PROMPTS`
prompts on, at most 4.2 % raised an alarm at 5 %, also if few prompts gained much and the others lost little.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import torch

#: Fewer prompts get the interval [-1, 1].
LEAST_PROMPTS = 20


def look_level(look: int) -> float:
    """Return the error probability of the interval at look 1, 2, …; over all looks they add up to 5 %."""
    return 0.05 / (look * (look + 1))  # Σ 1 / (k (k + 1)) = 1


def student_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t for many degrees of freedom.

    Expansion around the normal quantile (Abramowitz and Stegun 1964, 26.7.5). From 20 degrees of freedom on
    the relative error is below 0.1 % up to the level of look 20, and below 0.2 % up to that of look 100.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))


def gain_interval(differences: torch.Tensor, look: int) -> tuple[float, float]:
    """Compute the interval of a mean gain at look 1, 2, … of a run; over all looks the level is 95 %.

    Student's interval over the P prompts and two further observations, −1 and 1, which are the largest that a
    prompt can have. Without them the interval has width 0 where no prompt changed, and is too narrow where a
    rare large gain was not sampled.

    Args:
        differences: (P,), one or more in [-1, 1]: the metric of a prompt minus that of the first evaluation.
            Prompts are independent; evaluations may depend on each other in any way.
        look: number of this evaluation after the first one.

    Returns:
        (low, high) within [-1, 1].
    """
    if len(differences) < LEAST_PROMPTS:
        return -1.0, 1.0
    values = torch.cat([differences.double(), torch.tensor([-1.0, 1.0], dtype=torch.float64)])  # (P + 2,)
    count, mean = len(values), values.mean().item()
    half = student_quantile(1 - look_level(look) / 2, count - 1) * math.sqrt(values.var().item() / count)
    return max(mean - half, -1.0), min(mean + half, 1.0)
