"""Which dataset rows a step sees, and the reuse of a generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, Sampler, Subset

from groupwise.records import Experience, TokenBatch


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


def as_columns(advantages: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    """Shape advantages of this rank, (B,) or (B, T'), to (B, 1) or to the (B, T) of its tokens."""
    advantages = advantages.to(tokens.loss_mask_BT.device)
    if advantages.dim() == 1:
        return advantages.unsqueeze(1)
    width = tokens.completion_ids_BT.shape[1]
    return F.pad(advantages[:, :width], (0, max(width - advantages.shape[1], 0)))


@dataclass
class ExperienceBuffer:
    """Experience of one generation batch, and how often it still has to be trained on.

    entries: one per micro-batch of the generation batch.
    num_iterations: how often each is used, μ.
    cursor: entries handed out so far.
    num_groups: prompts that were ever put in, so that group ids differ between generations.
    """

    entries: list[Experience] = field(default_factory=list)
    num_iterations: int = 1
    cursor: int = 0
    num_groups: int = 0

    @property
    def is_empty(self) -> bool:
        return self.cursor >= len(self.entries) * self.num_iterations

    def fill(self, entries: Sequence[Experience], num_iterations: int, num_groups: int) -> None:
        """Replace the entries by a new generation of ``num_groups`` prompts on all ranks."""
        self.entries = [replace(e, group_ids_B=e.group_ids_B + self.num_groups) for e in entries]
        self.num_iterations, self.cursor = num_iterations, 0
        self.num_groups += num_groups

    def take(self, count: int) -> list[Experience]:
        """Return the next entries: ``count``, or as many as are left."""
        total = len(self.entries) * self.num_iterations
        taken = [
            self.entries[index % len(self.entries)]
            for index in range(self.cursor, min(self.cursor + count, total))
        ]
        self.cursor += len(taken)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return plain tensors and numbers; entries that were all used are left out."""
        entries = [] if self.is_empty else [entry.state_dict() for entry in self.entries]
        return {
            "entries": entries,
            "num_iterations": self.num_iterations,
            "cursor": self.cursor if entries else 0,
            "num_groups": self.num_groups,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device | str) -> ExperienceBuffer:
        entries = [Experience.from_state(entry).to(device) for entry in state["entries"]]
        return cls(entries, state["num_iterations"], state["cursor"], state["num_groups"])
