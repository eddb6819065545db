"""Confidence sequences: intervals of gains that stay valid when every evaluation of a run is looked at.

With one 95 % interval per evaluation, far more than 5 % of long runs have an interval without the true gain.
Here look k = 1, 2, … uses the level α / (k (k + 1)). The levels add up to α: with probability 1 − α all
intervals of a run contain their gains, for any number of looks and any rule to stop.
"""

from __future__ import annotations

import math

import torch

#: Largest share of the capital that one observation may cost (Waudby-Smith and Ramdas use 1/2 or 3/4).
_TRUNCATION = 0.5

#: Candidate means of :func:`gain_interval`: resolution 0.001 on [-1, 1].
_GRID = 2001


def look_level(look: int, alpha: float = 0.05) -> float:
    """Return the error probability of the interval at look 1, 2, …; over all looks they add up to ``alpha``.

    Raises:
        ValueError: ``look`` is below 1.
    """
    if look < 1:
        raise ValueError(f"look={look}; evaluations are counted from 1")
    return alpha / (look * (look + 1))  # Σ 1 / (k (k + 1)) = 1


def log_capital(values: torch.Tensor, means: torch.Tensor, alpha: float) -> torch.Tensor:
    """Compute the log of the hedged capital of bets against each candidate mean.

    Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (JRSS B, 2024):
    max(½ Π(1 + λ_i (x_i − m)), ½ Π(1 − λ_i (x_i − m))) with the predictable bets of their intervals for a
    fixed number of observations. Under the true mean it exceeds 1/α with probability at most α, whatever the
    distribution of the values.

    Args:
        values: (..., n) independent observations in [0, 1], in an order fixed in advance.
        means: (M,) candidates within (0, 1).
        alpha: error probability, which sizes the bets.

    Returns:
        (..., M) float64.
    """
    values = values.double()
    n = values.shape[-1]
    counts = torch.arange(1, n + 1, dtype=torch.float64)
    running_mean = (0.5 + values.cumsum(-1)) / (counts + 1)  # (..., n), from a prior observation of 1/2
    variance = (0.25 + (values - running_mean).square().cumsum(-1)) / (counts + 1)
    # Predictable: a bet uses the observations before its own.
    variance = torch.cat([torch.full_like(variance[..., :1], 0.25), variance[..., :-1]], dim=-1)
    bets = (2 * math.log(2 / alpha) / (n * variance)).sqrt().unsqueeze(-1)  # (..., n, 1)
    distance = values.unsqueeze(-1) - means  # (..., n, M)
    # (..., M), bets that the mean is larger.
    above = torch.log1p(torch.minimum(bets, _TRUNCATION / means) * distance).sum(-2)
    below = torch.log1p(-torch.minimum(bets, _TRUNCATION / (1 - means)) * distance).sum(-2)
    return torch.maximum(above, below) - math.log(2)


def gain_interval(differences: torch.Tensor, look: int, alpha: float = 0.05) -> tuple[float, float]:
    """Compute the interval of a mean gain at look 1, 2, … of a run.

    Args:
        differences: (P,) one per prompt, in [-1, 1]: the metric of this evaluation minus that of the first.
            Prompts are independent; evaluations may depend on each other in any way.
        look: number of this evaluation after the first one.
        alpha: probability that any interval of the run misses its gain.

    Returns:
        (low, high) within [-1, 1], rounded outwards to 0.001.

    Raises:
        ValueError: there are no differences, one is outside [-1, 1], or ``look`` is below 1.
    """
    if not len(differences) or not bool((differences.abs() <= 1).all()):
        raise ValueError("differences must be one or more numbers in [-1, 1]")
    level = look_level(look, alpha)
    grid = torch.linspace(0, 1, _GRID, dtype=torch.float64)  # gains of -1 to 1, mapped to [0, 1]
    inside = log_capital((differences.double() + 1) / 2, grid[1:-1], level) < math.log(1 / level)
    kept = torch.nonzero(inside).flatten() + 1  # means that no bet refuted; one neighbour on each side
    low, high = grid[kept[0] - 1].item(), grid[kept[-1] + 1].item()
    return 2 * low - 1, 2 * high - 1
