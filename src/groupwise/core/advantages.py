"""Advantages from rewards: groups of G completions of one prompt, rewards that may be missing (NaN)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

#: Added to every standard deviation before dividing by it.
STD_EPSILON = 1e-4

#: Per completion, the rewards of its steps: (index of the step's last token, reward).
StepRewards = Sequence[Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class GroupRewards:
    """Rewards of the global batch, groups contiguous.

    rewards_NF: one column per reward function; NaN where a function returned None.
    weights_F: one weight per function.
    num_generations: G; N is a multiple of it.
    step_rewards: process-supervised functions, by column; their column in ``rewards_NF`` is NaN.
    num_tokens: T, the width of a token-wise advantage.
    """

    rewards_NF: torch.Tensor
    weights_F: torch.Tensor
    num_generations: int
    step_rewards: dict[int, StepRewards] = field(default_factory=dict)
    num_tokens: int = 0


@dataclass(frozen=True)
class AdvantageSettings:
    """scale: "group", "batch" or "none"; aggregation: "sum_then_normalize" or "normalize_then_sum"."""

    scale: str = "group"
    aggregation: str = "sum_then_normalize"


Baseline = Callable[[torch.Tensor], torch.Tensor]


def nan_std(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Unbiased standard deviation over the values that are there, dimension kept; 0 for fewer than two."""
    present = ~values.isnan()
    count = present.sum(dim, keepdim=True)
    centred = torch.where(present, values - values.nanmean(dim, keepdim=True), 0.0)
    return (centred.square().sum(dim, keepdim=True) / (count - 1).clamp(min=1)).sqrt()


def combined_rewards(rewards_NF: torch.Tensor, weights_F: torch.Tensor) -> torch.Tensor:
    """Weighted sum over the functions that returned a value; NaN where none did. (N,)"""
    total_N = (rewards_NF * weights_F).nansum(-1)
    return total_N.masked_fill(rewards_NF.isnan().all(-1), float("nan"))


def group_mean(rewards_PG: torch.Tensor) -> torch.Tensor:
    """The mean of the group, missing rewards left out (DeepSeekMath, section 4.1.2). (P, 1)"""
    return rewards_PG.nanmean(-1, keepdim=True)


def leave_one_out(rewards_PG: torch.Tensor) -> torch.Tensor:
    """For each completion the mean of the others of its group (RLOO); itself where it is alone. (P, G)"""
    others_PG = (~rewards_PG.isnan()).sum(-1, keepdim=True) - 1
    total_P1 = rewards_PG.nansum(-1, keepdim=True)
    return torch.where(others_PG > 0, (total_P1 - rewards_PG) / others_PG.clamp(min=1), rewards_PG)


