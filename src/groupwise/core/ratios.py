"""Importance ratios between the current policy and the behaviour policy."""

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
