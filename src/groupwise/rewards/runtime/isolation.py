"""Reward functions in separate processes: a crash, leak or hang affects one completion only."""

from __future__ import annotations

import asyncio
import inspect
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.texts import require

LogExtra = Callable[[str, list[Any]], None]
LogMetric = Callable[[str, float], None]

#: Keyword arguments without an entry per completion.
_SHARED = ("trainer_state",)
#: Keyword arguments that are not sent: they belong to the trainer's process.
_NOT_SENT = ("log_extra", "log_metric", "environments")


class RowResult(NamedTuple):
    """Result of one completion.

    failure: None, or the reason why there is no reward.
    seconds: duration of the call; NaN if its process crashed.
    columns, metrics: arguments of ``log_extra`` and ``log_metric``.
    """

    reward: Any
    failure: str | None
    seconds: float
    columns: dict[str, Any] = {}  # noqa: RUF012
    metrics: list[tuple[str, float]] = []  # noqa: RUF012


def isolated(
    reward: Callable[..., Any],
    *,
    timeout: float | None = None,
    processes: int = 1,
    on_error: str = "raise",
) -> Callable[..., list[Any]]:
    """Run a reward function in worker processes, one completion per call.

    Every call of the trainer starts fresh workers, so that leaked memory is returned and global state is
    reset. A function that compares completions with each other cannot be isolated. The workers descend from a
    process that is forked here: call this early in a script, before a model is on a GPU.

    The column ``<name>_seconds`` of the completions table has the seconds of each completion, and the metric
    ``rewards/<name>/slowest_seconds`` the maximum.

    Args:
        timeout: seconds per completion; a worker that exceeds it is killed.
        processes: completions that are scored concurrently.
        on_error: "raise", or "none": a completion whose worker crashes, fails or exceeds the time limit has
            no reward; ``rewards/<name>/failed_rows`` counts them.

    Raises:
        ConfigError: the reward is a model, an argument is out of range, or the system has no ``fork``.
        ImportError: pebble is not installed (``groupwise[rewards]``).
    """
    import torch

    if not callable(reward) or isinstance(reward, torch.nn.Module):
        raise ConfigError(f"isolated() takes a reward function, not a {type(reward).__name__}")
    if not hasattr(os, "fork"):
        raise ConfigError(
            f"isolated() needs fork, which {sys.platform} does not have; use the function itself"
        )
    if on_error not in ("raise", "none") or processes < 1 or (timeout is not None and timeout <= 0):
        raise ConfigError(
            f"isolated(timeout={timeout}, processes={processes}, on_error={on_error!r}); allowed: timeout "
            "None or above 0, processes from 1, on_error 'raise' or 'none'"
        )
    require("pebble", "isolated")
    return _Isolated(reward, timeout, processes, on_error)


