"""Tensor parallelism: neighbouring ranks share one engine, and all of them compute the requests of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

Request = TypeVar("Request")
Output = TypeVar("Output")


@dataclass(frozen=True)
class TensorParallelGroup:
    """Ranks that share one engine.

    Attributes:
        size: number of ranks.
        rank: this rank's index in the group.
        group: process group; None: this rank has an engine for itself.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, size: int, world_size: int, process_index: int) -> TensorParallelGroup:
        """Create groups of ``size`` neighbouring ranks. A collective: all ranks must call it."""
        if size == 1:
            return cls()
        ranks = [list(range(start, start + size)) for start in range(0, world_size, size)]
        group, _ = dist.new_subgroups_by_enumeration(ranks)
        return cls(size, process_index % size, group)

    def generate(
        self, requests: list[Request], generate: Callable[[list[Request]], list[Output]]
    ) -> list[Output]:
        """Generate the requests of all ranks, in the same order on each; returns this rank's outputs."""
        if self.size == 1:
            return generate(requests)
        by_rank: list[list[Request]] = [[] for _ in range(self.size)]
        dist.all_gather_object(by_rank, requests, group=self.group)
        start = sum(len(part) for part in by_rank[: self.rank])
        outputs = generate([request for part in by_rank for request in part])
        return outputs[start : start + len(requests)]
