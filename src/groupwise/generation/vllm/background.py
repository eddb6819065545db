"""Threads that wait for answers, and that the end of the process does not wait for.

``concurrent.futures`` joins its threads at exit: an interrupted run would stay until its last answer came.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class BackgroundThreads:
    """Runs calls on up to ``size`` threads, started as they are needed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._free = threading.Semaphore(0)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call the function on one of the threads."""
        future: Future[Any] = Future()
        self._calls.put((future, lambda: function(*args)))
        if not self._free.acquire(blocking=False) and len(self._threads) < self.size:
            thread = threading.Thread(target=self._work, name="vllm-request", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def close(self) -> None:
        """Cancel what has not begun; the threads end when their calls do."""
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                break
            if call is not None:
                call[0].cancel()
        for _ in self._threads:
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, run = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(run())
                except BaseException as error:
                    future.set_exception(error)
            self._free.release()