class _Isolated:
    def __init__(
        self, reward: Callable[..., Any], timeout: float | None, processes: int, on_error: str
    ) -> None:
        from groupwise.rewards.runtime.calling import reward_name

        self.__name__ = reward_name(reward)
        self.on_error = on_error
        self.lock = threading.Lock()
        # Workers are forked from this process, which has no model, no threads and no GPU.
        self.connection, theirs = multiprocessing.Pipe()
        if os.fork() == 0:
            try:
                self.connection.close()
                _serve(theirs, reward, timeout, processes)
            finally:
                os._exit(0)
        theirs.close()

    def __call__(
        self, log_extra: LogExtra | None = None, log_metric: LogMetric | None = None, **columns: Any
    ) -> list[Any]:
        shared = {name: columns.pop(name) for name in _SHARED if name in columns}
        columns = {name: values for name, values in columns.items() if name not in _NOT_SENT}
        # Pickled here, so that an object that cannot be sent raises in the caller.
        rows = [
            pickle.dumps({**{name: [values[i]] for name, values in columns.items()}, **shared})
            for i in range(len(columns["prompts"]))
        ]
        # In a thread: an interrupt of the main thread must not end an exchange half-way.
        with self.lock, ThreadPoolExecutor(1) as pool:
            results = pool.submit(self._exchange, rows).result()
        self._log(results, log_extra, log_metric)
        for i, result in enumerate(results):
            if result.failure is not None and self.on_error == "raise":
                raise RewardError(
                    f"reward function {self.__name__!r} {result.failure}, for row {i}; prompt: "
                    f"{columns['prompts'][i]!r:.300}; completion: {columns['completions'][i]!r:.300}"
                )
        return [result.reward for result in results]

    def _exchange(self, rows: list[bytes]) -> list[RowResult]:
        try:
            self.connection.send(rows)
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise RewardError("the process that starts isolated rewards has ended") from error

    def _log(
        self, results: Sequence[RowResult], log_extra: LogExtra | None, log_metric: LogMetric | None
    ) -> None:
        seconds = [None if math.isnan(result.seconds) else round(result.seconds, 3) for result in results]
        if log_extra is not None:
            for column in {name: None for result in results for name in result.columns}:
                log_extra(column, [result.columns.get(column) for result in results])
            log_extra(f"{self.__name__}_seconds", seconds)
        if log_metric is not None:
            for name, value in (entry for result in results for entry in result.metrics):
                log_metric(name, value)
            slowest = max((s for s in seconds if s is not None), default=0.0)
            log_metric(f"rewards/{self.__name__}/slowest_seconds", slowest)
            if self.on_error == "none":
                failed = sum(result.failure is not None for result in results)
                log_metric(f"rewards/{self.__name__}/failed_rows", float(failed))


def _serve(connection: Connection, reward: Callable[..., Any], timeout: float | None, processes: int) -> None:
    """Answer each list of rows with a list of results, from a new pool of workers, until the trainer ends."""
    import torch
    from pebble import ProcessPool

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is handled by the trainer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    global _reward
    _reward = reward  # inherited by fork: closures cannot be pickled
    while True:
        try:
            rows = connection.recv()
        except EOFError:
            return
        # One thread per worker: torch's thread pool does not survive a fork.
        with ProcessPool(
            min(processes, len(rows)),
            initializer=torch.set_num_threads,
            initargs=(1,),
            context=multiprocessing.get_context("fork"),
        ) as pool:
            futures = [pool.schedule(_score_row, args=(row,), timeout=timeout) for row in rows]
            results = [_row_result(future, timeout) for future in futures]
        connection.send(results)


_reward: Callable[..., Any]


def _row_result(future: Future[RowResult], timeout: float | None) -> RowResult:
    from pebble import ProcessExpired

    try:
        return future.result()
    except FutureTimeoutError:
        return RowResult(None, f"took longer than {timeout} seconds and was killed", timeout or math.nan)
    except ProcessExpired as error:
        code = error.exitcode
        ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return RowResult(None, f"ended its process ({ending})", math.nan)
    except Exception as error:  # the reward or a logged value cannot be pickled
        return RowResult(None, f"returned an object that cannot be sent: {error}", math.nan)


def _score_row(pickled: bytes) -> RowResult:
    """Call the reward function on one completion, in a worker."""
    columns: dict[str, Any] = {}
    metrics: list[tuple[str, float]] = []
    start = time.monotonic()
    value, failure = None, None
    try:
        output = _reward(
            **pickle.loads(pickled),
            log_extra=lambda column, values: columns.update({column: values[0]}),
            log_metric=lambda name, value: metrics.append((name, float(value))),
        )
        if inspect.isawaitable(output):
            output = asyncio.run(_awaited(output))
        output = output.tolist() if hasattr(output, "tolist") else list(output)
        if len(output) != 1:
            raise ValueError(f"it returned {len(output)} rewards for one completion")
        (value,) = output
    except Exception as error:
        failure = f"raised {type(error).__name__}: {error}"
    return RowResult(value, failure, time.monotonic() - start, columns, metrics)


async def _awaited(output: Any) -> Any:
    return await output
