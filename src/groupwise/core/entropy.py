"""Entropy: the adaptive bonus (Skywork-OR1, section 4) and the quantile of the top-entropy mask."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class EntropyControl:
    """Coefficient of the entropy bonus under adaptive control, between two optimizer steps.

    coef: current coefficient.
    entropy: mean token entropy of the last window in nats; None before the first one.
    """

    coef: float
    entropy: float | None = None

    def applied(self, target: float | None) -> float:
        """Return the coefficient: 0 while the entropy is unknown or above ``target`` (None: no target)."""
        if target is None or (self.entropy is not None and self.entropy <= target):
            return self.coef
        return 0.0  # exploration is high enough: no bonus

    def step(self, entropy: float, target: float, delta: float, low: float, high: float) -> EntropyControl:
        """Update after a window: coef += Δ if its entropy is ≤ target, else −= Δ, clamped to [low, high]."""
        # ±Δ per window, whatever the distance.
        moved = self.coef + delta if entropy <= target else self.coef - delta
        return replace(self, coef=min(max(moved, low), high), entropy=entropy)


def entropy_threshold(entropies: torch.Tensor, top_quantile: float) -> torch.Tensor:
    """Compute the entropy at the (1 − ``top_quantile``) quantile of all loss tokens (Beyond the 80/20 Rule).

    Args:
        entropies: (n,) entropies of all loss tokens of the global batch, in nats.
        top_quantile: share of tokens to keep, in [0, 1]; at 0 those of highest entropy.

    Returns:
        Scalar, linearly interpolated between order statistics; +inf without tokens.
    """
    if entropies.numel() == 0:
        return torch.tensor(float("inf"))
    position = (1.0 - top_quantile) * (entropies.numel() - 1)  # fractional index into the sorted entropies
    # torch.quantile is limited to 2^24 values; sorting is not.
    ordered = entropies.sort().values
    below = int(position)  # order statistics on both sides
    above = min(below + 1, ordered.numel() - 1)
    return torch.lerp(ordered[below], ordered[above], position - below)
