"""Advantage estimators; groups are G adjacent completions of one prompt, a missing reward is NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from groupwise.registry import Registry

if TYPE_CHECKING:
    from groupwise.records.rollout import GroupRewards, Span, StepRewards

#: Added to a standard deviation before division.
STD_EPSILON = 1e-4  # equal rewards give 0 instead of 0 / 0
_ROUNDING = 1e-6  # of the terms of a sum in float32, which has 7 digits


@dataclass(frozen=True)
class AdvantageSettings:
    """Settings of the estimators, in ``GRPOConfig`` ``scale_rewards`` and ``multi_objective_aggregation``.

    scale: "group", "batch" or "none".
    aggregation: name in ``AGGREGATIONS``.
    """

    scale: str = "group"
    aggregation: str = "sum_then_normalize"


Baseline = Callable[[torch.Tensor], torch.Tensor]


def above_lowest(values: torch.Tensor, dim: int, rounding: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Subtract the lowest value along ``dim``, ignoring NaN; differences up to ``rounding`` become 0.

    Equal values give zeros, whose mean is exactly 0. The float32 mean of seven times 1000.3 is 1000.2999, and
    AdamW would make a step of full size out of the difference.
    """
    above = values - values.masked_fill(values.isnan(), torch.inf).amin(dim, keepdim=True)
    return above.masked_fill(above <= rounding, 0.0)


