"""Reward functions in processes of their own: one that crashes, leaks or hangs does not end the run."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from groupwise.errors import ConfigError, RewardError

#: Keyword arguments that are the same for all completions.
_SHARED = ("trainer_state",)
#: What stays behind: it belongs to the trainer's process.
_LEFT_OUT = ("log_extra", "log_metric", "environments")


class Judgement(NamedTuple):
    """What became of one completion.

    failure: None, or why there is no reward.
    logged: what was given to ``log_extra`` and to ``log_metric``.
    """

    reward: Any
    failure: str | None
    seconds: float
    logged: tuple[dict[str, Any], list[tuple[str, float]]] = ({}, [])


def isolated(
    reward: Callable[..., Any],
    *,
    timeout: float | None = None,
    processes: int = 1,
    on_error: str = "raise",
) -> Callable[..., list[Any]]:
    """The reward function, called in another process, for one completion at a time.

    Every call of the trainer has a fresh process, so that memory which the function leaks is given back, and
    what it remembers is forgotten. A function that compares completions with each other cannot be isolated.
    The processes descend from one that is started here: call this early in a script, before a model is on a
    GPU.

    The seconds of each completion are the column ``<name>_seconds`` of the completions table, those of the
    slowest the metric ``rewards/<name>/slowest_seconds``.

    Args:
        timeout: seconds for one completion; a process that takes longer is killed.
        processes: completions that are judged at one time.
        on_error: "raise", or "none": a completion whose process crashes, fails or takes too long has no
            reward; ``rewards/<name>/failed_rows`` counts them.

    Raises:
        ConfigError: the reward is a model, a setting is out of range, or the system has no ``fork``.
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
        from groupwise.rewards.runtime.calling import reward_name

        self.__name__ = reward_name(reward)
        self.timeout, self.on_error = timeout, on_error
        self.lanes = [_Lane(reward) for _ in range(processes)]
        self.lock = threading.Lock()

    def __call__(
        self,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[Any]:
        shared = {name: columns.pop(name) for name in _SHARED if name in columns}
        columns = {name: values for name, values in columns.items() if name not in _LEFT_OUT}
        # What cannot be sent is found before a worker waits for it.
        rows = [
            pickle.dumps({name: [values[i]] for name, values in columns.items()})
            for i in range(len(columns["prompts"]))
        ]
        with self.lock, ThreadPoolExecutor(len(self.lanes)) as pool:
            parts = list(pool.map(lambda lane: self._judge(lane, rows, shared), self.lanes))
        judged = [parts[i % len(parts)][i // len(parts)] for i in range(len(rows))]
        self._log(judged, log_extra, log_metric)
        for i, one in enumerate(judged):
            if one.failure is not None and self.on_error == "raise":
                raise RewardError(
                    f"reward function {self.__name__!r} {one.failure}, for row {i}; prompt: "
                    f"{columns['prompts'][i]!r:.300}; completion: {columns['completions'][i]!r:.300}"
                )
        return [one.reward for one in judged]

    def _judge(self, lane: _Lane, rows: Sequence[bytes], shared: dict[str, Any]) -> list[Judgement]:
        own = rows[self.lanes.index(lane) :: len(self.lanes)]
        return lane.judge(own, shared, self.timeout)

    def _log(self, judged: Sequence[Judgement], log_extra: Any, log_metric: Any) -> None:
        if log_extra is not None:
            for column in {name: None for one in judged for name in one.logged[0]}:
                log_extra(column, [one.logged[0].get(column) for one in judged])
            log_extra(f"{self.__name__}_seconds", [round(one.seconds, 3) for one in judged])
        if log_metric is not None:
            for name, value in (entry for one in judged for entry in one.logged[1]):
                log_metric(name, value)
            log_metric(f"rewards/{self.__name__}/slowest_seconds", max(one.seconds for one in judged))
            if self.on_error == "none":
                failed = sum(one.failure is not None for one in judged)
                log_metric(f"rewards/{self.__name__}/failed_rows", float(failed))


class _Lane:
    """A process that does nothing but start workers: they have what there was before the model."""

    def __init__(self, reward: Callable[..., Any]) -> None:
        self.connection, theirs = Pipe()
        if os.fork() == 0:
            try:
                self.connection.close()
                _start_workers(theirs, reward)
            finally:
                os._exit(0)
        theirs.close()

    def judge(self, rows: Sequence[bytes], shared: dict[str, Any], timeout: float | None) -> list[Judgement]:
        judged: list[Judgement] = []
        try:
            while len(judged) < len(rows):
                self.connection.send(shared)
                worker = self.connection.recv()
                judged += self._until_failure(rows[len(judged) :], worker, timeout)
        except (EOFError, OSError) as error:
            raise RewardError("the process that starts isolated rewards has ended") from error
        return judged

    def _until_failure(self, rows: Sequence[bytes], worker: int, timeout: float | None) -> list[Judgement]:
        judged: list[Judgement] = []
        for row in rows:
            start = time.monotonic()
            self.connection.send(row)
            late = not self.connection.poll(timeout)
            if late:
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
            answer = self.connection.recv()
            if late:
                while not isinstance(answer, int):  # it had ended just then
                    answer = self.connection.recv()
                failure = f"took longer than {timeout} seconds and was killed"
                return [*judged, Judgement(None, failure, time.monotonic() - start)]
            if isinstance(answer, int):
                failure = f"ended its process ({_ending(answer)})"
                return [*judged, Judgement(None, failure, time.monotonic() - start)]
            judged.append(Judgement(*answer))
        self.connection.send(None)
        self.connection.recv()
        return judged


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit code {os.WEXITSTATUS(status)}"


def _start_workers(connection: Connection, reward: Callable[..., Any]) -> None:
    """Start a worker for every call, and tell how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the trainer's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        try:
            shared = connection.recv()
        except EOFError:
            return
        worker = os.fork()
        if worker == 0:
            try:
                _work(connection, reward, shared)
            except EOFError:
                pass  # the trainer has ended
            finally:
                os._exit(0)
        _, status = os.waitpid(worker, 0)
        connection.send(status)


def _work(connection: Connection, reward: Callable[..., Any], shared: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(1)  # threads of the pool that the parent had do not exist here
    connection.send(os.getpid())
    while (pickled := connection.recv()) is not None:
        columns: dict[str, Any] = {}
        metrics: list[tuple[str, float]] = []
        start = time.monotonic()
        value, failure = None, None
        try:
            value = _call(reward, {**pickle.loads(pickled), **shared}, columns, metrics)
        except Exception as error:
            failure = f"raised {type(error).__name__}: {error}"
        connection.send((value, failure, time.monotonic() - start, (columns, metrics)))


def _call(
    reward: Callable[..., Any],
    arguments: dict[str, Any],
    columns: dict[str, Any],
    metrics: list[tuple[str, float]],
) -> Any:
    output = reward(
        **arguments,
        log_extra=lambda column, values: columns.update({column: values[0]}),
        log_metric=lambda name, value: metrics.append((name, float(value))),
    )
    if inspect.isawaitable(output):

        async def wait() -> Any:
            return await output

        output = asyncio.run(wait())
    output = output.tolist() if hasattr(output, "tolist") else list(output)
    if len(output) != 1:
        raise ValueError(f"it returned {len(output)} rewards for one completion")
    return output[0]
