"""Metrics between two logs: accumulated on each rank as reductions, merged over ranks once per log."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.advantages import has_variance, nan_std, total_rewards, turn_of
from groupwise.core.metrics import (
    Max,
    Mean,
    Metrics,
    Min,
    Reduction,
    Sum,
    attach_metrics,
    detach_metrics,
    merge_metrics,
)
from groupwise.errors import as_number, checked_entries, warn_once
from groupwise.records import MicroBatch, RewardBatch, RolloutBatch
from groupwise.records.rollout import GroupRewards
from groupwise.reporting.table import CompletionRow
from groupwise.reporting.timing import StepTimer

logger = logging.getLogger(__name__)

#: Between a metric and the value of ``metrics_by`` that it is of, until it is logged as ``<metric>/<value>``.
BY = "\0"

#: Metrics that are summed over the whole run instead of since the last log.
RUNNING_TOTALS = frozenset({"num_tokens"})

#: Names that ``Trainer`` and evaluations log beside the documented metrics.
_UNDOCUMENTED = re.compile(
    r"step|total_flos|num_input_tokens_seen|model_preparation_time|train_loss"
    r"|(train_)?(runtime|samples_per_second|steps_per_second)"
    r"|(rewards/.+/)?(pass|maj|avg)@\d+(_gain)?(_ci95|_low|_high)?"
)

#: Reductions of ``record_metric``.
REDUCTIONS: dict[str, Callable[[float], Reduction]] = {"mean": Mean, "sum": Sum, "min": Min, "max": Max}

PlainMetrics = Mapping[str, tuple[str, tuple[float, ...]]]
#: Contribution of one rank to a log: its metrics as plain numbers, and its rows.
RankPart = tuple[PlainMetrics, list[CompletionRow]]


class MetricBuffer:
    """Metrics of one mode ("train" or "eval") since the last log, and rows of the completions table.

    >>> buffer = MetricBuffer()
    >>> with buffer.phase("generate"):
    ...     rollouts = generate()
    >>> buffer.record({"kl": Mean(0.2)})
    >>> buffer.record_metric("prompt_length", 37)
    >>> values, rows = buffer.drain(gather)
    """

    def __init__(self) -> None:
        self.metrics: Metrics = {}
        self.rows: list[CompletionRow] = []
        self.timer = StepTimer()
        self.values: list[str] = []  # of metrics_by, in the logs so far

    def phase(self, name: str, *, wait: bool = True) -> AbstractContextManager[None]:
        """Measure a block as ``time/<name>``; see :meth:`StepTimer.measure`."""
        return self.timer.measure(name, wait=wait)

    def record(self, metrics: Mapping[str, Reduction]) -> None:
        """Merge ``metrics`` into those recorded since the last log."""
        self.metrics = merge_metrics([self.metrics, metrics])

    def record_metric(
        self,
        name: str,
        value: float | torch.Tensor,
        reduction: Literal["mean", "sum", "min", "max"] = "mean",
    ) -> None:
        """Add a value to the metric ``name`` of the next log.

        Args:
            value: a finite number, or a tensor with one element.
            reduction: combines the values of all steps and ranks since the last log.

        Raises:
            ValueError: the trainer logs ``name`` itself, the value is not a finite number, the reduction is
                unknown, or ``name`` was recorded with another reduction since the last log.
        """
        source, allowed = f"record_metric({name!r}, ...)", "one finite number"
        numbers = checked_metrics({name: value}, source, ValueError, allowed=allowed)
        if not all(map(math.isfinite, numbers.values())):
            raise ValueError(f"{source}: the value is {value}; allowed: {allowed}")
        if reduction not in REDUCTIONS:
            raise ValueError(
                f"record_metric({name!r}, ...): reduction={reduction!r} is unknown; allowed: "
                f"{', '.join(REDUCTIONS)}"
            )
        reduced = {name: REDUCTIONS[reduction](number) for name, number in numbers.items()}
        try:
            self.metrics = merge_metrics([self.metrics, reduced])
        except TypeError as error:
            raise ValueError(f"record_metric({name!r}, ..., {reduction!r}): {error}") from error

    def drain(
        self, gather: Callable[[RankPart], list[RankPart]]
    ) -> tuple[dict[str, float], list[CompletionRow]]:
        """Return the metrics and rows of all ranks since the last call, and clear them.

        Args:
            gather: returns the objects of all ranks in rank order; the only collective.

        Returns:
            finite numbers by name, and the rows of all ranks in rank order.
        """
        self.record(self.timer.phases())  # evaluation only: close_step records those of training steps
        parts = gather((detach_metrics(self.metrics), self.rows))
        merged = merge_metrics(attach_metrics(plain) for plain, _ in parts)
        rows = [row for _, part in parts for row in part]
        self.metrics = {name: kept for name, kept in self.metrics.items() if name in RUNNING_TOTALS}
        self.rows = []
        values = {name: reduction.value() for name, reduction in self._by_value(merged).items()}
        return {name: value for name, value in values.items() if math.isfinite(value)}, rows

    def _by_value(self, merged: Metrics) -> Metrics:
        """Return the metrics under the names of the log; those of further values are joined in ``other``."""
        own = {name: reduction for name, reduction in merged.items() if BY not in name}
        parts = [(name.partition(BY), reduction) for name, reduction in merged.items() if BY in name]
        self.values = first_values((value for (_, _, value), _ in parts), self.values)
        named = merge_metrics(
            {f"{name}/{value if value in self.values else 'other'}": reduction}
            for (name, _, value), reduction in parts
        )
        for name in own.keys() & named.keys():
            warn_once(logger, "the metric %r of user code is replaced by that of metrics_by", name)
        return {**own, **named}

    def snapshot(self) -> dict[str, Any]:
        """Return metrics, rows and values; they are replaced, never changed in place."""
        return {"metrics": self.metrics, "rows": self.rows, "values": self.values}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Return to the state of a snapshot."""
        self.metrics, self.rows = snapshot["metrics"], snapshot["rows"]
        self.values = snapshot.get("values", [])

    def merge(self, snapshots: Sequence[dict[str, Any]], config: GRPOConfig) -> dict[str, Any]:
        """Return what all ranks have recorded, on the first rank: the next log merges ranks."""
        own = snapshots if config.process_index == 0 else []
        return {
            "metrics": merge_metrics(part["metrics"] for part in own),
            "rows": [row for part in own for row in part["rows"]],
            "values": snapshots[0].get("values", []),  # alike on all ranks
        }


