"""State under TRL's names: the buffer of dictionaries, metrics as lists, columns of the completions table."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.metrics import Mean, Reduction, Sum, attach_metrics, detach_metrics, merge_metrics
from groupwise.data.prompt_source import DatasetPrompts, PromptSource
from groupwise.errors import ConfigError
from groupwise.records import Completion, RewardBatch, RolloutBatch, Row
from groupwise.records.serialization import NotSaved
from groupwise.reporting.metrics import RUNNING_TOTALS, MetricBuffer, RankPart
from groupwise.reporting.table import CompletionRow, completion_rows
from groupwise.trl_hooks.inputs import Inputs


@dataclass
class InputsBuffer:
    """Dictionaries of a generation batch, one per micro-batch, and the dataset rows that they are made from.

    As in TRL, ``step`` selects the dictionary, and a hook may change it. The rows follow the micro-batches of
    ``Trainer``: those of a generation batch are given once per micro-batch that is trained on it.

    entries: dictionaries of the newest generation batch.
    num_iterations: how often each is used.
    step: ``_step`` of the trainer, micro-batches trained on.
    filled_at: ``step`` at which the entries were generated.
    rows: this rank's rows of a generation batch.
    num_left: micro-batches that are still to be given ``rows``.
    rows_from: epoch and index in the prompts before ``rows`` were taken.
    """

    sampler = None  # not part of the dictionaries: as in TRL, log-probs have the present temperature

    device: torch.device | str = "cpu"
    entries: list[Inputs] = field(default_factory=list)
    num_iterations: int = 1
    step: int = 0
    filled_at: int = 0
    rows: list[Row] = field(default_factory=list)
    num_left: int = 0
    rows_from: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """True if the next micro-batch needs a new generation."""
        return not 0 < self.step - self.filled_at < len(self.entries) * self.num_iterations

    def fill(self, entries: Sequence[Inputs], num_iterations: int) -> None:
        """Replace the entries by a new generation."""
        self.entries, self.num_iterations, self.filled_at = list(entries), num_iterations, self.step

    @property
    def current(self) -> Inputs:
        """Entry of the next micro-batch, the object itself: changes of a hook last for the next iteration."""
        return self.entries[(self.step - self.filled_at) % len(self.entries)]

    def read_prompts(self, prompts: PromptSource, num_micro_batches: int, config: GRPOConfig) -> None:
        """Read the sampler when TRL reads it at the beginning of a window: its order may depend on rewards.

        TRL's loader takes the micro-batches of the window and reads one more, in the same epoch. It reads a
        generation batch with the first of its micro-batches.

        Example: a window is a generation (4 of 4): the next one is read too. A window is half of one (2 of
        4): the first half reads nothing more, the second the next generation.
        """
        if not isinstance(prompts, DatasetPrompts):
            return
        uses, num_prompts = config.micro_batches_per_generation, config.prompts_per_batch
        missing = num_micro_batches - self.num_left  # below 0: the generation lasts beyond this window
        num_batches = -(-missing // uses)
        prompts.read_ahead(num_batches * num_prompts)
        if missing % uses == 0:
            prompts.read_ahead((num_batches + 1) * num_prompts, same_epoch=True)

    def next_rows(self, prompts: PromptSource, config: GRPOConfig) -> list[Row]:
        """Return the rows of the next micro-batch: those of its whole generation batch, B of this rank."""
        if self.num_left == 0:
            self.rows_from = {"epoch": prompts.epoch, "index": prompts.index}
            self.rows = prompts.take(config.prompts_per_batch)
            self.num_left = config.micro_batches_per_generation
        self.num_left -= 1
        return self.rows

    def read_rows_again(self, prompts: PromptSource, config: GRPOConfig) -> None:
        """Take the rows of the generation batch in which a run resumes; checkpoints do not contain them."""
        if self.num_left:
            prompts.restore(dict(self.rows_from))
            self.rows = prompts.take(config.prompts_per_batch)

    def snapshot(self) -> dict[str, Any]:
        """Return the state; entries as long as they are not used up, and in this process the rows."""
        used = self.step - self.filled_at >= len(self.entries) * self.num_iterations
        state = {**vars(self), "entries": [] if used else self.entries, "rows": NotSaved(self.rows)}
        del state["device"]
        return state

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Return to the state of a snapshot, on the training device.

        Raises:
            ConfigError: ``groupwise.GRPOTrainer`` wrote the checkpoint, or an earlier version.
        """
        if "num_left" not in snapshot:
            raise ConfigError(
                "the checkpoint was written by groupwise.GRPOTrainer or an earlier version, whose rollout "
                "buffer groupwise.trl_hooks cannot read; resume with the trainer that wrote it"
            )
        rows = self.rows if snapshot["rows"] is None else snapshot["rows"].value
        vars(self).update({**snapshot, "rows": rows})
        self.entries = [
            {
                name: value.to(self.device) if isinstance(value, torch.Tensor) else value
                for name, value in entry.items()
            }
            for entry in self.entries
        ]

    def merge(self, snapshots: Sequence[dict[str, Any]], config: GRPOConfig) -> dict[str, Any]:
        """Refuse another number of ranks: as in TRL, dictionaries belong to the rank that made them."""
        raise ConfigError(
            f"the checkpoint was written by {len(snapshots)} processes and cannot be resumed with "
            f"{config.world_size}: the buffer of groupwise.trl_hooks belongs to a rank; start "
            f"{len(snapshots)} processes"
        )


