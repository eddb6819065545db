"""Per-token surrogates: the differentiable loss of a token before it is weighted.

A surrogate maps :class:`SurrogateInputs` and its settings to a loss of shape (B, T) or (B, 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class SurrogateInputs:
    """Tensors of one micro-batch that a surrogate may use; log-probs and log-ratios are 0 off the loss mask.

    logps_BT: log π_θ at the sampling temperature, differentiable.
    old_logps_BT: log π_old, under the behaviour policy.
    ref_logps_BT: log π_ref; None without a reference model.
    sampler_logps_BT: log-probs that the sampler reported, ``old_logps_BT`` where it reported none; None
        without a separate sampler.
    log_ratio_BT: ℓ − ℓ_old per token, differentiable, whatever the importance sampling level.
    ratio_BX: importance ratio ρ at the configured level, differentiable.
    log_correction_BX: log of the sampler correction, only for objectives that apply it themselves; else None.
    advantages_BX: (B, 1) or (B, T).
    loss_mask_BT: 1 on tokens with loss, else 0; the dtype of ``logps_BT``.
    group_ids_B: number of the prompt of each row. A micro-batch need not hold all G rows of a prompt.
    """

    logps_BT: torch.Tensor
    old_logps_BT: torch.Tensor
    ref_logps_BT: torch.Tensor | None = None
    sampler_logps_BT: torch.Tensor | None = None
    log_ratio_BT: torch.Tensor
    ratio_BX: torch.Tensor
    log_correction_BX: torch.Tensor | None = None
    advantages_BX: torch.Tensor
    loss_mask_BT: torch.Tensor
    group_ids_B: torch.Tensor

    @property
    def lengths_B1(self) -> torch.Tensor:
        """Number of loss tokens |o_i| of each sequence, may be 0."""
        return self.loss_mask_BT.sum(-1, keepdim=True)


@dataclass(frozen=True)
class SurrogateSettings:
    """Hyperparameters of the built-in surrogates, named as their ``GRPOConfig`` fields.

    epsilon_low: lower clip range, 1 − ε.
    epsilon_high: upper clip range, 1 + ε; ``cispo`` reads it as the bound of ρ itself.
    delta: upper bound of ρ in the two-sided clip; None: no bound.
    """

    epsilon_low: float = 0.2  # no gradient below ρ = 0.8 where A < 0
    epsilon_high: float = 0.2  # no gradient above ρ = 1.2 where A > 0
    delta: float | None = None  # bounds the loss of A < 0, which the clip leaves unbounded
    sapo_temperature_pos: float = 1.0  # larger: a narrower trust region
    sapo_temperature_neg: float = 1.05  # narrower: updates that lower a probability are less stable
    vespo_k_pos: float = 2.0  # φ(1) = 1, the maximum is at w = k / λ
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0


def clipped(inputs: SurrogateInputs, settings: SurrogateSettings) -> torch.Tensor:
    """−min(ρ' A, clip(ρ, 1−ε_low, 1+ε_high) A), with ρ' = min(ρ, δ) when δ is set.

    DeepSeekMath eq. 3; asymmetric bounds from DAPO eq. 8; δ from INTELLECT-2 (two-sided clipping).
    """
    ratio_BX, advantages_BX = inputs.ratio_BX, inputs.advantages_BX  # 1 on the first pass over a generation
    # No gradient outside the bounds.
    bounded_BX = ratio_BX.clamp(1 - settings.epsilon_low, 1 + settings.epsilon_high)
    # Where A < 0 the loss is at most -δ A.
    capped_BX = ratio_BX if settings.delta is None else ratio_BX.clamp(max=settings.delta)
    # min: a clipped ratio never makes the surrogate better than the ratio itself does.
    return -torch.minimum(capped_BX * advantages_BX, bounded_BX * advantages_BX)


def cispo(inputs: SurrogateInputs, settings: SurrogateSettings) -> torch.Tensor:
    """−sg[min(ρ, ε_high)] A ℓ (MiniMax-M1, eq. 4): clip the weight, keep every token's gradient."""
    # A constant; the gradient is that of ℓ.
    weight_BX = inputs.ratio_BX.detach().clamp(max=settings.epsilon_high)
    return -weight_BX * inputs.advantages_BX * inputs.logps_BT


def sapo(inputs: SurrogateInputs, settings: SurrogateSettings) -> torch.Tensor:
    """−(4/τ) σ(τ (ρ−1)) A, τ by the sign of A (SAPO): a soft trust region."""
    temperature_BX = _by_sign(
        inputs.advantages_BX > 0,
        settings.sapo_temperature_pos,
        settings.sapo_temperature_neg,
        inputs.ratio_BX,
    )
    # 2 / τ at ρ = 1, with slope 1 there: the gradient of the first pass is that of the plain ratio.
    gate_BX = torch.sigmoid(temperature_BX * (inputs.ratio_BX - 1)) * 4 / temperature_BX
    return -gate_BX * inputs.advantages_BX


def vespo(inputs: SurrogateInputs, settings: SurrogateSettings) -> torch.Tensor:
    """−sg[φ(w_i)] A ℓ, φ(w) = e^λ w^k e^{−λw} (VESPO)."""
    return -vespo_gate(inputs, settings) * inputs.advantages_BX * inputs.logps_BT


def vespo_gate(inputs: SurrogateInputs, settings: SurrogateSettings) -> torch.Tensor:
    """Compute φ(w_i), w_i = exp(Σ_t m_it clip(ℓ−ℓ_old, ±20) + Σ_t log c_it) clamped to [1e-8, e^20].

    (k, λ) follow the sign of the advantage.

    Returns:
        (B, 1), or (B, T) for token-wise advantages; no gradient.
    """
    # Sums, not means: w is a product over tokens.
    log_w_B1 = (inputs.log_ratio_BT.detach().clamp(-20, 20) * inputs.loss_mask_BT).sum(-1, keepdim=True)
    if inputs.log_correction_BX is not None:
        log_w_B1 = log_w_B1 + inputs.log_correction_BX.clamp(math.log(1e-8), 20).sum(-1, keepdim=True)
    log_w_B1 = log_w_B1.clamp(math.log(1e-8), 20)  # e^20 bounds the exponential below
    positive_BX = inputs.advantages_BX >= 0  # (B, 1), or (B, T) for step rewards
    k_BX = _by_sign(positive_BX, settings.vespo_k_pos, settings.vespo_k_neg, log_w_B1)
    lambda_BX = _by_sign(positive_BX, settings.vespo_lambda_pos, settings.vespo_lambda_neg, log_w_B1)
    # log φ = λ + k log w - λ w, then exp.
    return (lambda_BX + k_BX * log_w_B1 - lambda_BX * log_w_B1.exp()).exp()


def _by_sign(positive_BX: torch.Tensor, above: float, below: float, like: torch.Tensor) -> torch.Tensor:
    """Select one of two constants per element, in the dtype of ``like`` (plain numbers would be float32)."""
    return torch.where(positive_BX, like.new_full((), above), below)
