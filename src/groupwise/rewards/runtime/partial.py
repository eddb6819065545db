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
from groupwise.rewards.runtime.calling import reward_arguments, reward_invocation, reward_result
from groupwise.rewards.runtime.models import reward_name
from groupwise.rewards.texts import RewardLog
from groupwise.threads import CallExecutor, is_async
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

    def begin(self, part: RolloutBatch, executor: CallExecutor, **shared: object) -> None:
        """Call the function on a part of the next complete batch, with the time limit of ``executor``."""
        if not self._failed:
            self._record(*self._start(part, executor, shared))

    def __call__(self, row_ids: Sequence[int], **arguments: Any) -> object:
        rewards = self._merge(row_ids, arguments)
        return self.function(**arguments) if rewards is None else rewards

    def _start(
        self, part: RolloutBatch, executor: CallExecutor, shared: dict[str, object]
    ) -> tuple[RolloutBatch, RewardLog, Future[Any]]:
        """Start a call; returns the part with the log and the future of its rewards."""
        log = RewardLog(len(part))
        logs = {"log_extra": log.log_extra, "log_metric": log.log_metric}
        arguments = {**reward_arguments(part), **shared, **logs}
        (future,) = executor.start([reward_invocation(self.function, self.__name__, arguments, [])])
        return part, log, future

    def _record(self, part: RolloutBatch, log: RewardLog, future: Future[Any]) -> None:
        """Keep the rewards of a finished call."""
        try:
            checked = reward_result(future, self.__name__, part)
        except RewardError as error:
            logger.warning("%s, on a part of the batch; it is called again on the complete batch", error)
            self._failed = True
            return
        rewards = [None if isinstance(r, float) and math.isnan(r) else r for r in checked]
        # The function got lists of its own: it may have changed them.
        self._calls.append(_PartialCall(part.row_ids, reward_arguments(part), rewards, log))

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
    """Calls an async function on one part at a time; parts that arrive during a call are merged into one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._lock = threading.Lock()
        self._waiting: list[RolloutBatch] = []
        self._worker: Future[None] | None = None

    def begin(self, part: RolloutBatch, executor: CallExecutor, **shared: object) -> None:
        with self._lock:
            self._waiting.append(part)
            if self._worker is None:
                self._worker = executor.loop.submit(self._work(executor, shared))

    async def __call__(self, row_ids: Sequence[int], **arguments: Any) -> object:
        with self._lock:
            worker = self._worker
        if worker is not None:
            # shield: the time limit of this call must not cancel the partial call.
            await asyncio.shield(asyncio.wrap_future(worker))
        rewards = self._merge(row_ids, arguments)
        return await self.function(**arguments) if rewards is None else rewards

    async def _work(self, executor: CallExecutor, shared: dict[str, object]) -> None:
        while True:
            with self._lock:
                parts, self._waiting = self._waiting, []
                if not parts:
                    self._worker = None  # a later part starts another one
                    return
            if not self._failed:
                started = self._start(RolloutBatch.concatenate(parts), executor, shared)
                await asyncio.wait([asyncio.wrap_future(started[-1])])
                self._record(*started)


def _is_unchanged(part: dict[str, list[Any]], i: int, whole: dict[str, Any], row: int) -> bool:
    """Return True if a row of the complete batch has the values that the partial call received.

    An override of ``generate_rollouts`` may return other rows than those that finished early.
    """
    return part.keys() == whole.keys() - _SHARED and all(
        part[name][i] is whole[name][row] or prompts_equal(part[name][i], whole[name][row]) for name in part
    )
