"""Threads of which one computes at a time, each with the global state of a process of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from groupwise.compat.accelerate import shared_states
from groupwise.errors import BackendError
from groupwise.random_state import get_state, preserved_state, set_state
from groupwise.threads import start_thread


class ClosedError(BaseException):
    """Raised in a run that waits for its turn and will not get another one."""


class TurnThread:
    """Thread that computes only between :meth:`advance` and its next :meth:`pause`.

    The generators of random numbers and accelerate's state belong to the process: they are exchanged with
    every turn. (``sync_gradients``, for example, is set before a pause and read after it.) Gradient mode and
    autocast belong to the thread.

    Args:
        function: body of the thread; the present global state is its first one.

    Attributes:
        error: exception that ended it.
    """

    def __init__(self, name: str, function: Callable[[], Any]) -> None:
        self.name, self.function = name, function
        self.error: BaseException | None = None
        self.has_ended, self._has_started = False, False
        self._thread: threading.Thread | None = None
        self._turns: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pauses: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._random, self._accelerate = get_state(), _accelerate_state()

    def advance(self, answer: Any = None) -> Any:
        """Let the thread compute; returns what it passes to its next :meth:`pause`, None when it ends.

        Args:
            answer: result of the :meth:`pause` in which the thread waits; an exception is raised there.
        """
        with preserved_state(), preserved_accelerate():
            set_state(self._random)
            _set_accelerate_state(self._accelerate)
            if self._has_started:
                self._turns.put(answer)
            else:
                self._has_started = True
                start_thread(self._run, self.name)
            given = self._pauses.get()
            self._random, self._accelerate = get_state(), _accelerate_state()
        return given

    def pause(self, given: Any = None) -> Any:
        """End the turn, called in the thread; returns the ``answer`` of the next one.

        Raises:
            BackendError: another thread calls it, which gets no turns.
        """
        if threading.current_thread() is not self._thread:
            raise BackendError(
                f"run {self.name!r} samples only while a sweep trains it; load its directory to evaluate it"
            )
        self._pauses.put(given)
        answer = self._turns.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        """End a thread that waits for its turn: its :meth:`pause` raises, and this waits for its end."""
        while self._has_started and not self.has_ended:
            self.advance(ClosedError())

    def _run(self) -> None:
        self._thread = threading.current_thread()
        try:
            self.function()
        except BaseException as error:
            self.error = error
        finally:
            self.has_ended = True
            self._pauses.put(None)


@contextmanager
def preserved_accelerate() -> Iterator[None]:
    """Context manager that restores accelerate's state at exit: building a configuration resets it."""
    before = _accelerate_state()
    try:
        yield
    finally:
        _set_accelerate_state(before)


def _accelerate_state() -> list[dict[str, Any]]:
    return [dict(shared) for shared in shared_states()]  # values are replaced, never changed in place


def _set_accelerate_state(states: list[dict[str, Any]]) -> None:
    for shared, state in zip(shared_states(), states, strict=True):
        shared.clear()
        shared.update(state)
