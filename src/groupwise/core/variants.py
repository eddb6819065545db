"""Objectives of recent papers, added through the public registry only; a template for your own.

Notation as in ``groupwise.core.objectives``; sg is stop-gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from groupwise.core.advantages import (
    AdvantageSettings,
    group_mean,
    has_variance,
    register_advantage,
    total_rewards,
)
from groupwise.core.objectives import cispo_metrics, register_objective
from groupwise.core.ratios import sequence_log_ratio
from groupwise.core.surrogates import SurrogateInputs, SurrogateSettings, cispo, clipped
from groupwise.core.weights import WeightInputs, WindowCounts, register_normalizer

if TYPE_CHECKING:
    from groupwise.records.rollout import GroupRewards


def gspo_token(inputs: SurrogateInputs, settings: SurrogateSettings) -> torch.Tensor:
    """Clipped surrogate of s_it = sg[s_i] · π_θ(o_it) / sg[π_θ(o_it)] (GSPO, arXiv 2507.18071, section 4.3).

    s_i is the length-normalized sequence ratio. The value is GSPO's; the gradient of a token is scaled by its
    own advantage, which process rewards make token-wise. With one advantage per sequence the gradient is
    GSPO's too.
    """
    # No gradient: a constant of the row.
    log_s_B1 = sequence_log_ratio(inputs.log_ratio_BT, inputs.loss_mask_BT).detach()
    # Value s_i, gradient of ℓ_it.
    ratio_BT = (log_s_B1 + inputs.log_ratio_BT - inputs.log_ratio_BT.detach()).exp()
    return clipped(replace(inputs, ratio_BX=ratio_BT), settings)


@dataclass(frozen=True)
class GMPOSettings:
    """Clip range of log ρ_it; the paper's default is (e^-0.4, e^0.4) for ρ_it."""

    epsilon_low: float = 0.4
    epsilon_high: float = 0.4


def gmpo(inputs: SurrogateInputs, settings: GMPOSettings) -> torch.Tensor:
    """−A · (Π_t ρ̃_it)^{1/|o_i|}, the geometric mean of clipped ratios (GMPO, arXiv 2507.20673).

    log ρ̃_it = min(log ρ_it, ε_high) for A > 0 and max(log ρ_it, −ε_low) for A < 0: the pessimistic side of
    clipping log ρ_it to [−ε_low, ε_high]. Written in log space, as in the authors' code and verl's
    ``geo_mean``.
    """
    low_BT = inputs.log_ratio_BT.clamp(min=-settings.epsilon_low)  # ρ ≥ e^-0.4
    high_BT = inputs.log_ratio_BT.clamp(max=settings.epsilon_high)  # ρ ≤ e^0.4
    # Clipped token by token, then averaged.
    log_ratio_BT = torch.where(inputs.advantages_BX > 0, high_BT, low_BT)
    return -inputs.advantages_BX * sequence_log_ratio(log_ratio_BT, inputs.loss_mask_BT).exp()


@dataclass(frozen=True)
class DPPOSettings:
    """Bounds δ of the binary total variation |π − μ|, for A < 0 and A > 0; the authors train with 0.15."""

    delta_low: float = 0.15
    delta_high: float = 0.15


def dppo(inputs: SurrogateInputs, settings: DPPOSettings) -> torch.Tensor:
    """−M_it · π/μ · A, where M_it = 0 if A pushes π further from μ than δ (DPPO-Binary-TV, arXiv 2602.04879).

    The binary total variation |π_θ(o_it) − μ(o_it)| is that of the sampled token alone. μ is the policy that
    sampled: the separate sampler if there is one, else π_old. No sampler correction is applied on top.
    """
    behaviour_BT = inputs.old_logps_BT if inputs.sampler_logps_BT is None else inputs.sampler_logps_BT
    shift_BT = inputs.logps_BT.detach().exp() - behaviour_BT.exp()  # π - μ of the sampled token
    inside_BT = torch.where(  # False: the token has no gradient
        inputs.advantages_BX > 0, shift_BT <= settings.delta_high, shift_BT >= -settings.delta_low
    )
    return inside_BT * -inputs.advantages_BX * (inputs.logps_BT - behaviour_BT).exp()


def prompt_mean(rows: WeightInputs, counts: WindowCounts) -> torch.Tensor:
    """1 / (P · Σ_{j of the same prompt} |o_j|): mean over tokens of a prompt, then over prompts (ScaleRL).

    The "prompt average" of arXiv 2510.13786, section 3.2; P prompts of the window over all ranks.
    """
    # The prompt of rows that pad an evaluation batch is not counted.
    tokens = [max(counts.group_tokens.get(group, 0), 1) for group in rows.group_ids_B.tolist()]
    tokens_B1 = rows.mask_BT.new_tensor(tokens).unsqueeze(1)  # Σ_j |o_j| of the row's prompt, over all ranks
    return rows.mask_BT * counts.world_size / (len(counts.group_tokens) * tokens_B1)


def maxrl(rewards: GroupRewards, settings: AdvantageSettings) -> torch.Tensor:
    """A_i = (r_i − r̄) / r̄ with the group mean r̄, 0 where r̄ = 0 (MaxRL, arXiv 2602.02710).

    For binary rewards the policy gradient of whole sequences is then unbiased for the maximum-likelihood
    objective truncated at order G - 1 (version 3, theorem 5). ``scale_rewards`` has no effect. Completions
    without any reward get 0.

    Returns:
        (N,) float32.

    Raises:
        ValueError: a reward is negative, or a reward function returned step rewards.
    """
    rewards_PG = total_rewards(rewards, settings.aggregation).reshape(-1, rewards.num_generations)
    if rewards.step_rewards or bool((rewards_PG < 0).any()):
        raise ValueError("advantage_baseline='maxrl' needs one non-negative reward per completion")
    mean_P1 = group_mean(rewards_PG)  # share of passes for binary rewards
    advantages_PG = ((rewards_PG - mean_P1) / mean_P1).nan_to_num(nan=0.0)  # 0 / 0: no completion passed
    return (advantages_PG * has_variance(rewards, settings.aggregation)[:, None]).reshape(-1)


register_normalizer("prompt_mean", prompt_mean, needs_group_tokens=True)
register_objective("gspo_token", gspo_token, "sequence_mean", zero_grad_at_zero_advantage=True)
register_objective("gmpo", gmpo, "sequence_mean", settings=GMPOSettings, zero_grad_at_zero_advantage=True)
register_objective(
    "dppo",
    dppo,
    "token_mean",
    settings=DPPOSettings,
    applies_sampler_correction=True,
    zero_grad_at_zero_advantage=True,
)
register_objective(
    "scalerl", cispo, "prompt_mean", diagnostics=cispo_metrics, zero_grad_at_zero_advantage=True
)
register_advantage("maxrl", maxrl)
