"""Processes that share an engine by tensor parallelism: each brings its requests, all compute all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

Request = TypeVar("Request")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class TensorParallelGroup:
    """The processes of one engine.

    size: how many there are.
    rank: which of them this is.
    group: their process group; None for a process that has an engine of its own.
    """

    size: int = 1
    rank: int = 0
    group: Any = None

    @classmethod
    def of(cls, size: int, world_size: int, process_index: int) -> TensorParallelGroup:
        """Neighbouring processes share an engine. All processes call this together."""
        if size == 1:
            return cls()
        ranks = [list(range(start, start + size)) for start in range(0, world_size, size)]
        group, _ = dist.new_subgroups_by_enumeration(ranks)
        return cls(size, process_index % size, group)

    def share(self, requests: list[Request], answer: Callable[[list[Request]], list[Answer]]) -> list[Answer]:
        """This process's answers. The engines' parts must see the same requests in the same order."""
        if self.size == 1:
            return answer(requests)
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, requests, group=self.group)
        start = sum(len(part) for part in everyone[: self.rank])
        answers = answer([request for part in everyone for request in part])
        return answers[start : start + len(requests)]
