"""Daemon threads, event loops, and calls of the user's functions with a time limit.

Daemon, because a call that never returns must not keep the process from exiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from groupwise.errors import is_interrupt, keep_grad_mode

logger = logging.getLogger(__name__)

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])

#: Maximum number of concurrent calls.
MAX_CONCURRENT_CALLS = 64

#: Seconds after the time limit of every call at which the event loop must be blocked.
BLOCKED_MARGIN = 10.0

_MARKER = "thread_safe"


def is_async(function: object) -> bool:
    """Return True for an ``async def`` function, a callable object with one, or a partial of either."""
    function = _unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def start_thread(function: Callable[[], T], name: str | None = None) -> Future[T]:
    """Run a function in a daemon thread with the caller's gradient mode and GPU, which are per thread."""
    grad = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    future: Future[T] = Future()

    def run() -> None:
        try:
            torch.set_grad_enabled(grad)
            if device is not None:
                torch.cuda.set_device(device)
            settle(future, function())
        except BaseException as error:
            settle(future, error=error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def settle(future: Any, result: object = None, error: BaseException | None = None) -> None:
    """Set result or error of a future (of asyncio, too), unless it is done: a call may exceed its limit."""
    with contextlib.suppress(InvalidStateError, asyncio.InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(as_exception(error))


def as_exception(error: BaseException) -> Exception:
    """Return ``error``, or a RuntimeError for SystemExit and the like, which would take effect again."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):  # futures of asyncio refuse it
        return error
    return RuntimeError(f"{type(error).__name__}: {error}".removesuffix(": "))


class TimeLimitError(TimeoutError):
    """A call took too long; ``setting`` is the name of its limit for the user."""

    def __init__(self, seconds: float | None, setting: str = "") -> None:
        super().__init__(f"no result within {seconds:g} seconds" + (f" ({setting})" if setting else ""))


async def await_call(function: Callable[[], Any], timeout: float | None, setting: str = "") -> Any:
    """Await an async function, or call a sync function in a daemon thread, for ``timeout`` seconds at most.

    An async function is cancelled at the limit. Python cannot stop a thread: a sync call keeps running, and
    its result is discarded.

    Args:
        setting: name of the limit for the user, in the error.

    Raises:
        TimeLimitError: the call exceeded the limit.
        Exception: the function's, see :func:`as_exception`.
    """
    call: asyncio.Future[Any]
    if is_async(function):
        call = asyncio.ensure_future(_guarded(function))
    else:
        call = asyncio.wrap_future(start_thread(function))
    done, _ = await asyncio.wait({call}, timeout=timeout)
    if not done:
        call.add_done_callback(lambda call: call.cancelled() or call.exception())  # else logged as not read
        call.cancel()  # not awaited: the function may ignore it
        raise TimeLimitError(timeout, setting)
    return call.result()


async def _guarded(function: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await function()
    except (SystemExit, KeyboardInterrupt) as error:
        raise as_exception(error) from error  # within the task: they would leave the event loop


class _TimeLimitReached(BaseException):
    """Raised in the main thread; not an ``Exception``, which functions catch to try again."""


def interrupted(function: Callable[[], T], timeout: float, setting: str = "") -> T:
    """Call a function in the main thread and interrupt it by a signal after ``timeout`` seconds.

    The signal is SIGVTALRM, so that ``signal.alarm`` remains free for the function. C code that does not
    return cannot be interrupted.

    Args:
        setting: name of the limit for the user, in the error.

    Raises:
        TimeLimitError: the function was interrupted.
    """
    running = True

    def interrupt(*_: object) -> None:
        if running:
            raise _TimeLimitReached

    previous = signal.signal(signal.SIGVTALRM, interrupt)
    main_thread = threading.get_ident()
    timer = threading.Timer(timeout, lambda: signal.pthread_kill(main_thread, signal.SIGVTALRM))
    timer.daemon = True
    try:
        try:
            timer.start()  # a signal may arrive before it returns
            return function()
        finally:
            running = False  # a signal before this line raises, and is caught below
    except _TimeLimitReached:
        raise TimeLimitError(timeout, setting) from None
    finally:
        timer.cancel()
        timer.join()  # a signal that is being sent arrives before the handler is replaced
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL if previous is None else previous)


class EventLoop:
    """Event loop in a daemon thread, which starts with the first coroutine.

    Clients, locks and queues of the user belong to the loop that they are first used in, so that one loop
    serves a whole run. Its thread has the gradient mode in which the newest coroutine was submitted.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.name, self.closed = name, False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Schedule a coroutine; returns its future for other threads."""
        if self.closed:
            coroutine.close()
            raise self._closed_error()
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                start_thread(functools.partial(self._run, self._loop), self.name)
            loop = self._loop
        return asyncio.run_coroutine_threadsafe(self._until_closed(coroutine, torch.is_grad_enabled()), loop)

    def abandon(self) -> None:
        """Leave a loop that a function blocks: later coroutines get a new one."""
        self._loop = None

    def close(self, finish: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel all coroutines, then run ``finish`` and end the loop, in its thread."""
        if not self.closed:
            self.closed = True
            if self._loop is not None:
                asyncio.run_coroutine_threadsafe(self._stop(finish), self._loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not loop.is_closed():
            try:
                loop.run_forever()  # until _stop
                loop.close()
            except BaseException:  # SystemExit in a task that a function of the user started
                logger.exception("a task in the event loop %r raised", self.name)

    async def _until_closed(self, coroutine: Coroutine[Any, Any, T], grad: bool) -> T:
        torch.set_grad_enabled(grad)
        try:
            return await coroutine
        except asyncio.CancelledError:
            if self.closed:
                raise self._closed_error() from None
            raise

    def _closed_error(self) -> Exception:
        return RuntimeError(f"the event loop {self.name!r} was closed")

    async def _stop(self, finish: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        try:
            if finish is not None:
                await finish()
            await asyncio.get_running_loop().shutdown_asyncgens()
        finally:
            asyncio.get_running_loop().stop()


def thread_safe(function: F) -> F:
    """Decorate a sync tool, or a sync method of an environment, whose calls may run concurrently in threads.

    >>> @thread_safe
    ... def search(query: str) -> str: ...
    """
    setattr(function, _MARKER, True)
    return function


def is_concurrent(function: Callable[..., object]) -> bool:
    """Return True for async functions and those marked with :func:`thread_safe`."""
    return is_async(function) or getattr(_unwrapped(function), _MARKER, False) is True


def function_name(function: object) -> str:
    """Return the name of a function, also of a partial of it; of another object that of its class."""
    return getattr(inner := _unwrapped(function), "__name__", type(inner).__name__)


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


class Invocation(Future[Any]):
    """One call, for :meth:`CallExecutor.start`, and its result.

    Args:
        function: without arguments.
        owner: object whose calls must not overlap; None: none.
        limited: the time limit applies.
    """

    def __init__(self, function: Callable[[], Any], owner: object = None, limited: bool = True) -> None:
        super().__init__()
        self.function, self.owner, self.limited = function, owner, limited


class CallExecutor:
    """Call functions of the user.

    Sync functions run in the caller's thread, one after the other, so that signals, database connections and
    other state bound to a thread work. Async functions run concurrently in the event loop of a daemon thread,
    functions marked with :func:`thread_safe` concurrently in threads. All executors of a run share its loop,
    because async clients, locks and queues are bound to the loop in which they were first used.

    Args:
        timeout: seconds per call; None: no limit. A sync call in the main thread is interrupted by a signal
            (SIGVTALRM, so that ``signal.alarm`` remains free for the function); C code that does not return
            cannot be interrupted. Elsewhere Python cannot stop a call: it runs in a thread, keeps running
            after the limit, and its result is discarded. Async functions are cancelled.
        limited_by: name of the limit for the user.
        loop: event loop of the run; None: a new one.
        idle_limit: seconds in which at least one of the awaited calls must end. None: no limit without
            ``timeout``, else a little more than calls with this limit can take.

    Attributes:
        unfinished: by id, owners of calls that were given up in a thread or the event loop: what such a call
            does later, it does to an object that must not be used again.
    """

    def __init__(
        self,
        timeout: float | None = None,
        *,
        limited_by: str = "",
        loop: EventLoop | None = None,
        idle_limit: float | None = None,
    ) -> None:
        self.timeout, self.limited_by, self.idle_limit = timeout, limited_by, idle_limit
        self.loop = loop or EventLoop("groupwise-user-code")
        self.unfinished: dict[int, object] = {}
        self._slots: WeakKeyDictionary[Any, asyncio.Semaphore] = WeakKeyDictionary()  # by event loop

    def start(self, invocations: Sequence[Invocation]) -> Sequence[Invocation]:
        """Start concurrent functions in the background, then call the others in order in this thread.

        Calls of one owner are sequential; they run in this thread if one of them is not concurrent.

        Returns:
            The invocations. Those of sync functions are done.
        """
        here = {id(each.owner) for each in invocations if not is_concurrent(each.function)} - {id(None)}
        sequences: dict[int, list[Invocation]] = {}  # by owner, if there is one
        in_this_thread = []
        for each in invocations:
            if is_concurrent(each.function) and id(each.owner) not in here:
                sequences.setdefault(id(each if each.owner is None else each.owner), []).append(each)
            else:
                in_this_thread.append(each)
        for calls in sequences.values():
            self._start_sequence(calls)
        for call in in_this_thread:
            self._call(call)
        return invocations

    def run_all(self, invocations: Sequence[Invocation]) -> Sequence[Invocation]:
        """Call functions as :meth:`start` does, and wait; return the finished invocations."""
        self.start(invocations)
        while self.wait_for_next(invocations):
            pass
        return invocations

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
                "no async call ended within %g seconds, although %s=%g: an async reward, tool or environment "
                "blocks the event loop (time.sleep, requests); use await, or make it a sync function; the "
                "calls fail, and later ones use a new event loop",
                limit,
                self.limited_by,
                self.timeout,
            )
            self.loop.abandon()
        for future in unfinished:
            self.give_up(future, TimeLimitError(limit, self.limited_by))
        return True

    def give_up(self, future: Future[Any], error: Exception) -> None:
        """Fail a call that continues in the background, unless it is done."""
        if future.done():
            return
        if isinstance(future, Invocation) and future.owner is not None:
            self.unfinished[id(future.owner)] = future.owner
        settle(future, error=error)

    def _call(self, call: Invocation) -> None:
        """Call a function in this thread, or wait for it if it is async or cannot be interrupted here."""
        function, timeout = call.function, self.timeout if call.limited else None
        is_main = threading.current_thread() is threading.main_thread()
        can_interrupt = is_main and hasattr(signal, "pthread_kill")
        if is_async(function) or (timeout is not None and not can_interrupt):
            self._start_sequence([call])
            self.wait_for_next([call])
            return
        try:
            with keep_grad_mode(f"the function {function_name(function)!r} of a tool or environment"):
                result = function() if timeout is None else interrupted(function, timeout, self.limited_by)
            call.set_result(result)
        except BaseException as problem:
            if is_interrupt(problem):
                raise
            settle(call, error=problem)

    def _start_sequence(self, calls: Sequence[Invocation]) -> None:
        async def run() -> None:
            # One per loop: a semaphore belongs to the loop in which it first waited.
            slots = self._slots.setdefault(
                asyncio.get_running_loop(), asyncio.Semaphore(MAX_CONCURRENT_CALLS)
            )
            for call in calls:
                async with slots:
                    if call.done():  # given up while it waited
                        continue
                    try:
                        settle(call, await await_call(call.function, self.timeout, self.limited_by))
                    except TimeLimitError as problem:
                        self.give_up(call, problem)
                    except BaseException as problem:  # SystemExit would end the event loop
                        settle(call, error=problem)

        self.loop.submit(run())