def first_values(values: Iterable[str], known: Sequence[str] = (), most: int = 32) -> list[str]:
    """Return the values with metrics of their own: those of earlier logs, then the others in order."""
    return [*known, *sorted({*values} - {*known})][:most]


def taken_metric(name: str) -> str:
    """Return why a metric of user code cannot have the name: it would be mixed with the trainer's."""
    from groupwise.reporting.documented import documentation_of  # reads YAML, for metrics of user code alone

    if not _UNDOCUMENTED.fullmatch(name) and documentation_of(name) is None:
        return ""
    return (
        f"the trainer logs {name!r} itself; choose another name; those that begin with 'custom/' are never "
        f"the trainer's, such as 'custom/{name}'"
    )


#: Metrics of user code: numbers, under names that are not the trainer's.
checked_metrics = partial(checked_entries, objection=taken_metric, convert=as_number, allowed="one number")


def rollout_metrics(rollouts: RolloutBatch, step: int) -> Metrics:
    """Token counts, completion lengths and staleness of this rank's rows, without dropped ones.

    Lengths count the tokens sampled by the policy, without those of tools and environments; terminated
    lengths those of completions that were not truncated.

    Args:
        step: optimizer steps completed; a token is as many steps stale as its weights are behind.
    """
    kept = [row for row, completion in enumerate(rollouts.completions) if not completion.dropped]
    completions = [rollouts.completions[row] for row in kept]
    lengths = [len(c.token_ids) if c.loss_mask is None else sum(c.loss_mask) for c in completions]
    num_prompt_tokens = sum(len(rollouts.prompt_ids[row]) for row in kept)
    num_prompt_tokens += sum(completion.num_context_tokens for completion in completions)
    num_clipped = sum(completion.truncated for completion in completions)
    metrics: Metrics = {
        "num_tokens": Sum(float(sum(lengths) + num_prompt_tokens)),
        "completions/clipped_ratio": Mean(float(num_clipped), float(len(completions))),
    }
    terminated = [length for length, c in zip(lengths, completions, strict=True) if not c.truncated]
    for kind, values in (("length", lengths), ("terminated_length", terminated)):
        if values:
            metrics[f"completions/mean_{kind}"] = Mean(float(sum(values)), float(len(values)))
            metrics[f"completions/min_{kind}"] = Min(float(min(values)))
            metrics[f"completions/max_{kind}"] = Max(float(max(values)))
    num_sampled = Counter[int]()  # tokens by the version of the weights
    for completion in completions:
        num_sampled.update(completion.versions or ())
    if num_sampled:
        behind = sum((step - version) * count for version, count in num_sampled.items())
        metrics["staleness"] = Mean(float(behind), float(num_sampled.total()))
        metrics["staleness/max"] = Max(float(step - min(num_sampled)))
    return {**metrics, **rollouts.metrics}


_NAMED_TURNS = 8  # with a metric of their own


