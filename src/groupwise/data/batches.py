"""Which dataset rows a step sees, and the reuse of a generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler, Subset

from groupwise.records import MicroBatch


class GroupSampler(Sampler[int]):
    """Indices such that consecutive batches make up whole generation batches.

    Every generation batch holds ``prompts_per_batch`` prompts, each ``num_generations`` times in a row, and
    is repeated ``repeats`` times, once for each micro-batch that is trained on it: a loader position is then
    a micro-batch, which is what the Trainer counts and skips on resume. A last, incomplete batch is dropped.

    Args:
        epoch: returns the current epoch; the order depends on nothing but it and the seed.
    """

    def __init__(
        self,
        source: Sized,
        *,
        num_generations: int,
        prompts_per_batch: int,
        repeats: int,
        shuffle: bool,
        seed: int,
        epoch: Callable[[], int],
    ) -> None:
        self.num_prompts = len(source)
        self.num_generations = num_generations
        self.prompts_per_batch = prompts_per_batch
        self.repeats = repeats
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = epoch_permutation(self.num_prompts, self.shuffle, self.seed, self.epoch())
        whole = len(order) - len(order) % self.prompts_per_batch
        for start in range(0, whole, self.prompts_per_batch):
            for _ in range(self.repeats):
                for index in order[start : start + self.prompts_per_batch]:
                    yield from [index] * self.num_generations

    def __len__(self) -> int:
        batches = self.num_prompts // self.prompts_per_batch
        return batches * self.prompts_per_batch * self.num_generations * self.repeats


def epoch_permutation(count: int, shuffle: bool, seed: int, number: int) -> list[int]:
    """Indices of the rows in pass ``number`` over the data."""
    if not shuffle:
        return list(range(count))
    # Seeds of neighbouring runs differ by one; a large odd stride keeps their passes apart.
    generator = torch.Generator().manual_seed(seed + 1_000_003 * number)
    return torch.randperm(count, generator=generator).tolist()


def repeat_rows(dataset: Dataset, times: int) -> Subset:
    """The dataset with every row ``times`` times in a row."""
    return Subset(dataset, [index for index in range(len(dataset)) for _ in range(times)])  # type: ignore[arg-type]


def as_rows(rows: Sequence[dict[str, Any]]) -> Any:
    """The collator: rows stay rows, because rewards want Python values."""
    return list(rows)


def local_rows(values: torch.Tensor, local: slice) -> torch.Tensor:
    """This rank's rows of a global tensor; rows past its end (loader padding) are zero."""
    rows = values[local]
    missing = local.stop - local.start - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def without_padding_rows(batch: MicroBatch, num_valid: int) -> MicroBatch:
    """The batch with no loss, and so no token metrics, on the rows from ``num_valid`` on."""
    counts_B1 = (torch.arange(len(batch), device=batch.loss_mask_BT.device) < num_valid).unsqueeze(1)
    return replace(batch, loss_mask_BT=batch.loss_mask_BT * counts_B1)


def with_advantages(batches: Sequence[MicroBatch], advantages: torch.Tensor) -> list[MicroBatch]:
    """Micro-batches with their rows of ``advantages``, (B,) or (B, T)."""
    parts = advantages.to(batches[0].loss_mask_BT.device).split([len(batch) for batch in batches])
    return [
        replace(
            batch,
            advantages_BX=part.unsqueeze(1)
            if part.dim() == 1
            else part[:, : batch.completion_ids_BT.shape[1]],
        )
        for batch, part in zip(batches, parts, strict=True)
    ]


@dataclass
class GenerationBuffer:
    """Micro-batches of one generation and how often they still have to be trained on.

    micro_batches: one per step of the generation batch.
    passes: how often each is used (num_iterations).
    cursor: micro-batches handed out so far.
    """

    micro_batches: list[MicroBatch] = field(default_factory=list)
    passes: int = 1
    cursor: int = 0

    @property
    def exhausted(self) -> bool:
        return self.cursor >= len(self.micro_batches) * self.passes

    def next(self) -> MicroBatch:
        micro_batch = self.micro_batches[self.cursor % len(self.micro_batches)]
        self.cursor += 1
        return micro_batch

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers; an exhausted buffer has nothing to keep."""
        if self.exhausted:
            return {"micro_batches": [], "passes": self.passes, "cursor": 0}
        micro_batches = [batch.state_dict() for batch in self.micro_batches]
        return {"micro_batches": micro_batches, "passes": self.passes, "cursor": self.cursor}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device | str) -> GenerationBuffer:
        micro_batches = [MicroBatch.from_state(batch).to(device) for batch in state["micro_batches"]]
        return cls(micro_batches, state["passes"], state["cursor"])
