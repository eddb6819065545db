"""Metrics between two logs: accumulated on each rank as reductions, merged over ranks once per log."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch

from groupwise.config.grpo_config import GRPOConfig
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
from groupwise.errors import as_number, checked_entries
from groupwise.records import RolloutBatch
from groupwise.reporting.table import CompletionRow
from groupwise.reporting.timing import StepTimer

#: Metrics that are summed over the whole run instead of since the last log.
RUNNING_TOTALS = frozenset({"num_tokens"})

#: Names that the trainer, ``Trainer`` and evaluations log.
_TRAINER_METRICS = re.compile(
    r"loss|grad_norm|learning_rate|epoch|step|total_flos|num_input_tokens_seen|model_preparation_time"
    r"|train_loss|(train_)?(runtime|samples_per_second|steps_per_second)"
    r"|reward|reward_std|frac_reward_zero_std|rewards/.+/(mean|std|steps|errors)"
    r"|(rewards/.+/)?(pass|maj|avg)@\d+(_gain)?(_ci95|_low|_high)?"
    r"|completions/(mean|min|max)_(terminated_)?length|completions/clipped_ratio|num_tokens"
    r"|time/(generate|reward|reward/.+|sync|logprobs|train|idle)|memory/(generate|reward|sync|logprobs|train)|step_time|tokens_per_second|mfu"
    r"|entropy|entropy_coef|kl|policy_loss|aux_loss|cispo_clip_ratio|vespo/phi_seq_mean"
    r"|clip_ratio/(low_mean|low_min|high_mean|high_max|region_mean)"
    r"|sampling/(logprob_mismatch|(sampling_logp_difference|truncated_mass|importance_sampling_ratio)/.+)"
    r"|tools/(call|failure|fork)_frequency|rollouts/(retry_frequency|dropped_share|dropped_groups)"
    r"|rollouts/(rows|computed_share)"
    r"|dynamic_sampling/(rounds|unfilled_share|discarded_share)"
    r"|skipped_share|padding_share|layout_fell_back|staleness(/max)?"
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
        values = {name: reduction.value() for name, reduction in merged.items()}
        return {name: value for name, value in values.items() if math.isfinite(value)}, rows

    def snapshot(self) -> dict[str, Any]:
        """Return metrics and rows; both are replaced, never changed in place."""
        return {"metrics": self.metrics, "rows": self.rows}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Return to the state of a snapshot."""
        self.metrics, self.rows = snapshot["metrics"], snapshot["rows"]

    def merge(self, snapshots: Sequence[dict[str, Any]], config: GRPOConfig) -> dict[str, Any]:
        """Return what all ranks have recorded, on the first rank: the next log merges ranks."""
        own = snapshots if config.process_index == 0 else []
        return {
            "metrics": merge_metrics(part["metrics"] for part in own),
            "rows": [row for part in own for row in part["rows"]],
        }


def taken_metric(name: str) -> str:
    """Return why a metric of user code cannot have the name: it would be mixed with the trainer's."""
    if not _TRAINER_METRICS.fullmatch(name):
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
    behind = [step - version for c in completions for version in c.versions or ()]
    if behind:
        metrics["staleness"] = Mean(float(sum(behind)), float(len(behind)))
        metrics["staleness/max"] = Max(float(max(behind)))
    return {**metrics, **rollouts.metrics}
