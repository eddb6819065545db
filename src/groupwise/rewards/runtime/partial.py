"""Rewards of the completions that are finished, while others are still generated.

Only for ``per_sample_reward`` functions. What they gave early is used when it is certain to be what the
call on the whole rollout would give; otherwise that call is made, as if there had been no other.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from groupwise.errors import RewardError
from groupwise.records import RolloutBatch
from groupwise.rewards.runtime.calling import (
    await_function,
    call_function,
    checked_rewards,
    is_async,
    reward_arguments,
    reward_name,
    start_thread,
)

logger = logging.getLogger(__name__)

#: Arguments that are no lists with an entry per completion.
_SHARED = {"trainer_state", "log_extra", "log_metric"}


def with_partial_results(function: Callable[..., Any]) -> PartialReward:
    """The independent function as one that takes parts before the whole."""
    return (_AsyncPartialReward if is_async(function) else PartialReward)(function)


def concatenated(parts: Sequence[RolloutBatch]) -> RolloutBatch:
    """What reward functions see of several parts, as one."""
    return RolloutBatch(
        rows=[row for part in parts for row in part.rows],
        prompts=[prompt for part in parts for prompt in part.prompts],
        prompt_ids=[ids for part in parts for ids in part.prompt_ids],
        completions=[completion for part in parts for completion in part.completions],
        texts=[text for part in parts for text in part.texts],
    )


@dataclass
class _Early:
    """A call on a part: its rewards, and what it logged."""

    part: RolloutBatch
    rewards: list[Any] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)

    def log_extra(self, column: str, values: list[Any]) -> None:
        self.columns[column] = list(values)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.append((name, float(value)))


class PartialReward:
    """A reward function whose call takes over what it gave for parts.

    Args:
        function: an independent one.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = reward_name(function)
        self._early: list[_Early] = []
        self._failed = False

    def begin(self, part: RolloutBatch, timeout: float | None, **shared: Any) -> None:
        """Call it on a part of the rollout that it will be called on next.

        Args:
            timeout: seconds that this call may take.
            shared: further keyword arguments.
        """
        self._call_early(part, timeout, shared)

    def __call__(self, **arguments: Any) -> Any:
        rewards = self._take_over(arguments)
        return self.function(**arguments) if rewards is None else rewards

    def _call_early(self, part: RolloutBatch, timeout: float | None, shared: dict[str, Any]) -> None:
        if self._failed:
            return
        early = _Early(part)
        logs = {"log_extra": early.log_extra, "log_metric": early.log_metric}
        try:
            output = self._run({**reward_arguments(part), **shared, **logs}, timeout)
            checked = checked_rewards(output, self.__name__, part)
        except RewardError as error:
            logger.warning("%s, on a part of the completions; it is called again with all of them", error)
            self._failed = True
            return
        early.rewards = [None if isinstance(r, float) and math.isnan(r) else r for r in checked]
        self._early.append(early)

    def _run(self, arguments: dict[str, Any], timeout: float | None) -> Any:
        return call_function(self.function, f"reward function {self.__name__!r}", arguments, timeout)

    def _take_over(self, arguments: dict[str, Any]) -> list[Any] | None:
        """The rewards of all parts in the order of the whole; None unless they are those of the whole."""
        calls, self._early, self._failed = self._early, [], False
        # The lists of token ids are those of the sampler's answer: nothing else can be mistaken for them.
        places = {
            id(c.token_ids): (i, j) for i, e in enumerate(calls) for j, c in enumerate(e.part.completions)
        }
        found = [places.get(id(ids)) for ids in arguments["completion_ids"]]
        columns = [reward_arguments(early.part) for early in calls]
        if not all(
            place is not None and _same(columns[place[0]], place[1], arguments, row)
            for row, place in enumerate(found)
        ):
            return None
        used = [place for place in found if place is not None]
        if any(len(values) != len(e.part) for e in calls for values in e.columns.values()):
            return None
        for name in {name: None for i, _ in used for name in calls[i].columns}:
            none = {i: [None] * len(calls[i].part) for i, _ in used}
            arguments["log_extra"](name, [calls[i].columns.get(name, none[i])[j] for i, j in used])
        for i in dict.fromkeys(i for i, _ in used):
            for name, value in calls[i].metrics:
                arguments["log_metric"](name, value)
        return [calls[i].rewards[j] for i, j in used]


class _AsyncPartialReward(PartialReward):
    """Parts are called in a thread, one call after the other; what comes meanwhile is one part."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._lock = threading.Lock()
        self._waiting: list[RolloutBatch] = []
        self._worker: Future[None] | None = None

    def begin(self, part: RolloutBatch, timeout: float | None, **shared: Any) -> None:
        with self._lock:
            self._waiting.append(part)
            if self._worker is None:
                self._worker = Future()
                start_thread(lambda: self._work(timeout, shared))

    async def __call__(self, **arguments: Any) -> Any:
        with self._lock:
            worker = self._worker
        if worker is not None:
            await asyncio.shield(asyncio.wrap_future(worker))  # a limit on this call ends no other
        rewards = self._take_over(arguments)
        return await self.function(**arguments) if rewards is None else rewards

    def _work(self, timeout: float | None, shared: dict[str, Any]) -> None:
        while parts := self._next_parts():
            try:
                self._call_early(concatenated(parts), timeout, shared)
            except BaseException:  # nobody hears a thread; the call on the whole shows what it was
                self._failed = True

    def _next_parts(self) -> list[RolloutBatch]:
        with self._lock:
            parts, self._waiting = self._waiting, []
            if not parts and self._worker is not None:
                self._worker.set_result(None)
                self._worker = None
            return parts

    def _run(self, arguments: dict[str, Any], timeout: float | None) -> Any:
        title = f"reward function {self.__name__!r}"
        return asyncio.run(await_function(self.function, title, arguments, timeout))


def _same(part: dict[str, Any], at: int, whole: dict[str, Any], row: int) -> bool:
    """Whether a completion of a part came with what it comes with in the whole."""
    if part.keys() != whole.keys() - _SHARED:
        return False
    # Texts are decoded anew, everything else is the same object.
    return part["completions"][at] == whole["completions"][row] and all(
        part[name][at] is whole[name][row] for name in part if name != "completions"
    )