_BY_VALUE = ("reward", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio")


def reward_metrics(
    rewards: GroupRewards, names: list[str], aggregation: str = "sum_then_normalize"
) -> Metrics:
    """Statistics of the global batch (the same on every rank), weighted by the number of rewards.

    Step rewards count by their sum; a group whose step rewards differ is not one of zero deviation.

    Args:
        names: names of the reward functions, in the order of their columns.
        aggregation: combines them into ``reward``, ``reward_std`` and ``frac_reward_zero_std``.
    """
    metrics: Metrics = {}
    sums = rewards.with_step_sums()  # (N, F): step rewards of a completion by their sum
    for column, name in enumerate(names):
        values_N = sums.rewards_NF[:, column]
        scored = (~values_N.isnan()).sum().item()
        if scored:
            metrics[f"rewards/{name}/mean"] = Mean(values_N.nansum().item(), scored)
            metrics[f"rewards/{name}/std"] = Mean(nan_std(values_N, 0).item() * scored, scored)
        if column in rewards.step_rewards:
            num_steps = sum(len(steps) for steps in rewards.step_rewards[column])
            metrics[f"rewards/{name}/steps"] = Mean(num_steps, scored)
    metrics |= turn_metrics(rewards)
    total_PG = total_rewards(sums, aggregation).view(-1, rewards.num_generations)  # (N,) -> (P, G)
    scored = (~total_PG.isnan()).sum().item()
    if scored:
        scored_P = ~total_PG.isnan().all(-1)
        # No advantage, and no gradient of the policy loss: what dynamic_sampling would replace.
        constant_P = scored_P & ~has_variance(rewards, aggregation)
        metrics["reward"] = Mean(total_PG.nansum().item(), scored)
        metrics["reward_std"] = Mean(nan_std(total_PG.flatten(), 0).item() * scored, scored)
        metrics["frac_reward_zero_std"] = Mean(constant_P.sum().item(), scored_P.sum().item())
    return metrics


def turn_metrics(rewards: GroupRewards) -> Metrics:
    """Weighted step rewards by turn, means over the completions that have one in it.

    Returns:
        ``reward/turn_1`` to ``reward/turn_8``, and those of all others as ``reward/later_turns``.
    """
    sums: defaultdict[tuple[int, int], float] = defaultdict(float)  # by turn and row
    for column, steps_N in rewards.step_rewards.items() if rewards.turns else ():
        weight = rewards.weights_F[column].item()
        for row, (steps, turns) in enumerate(zip(steps_N, rewards.turns, strict=True)):
            for end, reward in steps:
                sums[min(turn_of(end, turns), _NAMED_TURNS), row] += weight * reward
    metrics = [
        {f"reward/turn_{turn + 1}" if turn < _NAMED_TURNS else "reward/later_turns": Mean(reward)}
        for (turn, _), reward in sorted(sums.items())
    ]
    return merge_metrics(metrics)


def metrics_by_value(
    rollouts: RolloutBatch, rewards: RewardBatch, column: str, aggregation: str
) -> dict[str, Reduction]:
    """Return reward, share of groups without variance, length and truncation for each value of a column.

    A rank counts its own completions, and the groups whose first completion it has; rows without a value are
    left out. Merged over ranks, every completion and group counts once.
    """
    size, first, rows_of = rewards.num_generations, rewards.local.start, dict[str, list[int]]()
    for row in range(rewards.num_valid):
        if (value := rollouts.rows[row].get(column)) is not None:
            rows_of.setdefault(str(value), []).append(row)
    metrics: Metrics = {}
    for value, rows in rows_of.items():
        found = rollout_metrics(rollouts.select(rows), 0)
        # Ranks of B = 6 rows, G = 4: groups begin in rows 0 and 4 of the first, and in row 2 of the second.
        begins = [first + row for row in rows if (first + row) % size == 0]
        if begins:  # the last completions of a group may be on the next rank; its rewards are on all
            groups = replace(rewards, columns={}).select([n + i for n in begins for i in range(size)])
            found |= reward_metrics(groups, [], aggregation)
        metrics |= {name + BY + value: found[name] for name in _BY_VALUE if name in found}
    return metrics


def entropy_by_value(batch: MicroBatch, entropy_BT: torch.Tensor) -> Metrics:
    """Return the entropy of the loss tokens for each value of ``metrics_by``, on the device.

    Values travel with their rows, which rebalancing may have given to another rank.
    """
    totals_B, counts_B = (entropy_BT.detach() * batch.loss_mask_BT).sum(-1), batch.loss_mask_BT.sum(-1)
    rows = zip(batch.metric_values or (), totals_B, counts_B, strict=True)
    return merge_metrics({"entropy" + BY + str(of): Mean(*sums)} for of, *sums in rows if of is not None)
