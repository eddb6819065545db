"""Calls of tools and of methods of environments: in the caller's thread, or concurrent, with a time limit."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from groupwise.errors import is_interrupt, keep_grad_mode
from groupwise.rewards.runtime.calling import reward_name
from groupwise.threads import EventLoop, await_call, can_interrupt, interrupted, is_async, limit_error, settle

logger = logging.getLogger(__name__)

#: Maximum number of concurrent calls.
MAX_CONCURRENT_CALLS = 64

#: Seconds after the time limit of every call at which the event loop must be blocked.
BLOCKED_MARGIN = 10.0

_MARKER = "thread_safe"

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")


def thread_safe(function: F) -> F:
    """Decorate a sync tool, or a sync method of an environment, whose calls may run concurrently in threads.

    >>> @thread_safe
    ... def search(query: str) -> str: ...
    """
    setattr(function, _MARKER, True)
    return function


def is_concurrent(function: Callable[..., object]) -> bool:
    """Return True for async functions and those marked with :func:`thread_safe`."""
    marked = function
    while isinstance(marked, functools.partial):
        marked = marked.func
    return is_async(function) or getattr(marked, _MARKER, False) is True


@dataclass(frozen=True)
class Invocation:
    """One call: a function without arguments, and the object whose calls must not overlap (None: none)."""

    function: Callable[[], Any]
    owner: object = None


class ToolExecutor:
    """Call functions of the user.

    Sync functions run in the caller's thread, one after the other, so that signals, database connections and
    other state bound to a thread work. Async functions run concurrently in the event loop of a daemon thread,
    functions marked with :func:`thread_safe` concurrently in threads. The loop lives as long as the run,
    because async clients are bound to the loop in which they were created.

    Args:
        timeout: seconds per call; None: no limit. A sync call in the main thread is interrupted by a signal
            (SIGVTALRM, so that ``signal.alarm`` remains free for the function); C code that does not return
            cannot be interrupted. Elsewhere Python cannot stop a call: it runs in a thread, keeps running
            after the limit, and its result is discarded. Async functions are cancelled.
        idle_limit: seconds in which at least one of the awaited calls must end. None: no limit without
            ``timeout``, else a little more than calls with this limit can take.
    """

    def __init__(self, timeout: float | None = None, *, idle_limit: float | None = None) -> None:
        self.timeout, self.idle_limit = timeout, idle_limit
        self.limited_by = "tool_timeout" if timeout is not None else "time_limit"  # names for the user
        self._loop: EventLoop | None = None
        self._semaphore: asyncio.Semaphore | None = None

    def start(self, invocations: Sequence[Invocation]) -> list[Future[Any]]:
        """Start concurrent functions in the background, then call the others in order in this thread.

        Calls of one owner are sequential; they run in this thread if one of them is not concurrent.

        Returns:
            One future per invocation. Those of sync functions are done.
        """
        here = {id(each.owner) for each in invocations if not is_concurrent(each.function)} - {id(None)}
        futures: list[Future[Any]] = [Future() for _ in invocations]
        sequences: dict[int, list[int]] = {}  # positions by owner
        for index, each in enumerate(invocations):
            if is_concurrent(each.function) and id(each.owner) not in here:
                sequences.setdefault(-index - 1 if each.owner is None else id(each.owner), []).append(index)
        for indices in sequences.values():
            self._start_sequence([(invocations[i].function, futures[i]) for i in indices])
        background = {index for indices in sequences.values() for index in indices}
        for index, each in enumerate(invocations):
            if index not in background:
                self._call(each.function, futures[index])
        return futures

    def run_all(self, functions: Sequence[Callable[[], Any]]) -> list[Future[Any]]:
        """Call functions without arguments as :meth:`start` does, and wait; return their finished futures."""
        futures = self.start([Invocation(function) for function in functions])
        while self.wait_for_next(futures):
            pass
        return futures

    def wait_for_next(self, futures: Sequence[Future[Any]]) -> bool:
        """Wait until one more of ``futures`` is done; return False if all are.

        If none ends within ``idle_limit``, all fail. If calls have a ``timeout`` of their own, the reason is
        an async function that blocks the event loop (``time.sleep``, ``requests``): later calls get a new
        loop.
        """
        unfinished = [future for future in futures if not future.done()]
        limit = self.idle_limit
        if limit is None and self.timeout is not None:
            limit = self.timeout * (1 + len(unfinished) // MAX_CONCURRENT_CALLS) + BLOCKED_MARGIN
        if not unfinished or wait(unfinished, limit, FIRST_COMPLETED).done:
            return bool(unfinished)
        if self.timeout is not None:
            logger.warning(
                "no call of a tool or environment ended within %g seconds, although each is limited to %g: "
                "an async function blocks the event loop (time.sleep, requests); use await, or make it a "
                "sync function; the calls fail, and later ones use a new event loop",
                limit,
                self.timeout,
            )
            self._loop = self._semaphore = None
        for future in unfinished:
            settle(future, error=limit_error(limit, self.limited_by))
        return True

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the event loop."""
        return self._running_loop().submit(coroutine)

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the thread of the event loop."""
        self._running_loop().call_soon(function, *arguments)

    def _call(self, function: Callable[[], Any], future: Future[Any]) -> None:
        """Call a function in this thread, or wait for it if it is async or cannot be interrupted here."""
        if is_async(function) or (self.timeout is not None and not can_interrupt()):
            self._start_sequence([(function, future)])
            self.wait_for_next([future])
            return
        try:
            with keep_grad_mode(f"the function {reward_name(function)!r} of a tool or environment"):
                result = (
                    function()
                    if self.timeout is None
                    else interrupted(function, self.timeout, self.limited_by)
                )
            future.set_result(result)
        except BaseException as problem:
            if is_interrupt(problem):
                raise
            settle(future, error=problem)

    def _start_sequence(self, calls: Sequence[tuple[Callable[[], Any], Future[Any]]]) -> None:
        async def run() -> None:
            if self._semaphore is None:
                self._semaphore = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
            for function, future in calls:
                async with self._semaphore:
                    try:
                        settle(future, await await_call(function, self.timeout, self.limited_by))
                    except BaseException as problem:  # SystemExit would end the event loop
                        settle(future, error=problem)

        self.submit(run())

    def _running_loop(self) -> EventLoop:
        if self._loop is None:
            self._loop = EventLoop("groupwise-tools")
        return self._loop
