"""Reward functions in separate processes: a crash, leak or hang affects one completion only.

Each process is forked by the one on its left::

    trainer ── _serve ──────────────────────────────────── _score_row
               once, before models and threads exist:      one per completion: calls the
               starts workers, keeps their time limits     function, writes a result file

    rows: a pipe, then memory that the fork copies         results: files, then the same pipe
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.texts import RewardLog

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
    """Run a reward function in worker processes, one completion per process.

    Every completion has a fresh process, so that leaked memory is returned, global state is reset, and a
    thread that ends its process late ends no other completion. A function that compares completions with each
    other cannot be isolated. The workers descend from a process that is forked here: call this early in a
    script, before a model is on a GPU.

    The column ``<name>_seconds`` of the completions table has the seconds of each completion, and the metric
    ``rewards/<name>/slowest_seconds`` the maximum.

    Args:
        timeout: seconds per completion; a worker that exceeds it is killed.
        processes: completions that are scored concurrently.
        on_error: "raise", or "none": a completion whose worker crashes, fails or exceeds the time limit has
            no reward; ``rewards/<name>/failed_rows`` counts them.

    Raises:
        ConfigError: the reward is a model, an argument is out of range, or the system has no ``fork``.
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
    return _Isolated(reward, timeout, processes, on_error)


class _Isolated:
    def __init__(
        self, reward: Callable[..., Any], timeout: float | None, processes: int, on_error: str
    ) -> None:
        from groupwise.rewards.runtime.models import reward_name

        self.__name__ = reward_name(reward)
        self.on_error = on_error
        self.lock = threading.Lock()
        # Workers descend from this process, which has no model, no threads and no GPU.
        self.connection, theirs = multiprocessing.Pipe()
        _fork(_serve, theirs, self.connection, reward, timeout, processes)
        theirs.close()

    def __call__(
        self, log_extra: LogExtra | None = None, log_metric: LogMetric | None = None, **columns: Any
    ) -> list[Any]:
        from groupwise.threads import start_thread

        shared = {name: columns.pop(name) for name in _SHARED if name in columns}
        columns = {name: values for name, values in columns.items() if name not in _NOT_SENT}
        # Pickled here, so that an object that cannot be sent raises in the caller.
        rows = [
            pickle.dumps({**{name: [values[i]] for name, values in columns.items()}, **shared})
            for i in range(len(columns["prompts"]))
        ]
        # In a thread: an interrupt of the main thread must not end an exchange half-way.
        results = start_thread(lambda: self._exchange(rows)).result()
        self._log(results, log_extra, log_metric)
        for i, result in enumerate(results):
            if result.failure is not None and self.on_error == "raise":
                raise RewardError(
                    f"reward function {self.__name__!r} {result.failure}, for row {i}; prompt: "
                    f"{columns['prompts'][i]!r:.300}; completion: {columns['completions'][i]!r:.300}"
                )
        return [result.reward for result in results]

    def _exchange(self, rows: list[bytes]) -> list[RowResult]:
        """Send rows and return their results; one call at a time, also if its caller was interrupted."""
        with self.lock:
            try:
                self.connection.send(rows)
                pickled = self.connection.recv()
            except (EOFError, OSError) as error:
                raise RewardError("the process that starts isolated rewards has ended") from error
        return [_unpickled(result) for result in pickled]

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


def _unpickled(result: bytes) -> RowResult:
    try:
        return pickle.loads(result)
    except Exception as error:
        return RowResult(None, f"returned an object that cannot be sent: {error}", math.nan)


def _fork(function: Callable[..., None], *arguments: object) -> int:
    """Run a function in a forked process, and return the process id. Exit handlers do not run in it."""
    _flush()  # the process would print a pending line again
    process = os.fork()
    if process == 0:
        try:
            function(*arguments)
            _flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    return process


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # None, or closed
            stream.flush()


def _serve(
    connection: Connection,
    trainers_end: Connection,
    reward: Callable[..., Any],
    timeout: float | None,
    processes: int,
) -> None:
    """Answer each list of rows with a list of results, until the trainer ends."""
    trainers_end.close()  # an open copy would hide the end of the trainer
    os.setsid()  # an interrupt of the terminal is handled by the trainer; workers are killed as a group
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # a collection in a worker would copy the memory of everything that is imported here
    try:
        while True:
            rows = connection.recv()
            with tempfile.TemporaryDirectory(prefix="groupwise-") as directory:
                results = _score_rows(reward, rows, directory, timeout, processes, connection)
            connection.send(results)
    except (EOFError, OSError):  # the trainer has ended
        os.killpg(0, signal.SIGKILL)


def _score_rows(
    reward: Callable[..., Any],
    rows: list[bytes],
    directory: str,
    timeout: float | None,
    processes: int,
    connection: Connection,
) -> list[bytes]:
    """Score each row in a worker of its own, up to ``processes`` at a time; return pickled ``RowResult``.

    A worker ends with its row: one that served the next row too could end in the middle of it. Rows reach the
    workers by fork and results come back as files. Through pipes that the workers share, a worker that dies
    while it writes would block the others or shift their results to other rows.

    Raises:
        EOFError: the trainer has ended.
    """
    limit = math.inf if timeout is None else timeout
    paths = [Path(directory, str(i)) for i in range(len(rows))]
    waiting = deque(zip(rows, paths, strict=True))
    running: dict[int, tuple[Path, float]] = {}  # process id: file of the result, start
    while waiting or running:
        while waiting and len(running) < processes:
            row, path = waiting.popleft()
            running[_fork(_score_row, reward, row, path)] = path, time.monotonic()
        for worker, (path, start) in list(running.items()):
            exceeded = time.monotonic() - start > limit
            if exceeded:
                os.kill(worker, signal.SIGKILL)
            ended, status = os.waitpid(worker, 0 if exceeded else os.WNOHANG)
            if not ended:
                continue
            del running[worker]
            if path.is_file():
                continue
            code = os.waitstatus_to_exitcode(status)
            ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            lost = RowResult(None, f"ended its process ({ending})", math.nan)
            if exceeded:
                lost = RowResult(None, f"took longer than {limit} seconds and was killed", limit)
            _write_result(path, lost)
        if connection.poll():  # closed, since nothing is sent during a call
            raise EOFError
        time.sleep(0.002)
    return [path.read_bytes() for path in paths]


def _write_result(path: Path, result: RowResult) -> None:
    try:
        pickled = pickle.dumps(result)
    except Exception as error:
        pickled = pickle.dumps(
            RowResult(None, f"returned an object that cannot be sent: {error}", result.seconds)
        )
    partial = path.with_suffix(".partial")
    partial.write_bytes(pickled)
    os.replace(partial, path)


def _score_row(reward: Callable[..., Any], row: bytes, path: Path) -> None:
    """Call the reward function on one completion, in a worker."""
    import torch

    torch.set_num_threads(1)  # torch's thread pool does not survive a fork
    log = RewardLog(1)
    start = time.monotonic()
    value, failure = None, None
    try:
        output = reward(**pickle.loads(row), log_extra=log.log_extra, log_metric=log.log_metric)
        if inspect.iscoroutine(output):
            output = asyncio.run(output)
        output = output.tolist() if hasattr(output, "tolist") else list(output)
        if len(output) != 1:
            raise ValueError(f"it returned {len(output)} rewards for one completion")
        (value,) = output
    except BaseException as error:  # SystemExit too
        failure = f"raised {type(error).__name__}: {error}"
    columns = {name: values[0] for name, values in log.columns.items()}
    _write_result(path, RowResult(value, failure, time.monotonic() - start, columns, log.metrics))
