"""An event loop in a daemon thread, which does not keep an interrupted process alive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoopThread:
    """Runs coroutines in the background.

    Args:
        closed_error: returns the exception of coroutines that :meth:`close` cancels.
    """

    def __init__(self, closed_error: Callable[[], Exception]) -> None:
        self.closed_error, self.closed = closed_error, False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="vllm-client", daemon=True).start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Schedule ``coroutine``; returns its future for other threads."""
        if self.closed:
            coroutine.close()
            raise self.closed_error()
        return asyncio.run_coroutine_threadsafe(self._run(coroutine), self._loop)

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return await coroutine
        except asyncio.CancelledError:
            if self.closed:
                raise self.closed_error() from None
            raise

    def close(self, finish: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel all coroutines, then run ``finish`` and stop the loop."""
        if not self.closed:
            self.closed = True
            asyncio.run_coroutine_threadsafe(self._stop(finish), self._loop)

    async def _stop(self, finish: Callable[[], Coroutine[Any, Any, None]]) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        try:
            await finish()
        finally:
            self._loop.call_soon(self._loop.stop)
