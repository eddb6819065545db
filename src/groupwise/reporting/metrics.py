"""Metrics between two log calls, kept as reductions and joined over ranks once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

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
from groupwise.records import Completion, RewardBatch, RolloutBatch
from groupwise.reporting.timing import StepTimer
from groupwise.tokenization.images import prompt_images, row_images, thumbnail

#: Counted from the start of the run instead of since the last log.
RUNNING_TOTALS = frozenset({"num_tokens"})


class MetricBuffer:
    """The metrics of one mode ("train" or "eval") and, on request, rows for the completions table."""

    def __init__(self) -> None:
        self.metrics: Metrics = {}
        self.rows: list[dict[str, Any]] = []
        self.timer = StepTimer()

    def record(self, metrics: Mapping[str, Reduction]) -> None:
        self.metrics = merge_metrics([self.metrics, metrics])

    def drain(self, gather: Callable[[Any], list[Any]]) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Numbers to log and table rows, over all ranks; starts the next interval.

        Args:
            gather: maps one picklable object per rank to the list of all of them: the only collective.

        Returns:
            finite numbers by name, and the rows of all ranks in rank order.
        """
        self.record(self.timer.stages())  # of an evaluation; those of training steps are recorded by step
        parts = gather((detach_metrics(self.metrics), self.rows))
        merged = merge_metrics(attach_metrics(plain) for plain, _ in parts)
        rows = [row for _, part in parts for row in part]
        self.metrics = {name: kept for name, kept in self.metrics.items() if name in RUNNING_TOTALS}
        self.rows = []
        values = {name: reduction.value() for name, reduction in merged.items()}
        return {name: value for name, value in values.items() if math.isfinite(value)}, rows

    def state_dict(self) -> dict[str, Any]:
        return {"metrics": detach_metrics(self.metrics), "rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.metrics = attach_metrics(state["metrics"])
        self.rows = list(state["rows"])


def completion_rows(
    rollout: RolloutBatch,
    scored: RewardBatch,
    advantages: torch.Tensor,
    reward_names: list[str],
    step: int,
    *,
    multimodal: bool = False,
) -> list[dict[str, Any]]:
    """One row per completion of this rank for the completions table: plain strings and numbers.

    With ``multimodal`` also small copies of the prompts' images, as the bytes of PNG files.
    """
    rewards_NF = scored.rewards.rewards_NF[scored.local]
    rows: list[dict[str, Any]] = []
    for i, rewards_F in enumerate(rewards_NF.tolist()):
        named = zip(reward_names, rewards_F, strict=False)
        rows.append(
            {
                "step": step,
                "prompt": _readable(rollout.prompts[i]),
                "completion": _readable(rollout.texts[i]),
                "rewards": {name: None if math.isnan(reward) else reward for name, reward in named},
                "advantage": advantages[i].mean().item(),
                "columns": {name: _plain(values[i]) for name, values in scored.columns.items()},
            }
        )
        if multimodal and rollout.images is not None:
            shared = i > 0 and rollout.images[i] is rollout.images[i - 1]
            given = prompt_images(rollout.prompts[i]) or row_images(rollout.rows[i])
            rows[-1]["images"] = rows[-2]["images"] if shared else [thumbnail(image) for image in given]
    return rows


def _readable(text: Any) -> str:
    if isinstance(text, str):
        return text
    return "\n".join(f"{message['role']}: {_said(message)}" for message in text)


def _said(message: dict[str, Any]) -> str:
    """The content of a message, and the tools that it calls."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    called = [
        f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False, default=str)})" for call in calls
    ]
    return " ".join(part for part in (_content(message.get("content")), *called) if part)


def _content(content: Any) -> str:
    if not isinstance(content, list):
        return str(content or "")
    blocks = [block.get("text") if block["type"] == "text" else f"<{block['type']}>" for block in content]
    return "".join(block or "" for block in blocks)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def length_metrics(prompt_ids: list[list[int]], completions: list[Completion]) -> Metrics:
    """Token counts and completion lengths, over all completions and over those that ended by themselves."""
    lengths = [  # of what the policy wrote: neither tools nor environments
        len(c.token_ids) if c.loss_mask is None else sum(c.loss_mask) for c in completions
    ]
    metrics: Metrics = {
        "num_tokens": Sum(float(sum(lengths) + sum(len(ids) for ids in prompt_ids))),
        "completions/clipped_ratio": Mean(
            float(sum(completion.truncated for completion in completions)), float(len(completions))
        ),
    }
    ended = [
        length for length, completion in zip(lengths, completions, strict=True) if not completion.truncated
    ]
    for kind, values in (("length", lengths), ("terminated_length", ended)):
        if values:
            metrics[f"completions/mean_{kind}"] = Mean(float(sum(values)), float(len(values)))
            metrics[f"completions/min_{kind}"] = Min(float(min(values)))
            metrics[f"completions/max_{kind}"] = Max(float(max(values)))
    return metrics
