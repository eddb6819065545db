"""Importance ratios: levels, the correction for a separate sampler, the mask of off-policy sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch


def token_log_ratio(log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Token-level log-ratio (B, T), log ρ_it = ℓ_it − ℓ_old,it (DeepSeekMath, eq. 3)."""
    return log_ratio_BT


def sequence_log_ratio(log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Length-normalized sequence log-ratio (B, 1) (GSPO, eq. 7).

    log s_i = Σ_t m_it (ℓ_it − ℓ_old,it) / max(|o_i|, 1)
    """
    lengths_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)  # a row without loss tokens has ratio 1
    return (log_ratio_BT * mask_BT).sum(-1, keepdim=True) / lengths_B1  # log of the geometric mean of ρ_it


RATIO_LEVELS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "token": token_log_ratio,
    "sequence": sequence_log_ratio,  # one ratio for all tokens of a row
}


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

    Token level: c_it = e^{d_it}; sequence level: c_i = e^{Σ_t d_it}. ``*_truncate`` clamps c to
    [clip_min, clip_max]; ``*_mask`` replaces c by 0 outside that interval.

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
    drift_B1 = sequence_log_ratio(drift_BT, mask_BT)  # mean over loss tokens; 0 without any
    # Whole rows; tokens only with step rewards.
    return ((advantages_BX >= 0) | (drift_B1 <= threshold)).to(logps_BT.dtype)