def normalised_advantages(
    rewards: GroupRewards, settings: AdvantageSettings, baseline: Baseline = group_mean
) -> torch.Tensor:
    """Advantages with a baseline from the group and the chosen scale.

    ``sum_then_normalize``: combine the functions, subtract the baseline, divide by std + 1e-4 of the group or
    of the batch (Lite PPO) or not at all (Dr. GRPO). ``normalize_then_sum``: normalise each function within
    the group, weight, sum, then whiten over the batch. A completion without any reward takes no part in the
    statistics and gets 0. Step rewards are added as :func:`process_advantages`.

    Returns:
        (N,), or (N, T) when there are step rewards.
    """
    size = rewards.num_generations
    if settings.aggregation == "normalize_then_sum":
        rewards_FPG = rewards.rewards_NF.T.reshape(-1, rewards.rewards_NF.shape[0] // size, size)
        scaled_FPG = torch.stack(
            [(r_PG - baseline(r_PG)) / (nan_std(r_PG, -1) + STD_EPSILON) for r_PG in rewards_FPG]
        )
        total_N = combined_rewards(scaled_FPG.reshape(len(scaled_FPG), -1).T, rewards.weights_F)
        advantages_N = (total_N - total_N.nanmean()) / (nan_std(total_N, 0) + STD_EPSILON)
    else:
        rewards_PG = combined_rewards(rewards.rewards_NF, rewards.weights_F).reshape(-1, size)
        centred_PG = rewards_PG - baseline(rewards_PG)
        if settings.scale == "group":
            centred_PG = centred_PG / (nan_std(rewards_PG, -1) + STD_EPSILON)
        elif settings.scale == "batch":
            centred_PG = centred_PG / (nan_std(rewards_PG.reshape(-1), 0) + STD_EPSILON)
        advantages_N = centred_PG.reshape(-1)
    advantages_N = advantages_N.nan_to_num(nan=0.0)
    if not rewards.step_rewards:
        return advantages_N
    return advantages_N.unsqueeze(1) + sum(
        rewards.weights_F[column]
        * process_advantages(steps, size, rewards.num_tokens, scale=settings.scale != "none").to(advantages_N)
        for column, steps in rewards.step_rewards.items()
    )


def with_penalty(rewards: GroupRewards, penalty_N: torch.Tensor) -> GroupRewards:
    """The rewards with one more function, of weight 1: −penalty for every completion with a reward."""
    unrewarded_N = rewards.rewards_NF.isnan().all(-1)
    column_N1 = (-penalty_N).masked_fill(unrewarded_N, float("nan")).unsqueeze(-1)
    return replace(
        rewards,
        rewards_NF=torch.cat([rewards.rewards_NF, column_N1], dim=-1),
        weights_F=torch.cat([rewards.weights_F, rewards.weights_F.new_ones(1)]),
    )


def process_advantages(
    step_rewards: StepRewards, num_generations: int, num_tokens: int, *, scale: bool = True
) -> torch.Tensor:
    """Process supervision (DeepSeekMath, section 4.1.3).

    All step rewards R of a group are normalised together, r̃ = (r − mean(R)) / std(R), and a token's
    advantage is the sum of the normalised rewards of the steps that end at or after it:
    A_it = Σ_{index(j) ≥ t} r̃_i^{index(j)}.

    Args:
        step_rewards: N sequences of (index of the step's last token, reward).
        scale: divide by the standard deviation (plus 1e-4).

    Returns:
        (N, num_tokens) float32
    """
    advantages_NT = torch.zeros(len(step_rewards), num_tokens)
    for start in range(0, len(step_rewards), num_generations):
        group = step_rewards[start : start + num_generations]
        values = torch.tensor([reward for steps in group for _, reward in steps], dtype=torch.float64)
        if not len(values):
            continue
        divisor = nan_std(values, 0).item() + STD_EPSILON if scale else 1.0
        for row, steps in enumerate(group, start):
            for end, reward in steps:
                advantages_NT[row, : end + 1] += (reward - values.mean().item()) / divisor
    return advantages_NT


Estimator = Callable[[GroupRewards, AdvantageSettings], torch.Tensor]


def _with_group_mean(rewards: GroupRewards, settings: AdvantageSettings) -> torch.Tensor:
    return normalised_advantages(rewards, settings, group_mean)


def _with_leave_one_out(rewards: GroupRewards, settings: AdvantageSettings) -> torch.Tensor:
    return normalised_advantages(rewards, settings, leave_one_out)


ADVANTAGES: dict[str, Estimator] = {"group_mean": _with_group_mean, "leave_one_out": _with_leave_one_out}


def register_advantage(name: str, estimator: Estimator) -> None:
    """Make ``advantage_baseline=name`` use ``estimator(rewards, settings) -> (N,) or (N, T)``.

    Raises:
        ValueError: the name is taken.
    """
    if name in ADVANTAGES:
        raise ValueError(
            f"advantage {name!r} is already registered; registered: {', '.join(sorted(ADVANTAGES))}"
        )
    ADVANTAGES[name] = estimator