def nan_std(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Unbiased standard deviation that ignores NaN and keeps ``dim``; exactly 0 for equal values."""
    present = ~values.isnan()
    count = present.sum(dim, keepdim=True)  # 1 in place of dim
    values = above_lowest(values, dim)
    # NaN adds nothing to the sum of squares.
    centred = torch.where(present, values - values.nanmean(dim, keepdim=True), 0.0)
    return (centred.square().sum(dim, keepdim=True) / (count - 1).clamp(min=1)).sqrt()


def weighted_sum(rewards_NF: torch.Tensor, weights_F: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Sum the weighted rewards of each completion, ignoring NaN. Returns (N,), NaN where all are NaN."""
    total_N = (rewards_NF * weights_F).nansum(-1)  # (N, F) · (F,), summed to (N,); NaN counts as 0
    return total_N.masked_fill(rewards_NF.isnan().all(-1), float("nan"))  # no function gave a reward


Combine = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Aggregation:
    """Combination of the reward functions into one reward per completion.

    combine: maps ``(rewards_NF, weights_F, num_generations)`` to (N,). A NaN reward means that the function
        returned None; a NaN result leaves the completion out of the statistics of its group.
    normalize_first: normalize each function within its group, combine, and whiten the result over the batch
        (GDPO, arXiv 2601.05242). Otherwise the raw rewards are combined and the result is normalized.
    """

    combine: Combine = weighted_sum  # (N, F), (F,), G to (N,)
    normalize_first: bool = False


AGGREGATIONS: Registry[Aggregation] = Registry(
    "aggregation",
    {"sum_then_normalize": Aggregation(), "normalize_then_sum": Aggregation(normalize_first=True)},
)


def register_aggregation(name: str, combine: Combine, *, normalize_first: bool = False) -> None:
    """Make ``multi_objective_aggregation=name`` combine the reward functions with ``combine``.

    Advantages, the metrics ``reward``, ``reward_std`` and ``frac_reward_zero_std``, dynamic sampling and
    evaluation (pass@k) all use it.

    >>> def worst(rewards_NF, weights_F, num_generations):
    ...     return (weights_F * rewards_NF).amin(-1)
    >>> register_aggregation("worst", worst)

    Args:
        name: value of the setting.
        combine: ``combine(rewards_NF, weights_F, num_generations) -> (N,)``; groups of ``num_generations``
            completions are adjacent rows, NaN marks a missing reward.
        normalize_first: pass rewards that are normalized within their group to ``combine`` when advantages
            are computed; metrics and evaluation always combine the raw rewards.

    Raises:
        ConfigError: the name is taken.
    """
    AGGREGATIONS.register(name, Aggregation(combine, normalize_first))


def total_rewards(rewards: GroupRewards, aggregation: str = "sum_then_normalize") -> torch.Tensor:
    """Aggregate the raw rewards of all functions and subtract the penalty.

    Returns:
        (N,), NaN for completions without a reward.

    Raises:
        ValueError: a registered aggregation returned another shape.
    """
    total_N = _combine(rewards.rewards_NF, rewards, aggregation)
    return total_N if rewards.penalty_N is None else total_N - rewards.penalty_N


def _combine(values_NF: torch.Tensor, rewards: GroupRewards, aggregation: str) -> torch.Tensor:
    total_N = AGGREGATIONS[aggregation].combine(values_NF, rewards.weights_F, rewards.num_generations)  # (N,)
    if total_N.shape != values_NF.shape[:1]:
        raise ValueError(
            f"aggregation {aggregation!r} returned a tensor of shape {tuple(total_N.shape)}; expected "
            f"{tuple(values_NF.shape[:1])}, one reward per completion"
        )
    return total_N


def _compared(
    rewards: GroupRewards, aggregation: str, baseline: Baseline
) -> tuple[torch.Tensor, torch.Tensor]:
    """Aggregate raw or normalized rewards: totals, and differences from the group's lowest, (P, G) each.

    Differences are 0 where rewards are equal; sums of several functions are equal within 1e-6 of their terms.
    """
    rule, values_NF, size = AGGREGATIONS[aggregation], rewards.rewards_NF, rewards.num_generations
    num_functions = values_NF.shape[1]
    if rule.normalize_first:
        scaled_FPG = above_lowest(values_NF.T.reshape(num_functions, -1, size), -1)  # (N, F) -> (F, P, G)
        scaled_FPG = (scaled_FPG - baseline(scaled_FPG)) / (nan_std(scaled_FPG, -1) + STD_EPSILON)
        values_NF = scaled_FPG.flatten(1).T
        total_N = _combine(values_NF, rewards, aggregation)
    else:
        total_N = total_rewards(rewards, aggregation)
    total_PG = total_N.reshape(-1, size)
    if num_functions == 1:
        return total_PG, above_lowest(total_PG, -1)
    # 0.6 + 0.3 - 0.9 is 6e-8 in float32, and the order of a sum may differ between rows.
    terms_NF = values_NF * rewards.weights_F if rule.combine is weighted_sum else total_N.unsqueeze(1)
    scale_P1 = terms_NF.abs().nansum(-1).reshape(-1, size).amax(-1, keepdim=True)  # (N, F) -> (N,) -> (P, 1)
    return total_PG, above_lowest(total_PG, -1, _ROUNDING * scale_P1)


def has_variance(rewards: GroupRewards, aggregation: str = "sum_then_normalize") -> torch.Tensor:
    """Return for each group whether its rewards differ (P,); without, its advantages are exactly 0.

    Missing rewards are ignored. A difference between step rewards is enough. With ``normalize_first``, the
    sums of normalized rewards must differ.
    """
    _, above_PG = _compared(rewards, aggregation, group_mean)
    return (above_PG > 0).any(-1) | rewards.steps_vary().to(above_PG.device)


def with_small_groups(dropped_N: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Extend dropped completions (N,) by the last one of a group: a single reward has no baseline.

    With one completion per prompt, as in evaluation, groups are never small.
    """
    dropped_PG = dropped_N.view(-1, num_generations)  # True: the rollout failed
    remaining_P1 = (~dropped_PG).sum(-1, keepdim=True)  # (P, 1), 0 to G
    return (dropped_PG | (remaining_P1 < min(2, num_generations))).view(-1)  # (N,)


def group_mean(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Group mean, ignoring NaN (DeepSeekMath, section 4.1.2). Returns (P, 1)."""
    return rewards_PG.nanmean(-1, keepdim=True)


def leave_one_out(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Mean of the other completions of the group (RLOO), or its own reward if it is alone. Returns (P, G)."""
    others_PG = (~rewards_PG.isnan()).sum(-1, keepdim=True) - 1  # G - 1 where no reward is missing
    total_P1 = rewards_PG.nansum(-1, keepdim=True)  # (P, 1)
    return torch.where(others_PG > 0, (total_P1 - rewards_PG) / others_PG.clamp(min=1), rewards_PG)


def normalized_advantages(
    rewards: GroupRewards,
    settings: AdvantageSettings,
    baseline: Baseline = group_mean,
    own_turn: bool = False,
) -> torch.Tensor:
    """Compute advantages with a group baseline.

    ``sum_then_normalize``: sum the functions, subtract the baseline, then divide by std + 1e-4 of the group
    or of the batch (Lite PPO), or by nothing (Dr. GRPO). ``normalize_then_sum``: normalize each function
    within the group, weight, sum, then whiten over the batch. A registered aggregation replaces the sum, in
    the order that its ``normalize_first`` gives. A completion without any reward is left out of the
    statistics and gets 0. Step rewards are added as :func:`process_advantages`; ``normalize_first`` neither
    whitens them nor divides by the batch.

    Returns:
        (N,), or (N, T) when there are step rewards.
    """
    size = rewards.num_generations
    # (P, G), NaN where there is none.
    total_PG, above_PG = _compared(rewards, settings.aggregation, baseline)
    normalize_first = AGGREGATIONS[settings.aggregation].normalize_first
    if normalize_first:  # whitened over all N
        centred_PG = (total_PG - total_PG.nanmean()) / (nan_std(total_PG.flatten(), 0) + STD_EPSILON)
        centred_PG = centred_PG.where((above_PG > 0).any(-1, keepdim=True), 0.0)  # 0 - 1e-9 otherwise
    else:
        centred_PG = above_PG - baseline(above_PG)  # group_mean (P, 1), leave_one_out (P, G)
        if settings.scale == "group":  # (r - r̄) / (std + ε), DeepSeekMath section 4.1.2
            centred_PG = centred_PG / (nan_std(above_PG, -1) + STD_EPSILON)
        elif settings.scale == "batch":  # one divisor for all groups, so that their gradients compare
            centred_PG = centred_PG / (nan_std(total_PG.flatten(), 0) + STD_EPSILON)
    advantages_N = centred_PG.reshape(-1).nan_to_num(nan=0.0)  # without a reward there is no gradient
    if not rewards.step_rewards:
        return advantages_N
    return advantages_N.unsqueeze(1) + sum(  # (N, 1) + (N, T)
        rewards.weights_F[column]
        * process_advantages(
            steps,
            size,
            rewards.num_tokens,
            scale="group" if normalize_first and settings.scale == "batch" else settings.scale,
            turns=rewards.turns,
            leave_out=baseline is leave_one_out,
            own_turn=own_turn,
        ).to(advantages_N)
        for column, steps in rewards.step_rewards.items()
    )


def turn_of(end: int, turns: Sequence[Span]) -> int:
    """Return the number in time of the last turn with the token at ``end``; 0 without turns."""
    return max((number for number, (start, stop) in enumerate(turns) if start <= end < stop), default=0)


def process_advantages(
    step_rewards: StepRewards,
    num_generations: int,
    num_tokens: int,
    *,
    scale: str = "group",
    turns: Sequence[Sequence[Span]] = (),
    leave_out: bool = False,
    own_turn: bool = False,
) -> torch.Tensor:
    """Compute advantages of process supervision (DeepSeekMath, section 4.1.3).

    All step rewards R of a group are normalized together, r̃ = (r − mean(R)) / (std(R) + 1e-4). A token gets
    the sum over the steps that end at or after it: A_it = Σ_{index(j) ≥ t} r̃_i^{index(j)}. With turns, the
    steps of later turns count, wherever their tokens are::

        turns (0, 2), (4, 5), (2, 4)   the third turn returns to the row of the first
        step at token 3                credits tokens 0 to 4
        step at token 4                credits tokens 0, 1 and 4

    Args:
        step_rewards: N sequences of (index of the step's last token, reward).
        num_generations: G.
        num_tokens: T.
        scale: divide by the standard deviation of the steps of the "group" or of the "batch", or "none".
        turns: N sequences of the spans of turns in the order of time; () for completions of one turn.
        leave_out: the mean is that of the other completions' steps (RLOO).
        own_turn: a step credits tokens of its own turn alone.

    Returns:
        (N, num_tokens) float64
    """
    # (N, T), 0 after the last step.
    advantages_NT = torch.zeros(len(step_rewards), num_tokens, dtype=torch.float64)
    tokens_T = torch.arange(num_tokens)
    batch = torch.tensor([reward for steps in step_rewards for _, reward in steps], dtype=torch.float64)
    for start in range(0, len(step_rewards), num_generations):
        group = step_rewards[start : start + num_generations]
        # All steps of the group.
        values = torch.tensor([reward for steps in group for _, reward in steps], dtype=torch.float64)
        if len(values.unique()) < 2:  # no step, or equal ones
            continue
        spread = nan_std(batch if scale == "batch" else values, 0).item()
        divisor = 1.0 if scale == "none" else spread + STD_EPSILON
        for row, steps in enumerate(group, start):
            others = [r for other, each in enumerate(group, start) if other != row for _, r in each]
            if leave_out and not others:  # its steps have no baseline
                continue
            mean = sum(others) / len(others) if leave_out else values.mean().item()
            spans = turns[row] if turns else ()
            numbers_T = torch.full((num_tokens,), len(spans))  # of the turn of each token; 0 without turns
            # A token in the spans of two turns, of a repeated request, is trained in the earlier one.
            for number, (first, stop) in reversed([*enumerate(spans)]):
                numbers_T[first:stop] = number
            for end, reward in steps:
                # Every token up to the end of the step led to its reward.
                credited_T = (numbers_T == numbers_T[end]) & (tokens_T <= end)
                if not own_turn:
                    credited_T |= numbers_T < turn_of(end, spans)
                advantages_NT[row, credited_T] += (reward - mean) / divisor
    return advantages_NT


def per_token_advantages(rewards: GroupRewards, settings: AdvantageSettings) -> torch.Tensor:
    """Use step rewards as the advantages of their own tokens: A_it = A_i + Σ_f w_f r_it^f.

    No baseline, no standard deviation and no sum over later tokens: for rewards that already compare a token
    with the policy, as in on-policy distillation. A_i is the group advantage of the other functions, 0
    without any.

    Returns:
        (N,), or (N, T) when there are step rewards.
    """
    advantages_N = normalized_advantages(replace(rewards, step_rewards={}), settings)
    if not rewards.step_rewards:
        return advantages_N
    advantages_NT = advantages_N.unsqueeze(1).repeat(1, rewards.num_tokens)  # (N, T), A_i at every token
    weights = rewards.weights_F.tolist()
    for column, step_rewards in rewards.step_rewards.items():
        for row, steps in enumerate(step_rewards):
            for index, reward in steps:
                advantages_NT[row, index] += weights[column] * reward  # this token alone
    return advantages_NT


Estimator = Callable[["GroupRewards", AdvantageSettings], torch.Tensor]


ADVANTAGES: Registry[Estimator] = Registry(
    "advantage",
    {
        "group_mean": normalized_advantages,
        "leave_one_out": partial(normalized_advantages, baseline=leave_one_out),
        "per_token": per_token_advantages,
        "turn_level": partial(normalized_advantages, own_turn=True),
    },
)


def register_advantage(name: str, estimator: Estimator) -> None:
    """Make ``advantage_baseline=name`` available.

    Args:
        estimator: ``(GroupRewards, AdvantageSettings) -> (N,) or (N, T)`` advantages.

    Raises:
        ConfigError: the name is taken.
    """
    ADVANTAGES.register(name, estimator)
