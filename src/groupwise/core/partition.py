"""Partition of work into parts of about equal cost."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced_parts(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Partition the indices of ``costs`` into lists of about equal total cost, the largest first.

    The largest total is at most 4/3 of the optimum (Graham, 1969). Deterministic, so that every rank computes
    the same partition.

    Returns:
        ``parts`` sorted lists of indices; some are empty if there are fewer costs than parts.
    """
    loads = [(0.0, part) for part in range(parts)]  # a heap: the part with the least work first
    result: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):  # largest first, ties in order
        load, part = heapq.heappop(loads)
        result[part].append(index)  # to the least loaded part
        heapq.heappush(loads, (load + costs[index], part))
    return [sorted(part) for part in result]
