"""Partial rewards: calls of ``per_sample_reward`` functions on finished prompts while others are generated.

Partial results are matched to the rows of the complete batch by row id. They are used only if every row of
the batch has one and is unchanged; otherwise the function is called on the complete batch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from groupwise.errors import RewardError
from groupwise.records import RolloutBatch
from groupwise.rewards.runtime.calling import (
    await_function,
    call_function,
    checked_rewards,
    reward_arguments,
    reward_name,
)
from groupwise.rewards.texts import RewardLog
from groupwise.threads import is_async, start_thread
from groupwise.tokenization.prompts import prompts_equal

logger = logging.getLogger(__name__)

#: Arguments that are not columns with one entry per completion.
_SHARED = {"trainer_state", "log_extra", "log_metric"}


def with_partial_results(function: Callable[..., Any]) -> PartialReward:
    """Wrap a ``per_sample_reward`` function so that it accepts partial batches."""
    return (_AsyncPartialReward if is_async(function) else PartialReward)(function)


@dataclass(frozen=True)
class _PartialCall:
    """Columns, rewards and logs of a call on a partial batch."""

    row_ids: Sequence[int]
    arguments: dict[str, list[Any]]
    rewards: list[Any]
    log: RewardLog


class PartialReward:
    """A reward function that reuses its results on partial batches when called on the complete batch."""

    #: Makes :func:`call_rewards` pass ``row_ids``.
    takes_row_ids = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = reward_name(function)
        self._calls: list[_PartialCall] = []
        self._failed = False

    def begin(self, part: RolloutBatch, timeout: float | None, **shared: object) -> None:
        """Call the function on a part of the next complete batch.

        Args:
            timeout: seconds for this call.
        """
        self._call_part(part, timeout, shared)

    def __call__(self, row_ids: Sequence[int], **arguments: Any) -> object:
        rewards = self._merge(row_ids, arguments)
        return self.function(**arguments) if rewards is None else rewards

    def _call_part(self, part: RolloutBatch, timeout: float | None, shared: dict[str, object]) -> None:
        if self._failed:
            return
        log = RewardLog(len(part))
        logs = {"log_extra": log.log_extra, "log_metric": log.log_metric}
        try:
            output = self._run({**reward_arguments(part), **shared, **logs}, timeout)
            checked = checked_rewards(output, self.__name__, part)
        except RewardError as error:
            logger.warning("%s, on a part of the batch; it is called again on the complete batch", error)
            self._failed = True
            return
        rewards = [None if isinstance(r, float) and math.isnan(r) else r for r in checked]
        # The function got lists of its own: it may have changed them.
        self._calls.append(_PartialCall(part.row_ids, reward_arguments(part), rewards, log))

    def _run(self, arguments: dict[str, Any], timeout: float | None) -> object:
        return call_function(self.function, f"reward function {self.__name__!r}", arguments, timeout)

    def _merge(self, row_ids: Sequence[int], arguments: dict[str, Any]) -> list[Any] | None:
        """Return the partial rewards in the order of the complete batch, or None if they do not cover it."""
        calls, self._calls, self._failed = self._calls, [], False
        positions = {row_id: (call, i) for call in calls for i, row_id in enumerate(call.row_ids)}
        found = [positions[row_id] for row_id in row_ids if row_id in positions]
        if len(found) < len(row_ids) or not all(
            _is_unchanged(call.arguments, i, arguments, row) for row, (call, i) in enumerate(found)
        ):
            return None
        for name in {name: None for call, _ in found for name in call.log.columns}:
            columns = [(call.log.columns.get(name), i) for call, i in found]
            arguments["log_extra"](name, [None if values is None else values[i] for values, i in columns])
        for call in {id(call): call for call, _ in found}.values():
            for name, value in call.log.metrics:
                arguments["log_metric"](name, value)
        return [call.rewards[i] for call, i in found]


class _AsyncPartialReward(PartialReward):
    """Calls an async function on parts in one thread; parts that arrive during a call are merged into one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._lock = threading.Lock()
        self._waiting: list[RolloutBatch] = []
        self._worker: Future[None] | None = None

    def begin(self, part: RolloutBatch, timeout: float | None, **shared: object) -> None:
        with self._lock:
            self._waiting.append(part)
            if self._worker is None:
                self._worker = start_thread(lambda: self._work(timeout, shared))

    async def __call__(self, row_ids: Sequence[int], **arguments: Any) -> object:
        with self._lock:
            worker = self._worker
        if worker is not None:
            # shield: the time limit of this call must not cancel the partial call.
            await asyncio.shield(asyncio.wrap_future(worker))
        rewards = self._merge(row_ids, arguments)
        return await self.function(**arguments) if rewards is None else rewards

    def _work(self, timeout: float | None, shared: dict[str, object]) -> None:
        while True:
            with self._lock:
                parts, self._waiting = self._waiting, []
                if not parts:
                    self._worker = None  # a later part starts a thread of its own
                    return
            try:
                self._call_part(RolloutBatch.concatenate(parts), timeout, shared)
            except BaseException:  # the call on the complete batch raises it again in the caller's thread
                self._failed = True

    def _run(self, arguments: dict[str, Any], timeout: float | None) -> object:
        title = f"reward function {self.__name__!r}"
        return asyncio.run(await_function(self.function, title, arguments, timeout))


def _is_unchanged(part: dict[str, list[Any]], i: int, whole: dict[str, Any], row: int) -> bool:
    """Return True if a row of the complete batch has the values that the partial call received.

    An override of ``generate_rollouts`` may return other rows than those that finished early.
    """
    return part.keys() == whole.keys() - _SHARED and all(
        part[name][i] is whole[name][row] or prompts_equal(part[name][i], whole[name][row]) for name in part
    )
