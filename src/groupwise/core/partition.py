"""Cutting work into parts of about the same cost."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced_parts(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Indices of ``costs`` in lists whose sums are about equal: the largest first, to the least loaded list.

    The largest sum is at most 4/3 of the best possible one (Graham, 1969). The result depends on nothing but
    the arguments; with fewer costs than parts some lists are empty.
    """
    loads = [(0.0, part) for part in range(parts)]
    result: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, part = heapq.heappop(loads)
        result[part].append(index)
        heapq.heappush(loads, (load + costs[index], part))
    return [sorted(part) for part in result]
