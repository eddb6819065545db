"""Per-token estimators of KL(π_θ ‖ π_ref) from samples of π_θ (Schulman, "Approximating KL divergence")."""

from __future__ import annotations

from collections.abc import Callable

import torch


def k1(logps_BT: torch.Tensor, ref_logps_BT: torch.Tensor) -> torch.Tensor:
    """ℓ − ℓ_ref: unbiased, high variance, can be negative."""
    return logps_BT - ref_logps_BT  # (B, T); as a loss term its gradient is 0 in expectation


def k2(logps_BT: torch.Tensor, ref_logps_BT: torch.Tensor) -> torch.Tensor:
    """½ (ℓ − ℓ_ref)²: biased value, gradient of the reverse KL in expectation."""
    return 0.5 * (logps_BT - ref_logps_BT).square()  # (B, T), gradient (ℓ - ℓ_ref) ∇ℓ


def k3(logps_BT: torch.Tensor, ref_logps_BT: torch.Tensor) -> torch.Tensor:
    """e^{ℓ_ref−ℓ} − (ℓ_ref−ℓ) − 1: unbiased and non-negative (DeepSeekMath, eq. 4)."""
    delta_BT = ref_logps_BT - logps_BT  # log of π_ref / π_θ
    return delta_BT.exp() - delta_BT - 1  # 0 where the two agree; exp grows fast where they do not


def k3_k2grad(logps_BT: torch.Tensor, ref_logps_BT: torch.Tensor) -> torch.Tensor:
    """Value of k3, gradient of k2."""
    quadratic_BT = k2(logps_BT, ref_logps_BT)  # carries the gradient
    return quadratic_BT + (k3(logps_BT, ref_logps_BT) - quadratic_BT).detach()


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_k2grad": k3_k2grad,
}
