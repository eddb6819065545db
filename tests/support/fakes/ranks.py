"""Several ranks in one process: a thread each, with exchanges through shared memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def on_ranks(world_size: int, function: Callable[[int, Any, Any], T]) -> list[T]:
    """Call ``function(rank, gather, exchange)`` on every rank at once; return the results in rank order.

    ``gather`` joins the lists of all ranks; ``exchange`` sends entry r of a list to rank r.
    """
    barrier = threading.Barrier(world_size, timeout=60)
    board: dict[int, list[Any]] = {}

    def meet(rank: int, values: list[Any]) -> list[list[Any]]:
        board[rank] = values
        barrier.wait()
        everything = [board[other] for other in range(world_size)]
        barrier.wait()  # the board is not overwritten before all ranks have read it
        return everything

    def call(rank: int) -> T:
        def gather(values: list[Any]) -> list[Any]:
            return [value for part in meet(rank, values) for value in part]

        def exchange(outgoing: list[Any]) -> list[Any]:
            assert len(outgoing) == world_size
            return [part[rank] for part in meet(rank, outgoing)]

        try:
            return function(rank, gather, exchange)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(call, range(world_size)))
