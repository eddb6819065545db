"""Daemon threads: functions and event loops in the background, and calls with a time limit.

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
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

import torch

from groupwise.errors import is_interrupt

logger = logging.getLogger(__name__)

T = TypeVar("T")


def is_async(function: object) -> bool:
    """Return True for an ``async def`` function, a callable object with one, or a partial of either."""
    if isinstance(function, functools.partial):
        return is_async(function.func)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def start_thread(function: Callable[[], T], name: str | None = None) -> Future[T]:
    """Run a function in a daemon thread with the caller's gradient mode and GPU, which are per thread."""
    grad = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    future: Future[T] = Future()

    def run() -> None:
        torch.set_grad_enabled(grad)
        if device is not None:
            torch.cuda.set_device(device)
        try:
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


def limit_error(seconds: float | None, setting: str) -> TimeoutError:
    """Return the error of a call that took too long, with the setting that limits it."""
    return TimeoutError(f"no result within {seconds:g} seconds" + (f" ({setting})" if setting else ""))


async def await_call(function: Callable[[], Any], timeout: float | None, setting: str = "") -> Any:
    """Await an async function, or call a sync function in a daemon thread, for ``timeout`` seconds at most.

    An async function is cancelled at the limit. Python cannot stop a thread: a sync call keeps running, and
    its result is discarded.

    Args:
        setting: name of the limit for the user, in the error.

    Raises:
        TimeoutError: the call exceeded the limit.
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
        raise limit_error(timeout, setting)
    if call.cancelled():
        raise RuntimeError("CancelledError")
    return call.result()


async def _guarded(function: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await function()
    except BaseException as error:
        if isinstance(error, (Exception, GeneratorExit)) or is_interrupt(error):
            raise
        raise as_exception(error) from error  # within the task: SystemExit would leave the event loop


class _TimeLimitReached(BaseException):
    """Raised in the main thread; not an ``Exception``, which functions catch to try again."""


def can_interrupt() -> bool:
    """Return True if :func:`interrupted` works here: in the main thread, on systems with its signal."""
    return threading.current_thread() is threading.main_thread() and hasattr(signal, "pthread_kill")


def interrupted(function: Callable[[], T], timeout: float, setting: str = "") -> T:
    """Call a function in the main thread and interrupt it by a signal after ``timeout`` seconds.

    The signal is SIGVTALRM, so that ``signal.alarm`` remains free for the function. C code that does not
    return cannot be interrupted.

    Args:
        setting: name of the limit for the user, in the error.

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
        raise limit_error(timeout, setting) from None
    finally:
        timer.cancel()
        timer.join()  # a signal that is being sent arrives before the handler is replaced
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL if previous is None else previous)


class EventLoop:
    """Event loop in a daemon thread.

    Args:
        name: of the thread.
        closed_error: returns the exception of coroutines that :meth:`close` cancels, and of later ones.
    """

    def __init__(
        self,
        name: str,
        closed_error: Callable[[], Exception] = lambda: RuntimeError("the event loop was closed"),
    ) -> None:
        self.closed_error, self.closed, self._is_stopped = closed_error, False, False
        self._loop = asyncio.new_event_loop()
        start_thread(self._run, name)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Schedule a coroutine; returns its future for other threads."""
        if self.closed:
            coroutine.close()
            raise self.closed_error()
        return asyncio.run_coroutine_threadsafe(self._until_closed(coroutine), self._loop)

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the thread of the loop."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self, finish: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel all coroutines, then run ``finish`` and end the loop, in its thread."""
        if not self.closed:
            self.closed = True
            asyncio.run_coroutine_threadsafe(self._stop(finish), self._loop)

    def _run(self) -> None:
        while not self._is_stopped:
            try:
                self._loop.run_forever()
            except BaseException:  # SystemExit in a task that a function of the user started
                logger.exception("a task in the event loop %r raised", threading.current_thread().name)
        self._loop.close()

    async def _until_closed(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return await coroutine
        except asyncio.CancelledError:
            if self.closed:
                raise self.closed_error() from None
            raise

    async def _stop(self, finish: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        try:
            if finish is not None:
                await finish()
            await self._loop.shutdown_asyncgens()
        finally:
            self._is_stopped = True
            self._loop.stop()
