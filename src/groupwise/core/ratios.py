"""Importance ratios between the policy and the policy that produced the data."""

from __future__ import annotations

from collections.abc import Callable

import torch


def token_log_ratio(log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """One log-ratio per token: log ρ_it = ℓ_it − ℓ_old,it (DeepSeekMath, eq. 3).

    Returns:
        (B, T)
    """
    return log_ratio_BT


def sequence_log_ratio(log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """One log-ratio per sequence, normalised by its length (GSPO, eq. 7).

    log s_i = Σ_t m_it (ℓ_it − ℓ_old,it) / max(|o_i|, 1)

    Returns:
        (B, 1), to be broadcast over the tokens.
    """
    lengths_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)
    return (log_ratio_BT * mask_BT).sum(-1, keepdim=True) / lengths_B1


RATIO_LEVELS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "token": token_log_ratio,
    "sequence": sequence_log_ratio,
}
