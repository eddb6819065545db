"""Masks of the surrogate: top-entropy tokens and off-policy sequences."""

from __future__ import annotations

import torch


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


def off_policy_keep(
    advantages_BX: torch.Tensor,
    logps_BT: torch.Tensor,
    behaviour_logps_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    threshold: float,
) -> torch.Tensor:
    """Compute the off-policy mask of DeepSeek-V3.2: drop drifted sequences with A < 0.

    The drift, bounded by ``threshold``, is the mean over loss tokens of ℓ_behaviour − ℓ. The behaviour policy
    is the sampler if it reports log-probs, else the old policy; a difference that is not finite counts as 0.

    Returns:
        (B, X), 1 keeps and 0 drops, no gradient.
    """
    # (B, T), positive where π_θ became less likely.
    drift_BT = torch.nan_to_num(behaviour_logps_BT - logps_BT.detach(), nan=0.0, posinf=0.0, neginf=0.0)
    lengths_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)  # rows without loss tokens have drift 0
    drift_B1 = (drift_BT * mask_BT).sum(-1, keepdim=True) / lengths_B1
    # Whole rows; tokens only with step rewards.
    return ((advantages_BX >= 0) | (drift_B1 <= threshold)).to(logps_BT.dtype)
