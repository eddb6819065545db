"""Per-token policy surrogates: what is differentiated, before any token weight.

A surrogate maps :class:`SurrogateTerms` and :class:`SurrogateSettings` to a loss of shape (B, T) or (B, 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SurrogateTerms:
    """What a surrogate may use.

    ratio_BX: importance ratio ρ at the chosen level, differentiable.
    advantages_BX: (B, 1) or (B, T).
    logps_BT: log π_θ, differentiable.
    log_ratio_BT: ℓ − ℓ_old per token, whatever the level; 0 off the mask.
    mask_BT: loss mask of ones and zeros.
    log_correction_BX: log of the sampler correction, only for objectives that fold it in; 0 off the mask.
    """

    ratio_BX: torch.Tensor
    advantages_BX: torch.Tensor
    logps_BT: torch.Tensor
    log_ratio_BT: torch.Tensor
    mask_BT: torch.Tensor
    log_correction_BX: torch.Tensor | None = None


@dataclass(frozen=True)
class SurrogateSettings:
    """Constants of the surrogates; the names are those of the configuration fields."""

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0


def clipped(terms: SurrogateTerms, settings: SurrogateSettings) -> torch.Tensor:
    """−min(ρ' A, clip(ρ, 1−ε_low, 1+ε_high) A), with ρ' = min(ρ, δ) when δ is set.

    DeepSeekMath eq. 3; asymmetric bounds from DAPO eq. 8; δ from INTELLECT-2 (two-sided clipping).
    """
    ratio_BX, advantages_BX = terms.ratio_BX, terms.advantages_BX
    bounded_BX = ratio_BX.clamp(1 - settings.epsilon_low, 1 + settings.epsilon_high)
    capped_BX = ratio_BX if settings.delta is None else ratio_BX.clamp(max=settings.delta)
    return -torch.minimum(capped_BX * advantages_BX, bounded_BX * advantages_BX)


def cispo(terms: SurrogateTerms, settings: SurrogateSettings) -> torch.Tensor:
    """−sg[min(ρ, ε_high)] A ℓ (MiniMax-M1, eq. 4): clip the weight, keep every token's gradient."""
    weight_BX = terms.ratio_BX.detach().clamp(max=settings.epsilon_high)
    return -weight_BX * terms.advantages_BX * terms.logps_BT


def sapo(terms: SurrogateTerms, settings: SurrogateSettings) -> torch.Tensor:
    """−(4/τ) σ(τ (ρ−1)) A, τ by the sign of A (SAPO): a soft trust region."""
    temperature_BX = _by_sign(
        terms.advantages_BX > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg, terms.ratio_BX
    )
    gate_BX = torch.sigmoid(temperature_BX * (terms.ratio_BX - 1)) * 4 / temperature_BX
    return -gate_BX * terms.advantages_BX


def vespo(terms: SurrogateTerms, settings: SurrogateSettings) -> torch.Tensor:
    """−sg[φ(w_i)] A ℓ, φ(w) = e^λ w^k e^{−λw} (VESPO)."""
    return -vespo_gate(terms, settings) * terms.advantages_BX * terms.logps_BT


def vespo_gate(terms: SurrogateTerms, settings: SurrogateSettings) -> torch.Tensor:
    """φ(w_i), with w_i = exp(Σ_t m_it clip(ℓ−ℓ_old, ±20) + Σ_t log c_it) clamped to [1e-8, e^20]; no
    gradient.

    (k, λ) follow the sign of the advantage. Returns (B, 1), or (B, T) for token-wise advantages.
    """
    log_w_B1 = (terms.log_ratio_BT.detach().clamp(-20, 20) * terms.mask_BT).sum(-1, keepdim=True)
    if terms.log_correction_BX is not None:
        log_w_B1 = log_w_B1 + terms.log_correction_BX.clamp(math.log(1e-8), 20).sum(-1, keepdim=True)
    log_w_B1 = log_w_B1.clamp(math.log(1e-8), 20)
    positive_BX = terms.advantages_BX >= 0
    k_BX = _by_sign(positive_BX, settings.vespo_k_pos, settings.vespo_k_neg, log_w_B1)
    lambda_BX = _by_sign(positive_BX, settings.vespo_lambda_pos, settings.vespo_lambda_neg, log_w_B1)
    return (lambda_BX + k_BX * log_w_B1 - lambda_BX * log_w_B1.exp()).exp()


def _by_sign(positive_BX: torch.Tensor, above: float, below: float, like: torch.Tensor) -> torch.Tensor:
    """One of two constants per element, in the precision of ``like`` (bare numbers would be float32)."""
    return torch.where(positive_BX, like.new_full((), above), below)
