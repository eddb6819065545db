"""Reuse of the experience of a generation batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from groupwise.data.exchange import cut_anew, merge_generations
from groupwise.records import Experience, SamplerSettings


class ExperienceBuffer:
    """Experience of one generation batch, and how often it still has to be trained on.

    Example: two entries with ``num_iterations=2`` are taken as ``0 1 0 1``, then the buffer is empty.

    entries: one per micro-batch of the generation batch.
    num_iterations: how often each is used, μ.
    cursor: entries taken so far.
    num_groups: prompts that were ever put in, so that group ids differ between generations.
    """

    merge = staticmethod(merge_generations)
    cut = staticmethod(cut_anew)

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self.entries: list[Experience] = []
        self.num_iterations, self.cursor, self.num_groups = 1, 0, 0

    @property
    def num_left(self) -> int:
        """Micro-batches that are still to be taken."""
        return len(self.entries) * self.num_iterations - self.cursor

    @property
    def is_empty(self) -> bool:
        """True if every entry was taken ``num_iterations`` times."""
        return self.num_left <= 0

    @property
    def sampler(self) -> SamplerSettings | None:
        """Sampler settings of the generation; None if there are no entries."""
        return self.entries[0].sampler if self.entries else None

    def fill(self, entries: Sequence[Experience], num_iterations: int, num_groups: int) -> None:
        """Replace the entries by a new generation of ``num_groups`` prompts on all ranks."""
        self.entries = [replace(e, group_ids_B=e.group_ids_B + self.num_groups) for e in entries]
        self.num_iterations, self.cursor = num_iterations, 0
        self.num_groups += num_groups

    def take(self, count: int) -> list[Experience]:
        """Return the next entries: ``count``, or as many as are left."""
        end = min(self.cursor + count, len(self.entries) * self.num_iterations)
        taken = [self.entries[index % len(self.entries)] for index in range(self.cursor, end)]
        self.cursor = end
        return taken

    def snapshot(self) -> dict[str, Any]:
        """Return the state; entries, which are never changed in place, as long as they are not used up."""
        return {
            "entries": [] if self.is_empty else self.entries,
            "num_iterations": self.num_iterations,
            "cursor": 0 if self.is_empty else self.cursor,
            "num_groups": self.num_groups,
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Return to the state of a snapshot, on the training device."""
        vars(self).update(snapshot)
        self.entries = [entry.to(self.device) for entry in self.entries]
