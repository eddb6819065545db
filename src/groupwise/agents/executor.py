"""Calls of tools and of methods of environments: in the caller's thread, or concurrent, with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from groupwise.errors import is_interrupt, keep_grad_mode
from groupwise.rewards.runtime.calling import reward_name
from groupwise.threads import is_async

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
    """

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = timeout
        self._loop: asyncio.AbstractEventLoop | None = None
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

        If none ends within the time limit, an async function blocks the event loop (``time.sleep``,
        ``requests``): the unfinished calls fail, and later calls get a new loop.
        """
        unfinished = [future for future in futures if not future.done()]
        if not unfinished or self.timeout is None:
            wait(unfinished, return_when=FIRST_COMPLETED)
            return bool(unfinished)
        limit = self.timeout * (1 + len(unfinished) // MAX_CONCURRENT_CALLS) + BLOCKED_MARGIN
        if not wait(unfinished, limit, FIRST_COMPLETED).done:
            logger.warning(
                "no call of a tool or environment ended within %g seconds, although each is limited to %g: "
                "an async function blocks the event loop (time.sleep, requests); use await, or make it a "
                "sync function; the calls fail, and later ones use a new event loop",
                limit,
                self.timeout,
            )
            self._loop = self._semaphore = None
            for future in unfinished:
                _settle(future, error=TimeoutError(f"no result within {limit:g} seconds"))
        return True

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the thread of the event loop."""
        self._running_loop().call_soon_threadsafe(function, *arguments)

    def _call(self, function: Callable[[], Any], future: Future[Any]) -> None:
        """Call a function in this thread, or wait for it if it is async or cannot be interrupted here."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        can_interrupt = in_main_thread and hasattr(signal, "pthread_kill")
        if is_async(function) or (self.timeout is not None and not can_interrupt):
            self.submit(self._await(function, future))
            self.wait_for_next([future])
            return
        try:
            with keep_grad_mode(f"the function {reward_name(function)!r} of a tool or environment"):
                result = function() if self.timeout is None else _interrupted(function, self.timeout)
            future.set_result(result)
        except BaseException as problem:
            if is_interrupt(problem):
                raise
            _settle(future, error=problem)

    def _start_sequence(self, calls: Sequence[tuple[Callable[[], Any], Future[Any]]]) -> None:
        async def run() -> None:
            if self._semaphore is None:
                self._semaphore = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
            for function, future in calls:
                async with self._semaphore:
                    await self._await(function, future)

        self.submit(run())

    async def _await(self, function: Callable[[], Any], future: Future[Any]) -> None:
        """Store the result or the error of a call in ``future``, at the latest at the time limit."""
        loop, settled = asyncio.get_running_loop(), asyncio.Event()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(settled.set))
        task = None
        if is_async(function):
            task = asyncio.ensure_future(_call_async(function, future))
        else:
            # A daemon thread: a call that never ends must not keep the process from exiting.
            threading.Thread(target=_call_sync, args=(function, future), daemon=True).start()
        try:
            await asyncio.wait_for(settled.wait(), self.timeout)
        except asyncio.TimeoutError:
            _settle(future, error=_timeout_error(self.timeout))
            if task is not None:
                task.cancel()  # not awaited: the function may ignore it

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = loop = asyncio.new_event_loop()
            # A daemon thread: a call that never ends must not keep the process from exiting.
            threading.Thread(target=_run_loop, args=(loop,), name="groupwise-tools", daemon=True).start()
        return self._loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        except BaseException:  # SystemExit in a task that a tool created, for instance
            logger.exception("a task in the event loop of the tools raised")


def _call_sync(function: Callable[[], Any], future: Future[Any]) -> None:
    try:
        _settle(future, function())
    except BaseException as problem:
        _settle(future, error=problem)


async def _call_async(function: Callable[[], Awaitable[Any]], future: Future[Any]) -> None:
    try:
        _settle(future, await function())
    except BaseException as problem:  # SystemExit would end the event loop
        _settle(future, error=problem)


def _settle(future: Future[Any], result: object = None, error: BaseException | None = None) -> None:
    """Set the result or the error of a future, unless it has one: a call may end after its time limit."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(as_exception(error))


def as_exception(error: BaseException) -> Exception:
    """Return ``error``, or a RuntimeError for SystemExit and the like, which would take effect again."""
    if isinstance(error, Exception):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}".removesuffix(": "))


def _timeout_error(timeout: float | None) -> TimeoutError:
    return TimeoutError(f"the call took longer than {timeout:g} seconds (tool_timeout)")


class _TimeLimitReached(BaseException):
    """Raised in the main thread; not an ``Exception``, which functions catch to try again."""


def _interrupted(function: Callable[[], T], timeout: float) -> T:
    """Call a function in the main thread and interrupt it by a signal after ``timeout`` seconds.

    Raises:
        TimeoutError: the function was interrupted.
    """
    running = True

    def interrupt(*_: object) -> None:
        if running:
            raise _TimeLimitReached

    previous = signal.signal(signal.SIGVTALRM, interrupt)
    main_thread = threading.get_ident()
    timer = threading.Timer(timeout, lambda: signal.pthread_kill(main_thread, signal.SIGVTALRM))
    timer.daemon = True
    timer.start()
    try:
        try:
            return function()
        finally:
            running = False  # a signal before this line raises, and is caught below
    except _TimeLimitReached:
        raise _timeout_error(timeout) from None
    finally:
        timer.cancel()
        timer.join()  # a signal that is being sent arrives before the handler is replaced
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL if previous is None else previous)
