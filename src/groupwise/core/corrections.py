"""Sampler correction: truncated and masked importance sampling for data from a separate inference engine."""

from __future__ import annotations

import torch

#: Level of the factor, and what becomes of a factor outside the bounds: it is clamped, or it becomes 0.
CORRECTION_MODES = (
    "token_truncate",  # TIS: a biased weight of bounded variance
    "token_mask",  # MIS: a token outside the bounds has no gradient
    "sequence_truncate",
    "sequence_mask",  # the default: one token that is far off drops its sequence
)


def sampler_log_gap(
    old_logps_BT: torch.Tensor, sampler_logps_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """Compute d_it = ℓ_old − ℓ_samp (B, T) on loss tokens, 0 elsewhere and where it is not finite."""
    # Unreported: factor 1.
    gap_BT = torch.nan_to_num(old_logps_BT - sampler_logps_BT, nan=0.0, posinf=0.0, neginf=0.0)
    return gap_BT * mask_BT  # tools and padding were not sampled


def sampler_correction(
    log_gap_BT: torch.Tensor, mode: str, clip_min: float | None, clip_max: float | None
) -> torch.Tensor:
    """Compute the factor c of the surrogate (the KL is not corrected).

    Token level: c_it = e^{d_it}; sequence level: c_i = e^{Σ_t d_it}. ``*_truncate`` clamps c to [clip_min,
        clip_max];
    ``*_mask`` replaces c by 0 outside that interval.

    Args:
        log_gap_BT: d from :func:`sampler_log_gap`.
        mode: name in ``CORRECTION_MODES``.
        clip_min, clip_max: bounds; None: unbounded.

    Returns:
        (B, T) for token modes, (B, 1) for sequence modes; no gradient.
    """
    log_gap_BX = log_gap_BT.detach()  # a weight, not a part of the objective
    if mode.startswith("sequence"):
        log_gap_BX = log_gap_BX.sum(-1, keepdim=True)  # (B, 1), log of the product over tokens
    factor_BX = log_gap_BX.exp()
    lowest = 0.0 if clip_min is None else clip_min
    highest = float("inf") if clip_max is None else clip_max
    if mode.endswith("truncate"):
        return factor_BX.clamp(lowest, highest)
    outside_BX = (factor_BX < lowest) | (factor_BX > highest)  # (B, X)
    return factor_BX.masked_fill(outside_BX, 0.0)
