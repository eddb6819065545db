"""Adaptive entropy bonus (Skywork-OR1, section 4)."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