#: Keep their reduction: a window counts once in the loss, and a rate is a ratio of sums.
_EXACT = frozenset({"loss", "tokens_per_second", "mfu"})


class ListMetricBuffer(MetricBuffer):
    """Metrics that are lists of numbers by name, as TRL's ``_metrics[mode]``, and logged as TRL logs them.

    One record has the metrics of a generation, a micro-batch or an optimizer step. It is merged over ranks,
    and the log is the mean over records: micro-batches with 2 and 6 tokens count equally in ``kl``, where
    :class:`MetricBuffer` weights them by tokens. Sums, ``_EXACT`` and the user's ``record_metric`` keep
    their reduction.

    lists: values since the last log, which hooks may change; those of all ranks count in the log.
    """

    gather: Callable[[list[Any]], list[Any]] = staticmethod(gather_object)

    def __init__(self) -> None:
        super().__init__()
        self.lists: defaultdict[str, list[float]] = defaultdict(list)

    def record(self, metrics: Mapping[str, Reduction]) -> None:
        """Append one record, merged over ranks, to the lists. A collective, as the appends of TRL are."""
        exact = {n: value for n, value in metrics.items() if isinstance(value, Sum) or n in _EXACT}
        super().record(exact)
        own = detach_metrics({n: value for n, value in metrics.items() if n not in exact})
        for name, reduction in merge_metrics(map(attach_metrics, self.gather([own]))).items():
            self.lists[name].append(reduction.value())

    def drain(
        self, gather: Callable[[RankPart], list[RankPart]]
    ) -> tuple[dict[str, float], list[CompletionRow]]:
        """Return the metrics and rows of all ranks since the last call, and clear them."""
        self.record(self.timer.phases())
        numbers: defaultdict[str, list[float]] = defaultdict(list)
        own = {name: [*map(float, values)] for name, values in self.lists.items()}  # of tensors, too
        for lists in self.gather([own]):
            for name, values in lists.items():
                numbers[name] += values
        totals = {n: total for n, total in self.metrics.items() if n in numbers}  # num_tokens, set by a hook
        for name, values in numbers.items():
            valid = [value for value in values if math.isfinite(value)]  # NaN: a reward of None
            self.metrics[name] = Mean(math.fsum(valid), float(len(valid)))
        self.lists.clear()
        drained = super().drain(gather)
        self.metrics.update({name: totals[name] for name in RUNNING_TOTALS & totals.keys()})
        return drained

    def snapshot(self) -> dict[str, Any]:
        """Return metrics, rows and copies of the lists, which change in place."""
        return {**super().snapshot(), "lists": {name: list(values) for name, values in self.lists.items()}}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Return to the state of a snapshot; a hook may hold the dictionary of lists."""
        super().restore(snapshot)
        self.lists.clear()
        self.lists.update({name: list(values) for name, values in snapshot["lists"].items()})


def make_logs(size: int | None) -> dict[str, Any]:
    """Return the empty columns of ``_logs``, each of the newest ``size`` completions."""
    column: partial[deque[Any]] = partial(deque, maxlen=size)
    logs: dict[str, Any] = {name: column() for name in ("images", "prompt", "completion", "advantages")}
    return logs | {"rewards": defaultdict(column), "extra": defaultdict(column)}


def extend_logs(
    logs: dict[str, Any],
    rollouts: RolloutBatch,
    rewards: RewardBatch,
    advantages_B: torch.Tensor,
    reward_names: Sequence[str],
) -> None:
    """Add the completions of all ranks to ``logs``."""
    size = rewards.num_valid  # without padding rows
    logs["prompt"].extend(gather_object(rollouts.prompts[:size]))
    logs["completion"].extend(gather_object(rollouts.texts[:size]))
    sums_NF = rewards.with_step_sums().rewards_NF
    for column, name in enumerate(reward_names):
        logs["rewards"][name].extend(sums_NF[:, column].tolist())
    logs["advantages"].extend(gather_object(advantages_B[:size].tolist()))
    for name in sorted(set(gather_object(list(rewards.columns)))):
        values = rewards.columns.get(name, [None] * len(rollouts))
        logs["extra"][name].extend(gather_object(values[:size]))


def logged_rows(logs: Mapping[str, Any], step: int) -> list[CompletionRow]:
    """Return the rows of the completions table from the columns in ``logs``."""
    size = min(len(logs["prompt"]), len(logs["completion"]), len(logs["advantages"]))
    if size == 0:
        return []

    def newest(values: Sequence[Any]) -> list[Any]:
        return [None] * (size - len(values)) + list(values)[-size:]

    rewards = {name: newest(values) for name, values in logs["rewards"].items()}
    rows = [
        [torch.nan if values[i] is None else values[i] for values in rewards.values()] for i in range(size)
    ]
    prompts, texts = newest(logs["prompt"]), newest(logs["completion"])
    extra = {name: newest(column) for name, column in logs["extra"].items()}
    return completion_rows(
        RolloutBatch([{}] * size, prompts, [[]] * size, [Completion([])] * size, texts),
        RewardBatch(torch.tensor(rows), torch.ones(len(rewards)), 1, local=slice(0, size), columns=extra),
        torch.tensor(newest(logs["advantages"])).unsqueeze(1),
        list(rewards),
        step,
    )
