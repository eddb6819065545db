"""The exceptions and warnings of this package, the nearest valid name, and calls of user code."""

from __future__ import annotations

import asyncio
import difflib
import functools
import logging
import reprlib
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxdict = 12


class GroupwiseError(Exception):
    """Base of every error of this package."""


class ConfigError(GroupwiseError, ValueError):
    """A setting, or a combination of settings, that cannot be trained with."""


class RewardError(GroupwiseError, ValueError):
    """A reward function failed, or returned something that is not one reward per completion."""


class BackendError(GroupwiseError, RuntimeError):
    """A generation backend failed."""


class TrainingError(GroupwiseError, RuntimeError):
    """Training cannot continue without damaging the weights."""


class AgentError(GroupwiseError, RuntimeError):
    """An environment or a tool failed with an error that the model cannot correct in its next turn."""


#: Directories of this package, of other packages and of the standard library.
_INSTALLED = (
    str(Path(__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)

#: Signals that ask a process to end, or to save and end, and that of the time limits of calls.
_INTERRUPTS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGVTALRM")


def is_interrupt(error: BaseException) -> bool:
    """Return True for exceptions that end or cancel the caller, False for failures of the raising code.

    Interrupts are Ctrl-C (``KeyboardInterrupt`` in the main thread), exceptions of a signal handler, such as
    the ``SystemExit`` of one for SIGTERM, a time limit in the main thread, and the cancellation of the
    current task.
    """
    if isinstance(error, asyncio.CancelledError):
        return _is_being_cancelled()
    if isinstance(error, Exception) or threading.current_thread() is not threading.main_thread():
        return False
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = [signal.getsignal(getattr(signal, name)) for name in _INTERRUPTS if hasattr(signal, name)]
    codes = {getattr(handler, "__code__", None) for handler in handlers} - {None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _is_being_cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop
        return False
    # Python 3.10 does not count requests to cancel: any cancellation within a task is taken for one.
    return task is not None and getattr(task, "cancelling", lambda: 1)() > 0


@contextmanager
def keep_grad_mode(name: str) -> Iterator[None]:
    """Run user code; a gradient mode that it leaves behind is set back, with a warning that names the code.

    ``torch.set_grad_enabled(False)`` acts on the whole thread, and the policy's loss would have no gradient.
    """
    torch = sys.modules.get("torch")  # code in a process without torch cannot change its mode
    enabled = torch is not None and torch.is_grad_enabled()
    try:
        yield
    finally:
        if torch is not None and torch.is_grad_enabled() != enabled:
            torch.set_grad_enabled(enabled)
            warn_once(
                logger,
                "%s left torch.set_grad_enabled(%s) behind; the mode was set back to %s. "
                "Use it as a context manager: with torch.set_grad_enabled(…), or with torch.no_grad()",
                *(name, not enabled, enabled),
            )


@contextmanager
def boundary(error: type[GroupwiseError], name: str, **sample: object) -> Iterator[None]:
    """Run user code; whatever it raises comes out as ``error``, naming the code and what it was given.

    The gradient mode stays as it was (:func:`keep_grad_mode`).

    >>> with boundary(RewardError, "reward function 'length'", row=3, prompt="2+2="):
    ...     rewards = length(**columns)

    Args:
        name: the user's code, as it should be called in the message.
        sample: what was being processed; long values are shortened.

    Raises:
        error: with the original exception as its ``__cause__``, also for ``SystemExit``: ``sys.exit(0)`` in
            user code must not end training as if it had succeeded. Interrupts pass (:func:`is_interrupt`).
    """
    try:
        with keep_grad_mode(name):
            yield
    except BaseException as cause:
        if is_interrupt(cause) or isinstance(cause, GeneratorExit):  # raised where a generator is closed
            raise
        given = ", ".join(f"{key}={shortened(value)}" for key, value in sample.items())
        where = f"{name} (given {given})" if given else name
        raise error(f"{where} raised {type(cause).__name__}: {cause}{_own_line(cause)}") from cause


def checked_entries(
    given: Any,
    source: str,
    error: type[Exception],
    *,
    name_of: Callable[[Any], str] = str,
    objection: Callable[[str], str] = lambda name: "",
    convert: Callable[[Any], Any] = lambda value: value,
    allowed: str = "values",
) -> dict[str, Any]:
    """Return the entries of a dictionary that user code returned, or raise ``error``, naming the entry.

    Args:
        source: the user's code in the message.
        objection: returns why no entry may have a name, such as one of the trainer's own; or "".
        convert: returns the value to use; it may raise where the value is not ``allowed``.
    """
    if not isinstance(given, Mapping):
        raise error(f"{source} returned {shortened(given)}; allowed: a dictionary of {allowed} by name")
    entries = {}
    for name, value in ((name_of(key), value) for key, value in given.items()):
        if reason := objection(name):
            raise error(f"{source}: {reason}")
        try:
            entries[name] = convert(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise error(f"{source}: {name!r} is {shortened(value)}; allowed: {allowed}") from None
    return entries


def as_number(value: Any) -> float:
    """Return a number, or a tensor or array of one, as a float; raise an error for anything else."""
    if isinstance(value, str | bytes):
        raise TypeError(value)  # float("3") is 3.0
    return float(value)


def _own_line(error: BaseException) -> str:
    """Return the innermost line outside of this package and of installed ones, in brackets; or nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_INSTALLED, "<frozen"))]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}: {own[-1].line})" if own else ""


@contextmanager
def log_boundary(logger: logging.Logger, name: str) -> Iterator[None]:
    """Write one log, file or table of a run; any error of the block is a warning, and the run goes on.

    Args:
        name: the log in the warning; it is lost.
    """
    try:
        yield
    except Exception as error:
        warn_once(logger, "%s was not written: %s: %s", name, type(error).__name__, error)


@functools.cache
def warn_once(logger: logging.Logger, message: str, *values: object) -> None:
    """Log a warning, once for each message with its values."""
    logger.warning(message, *values)


def shortened(value: object) -> str:
    """Return ``repr(value)`` for a message: at most 12 entries of a container, 200 characters of a string."""
    return _SHORT.repr(value)


def nearest_name(name: str, options: Iterable[str], cutoff: float = 0) -> str:
    """Return the option closest in spelling to ``name``, ignoring case.

    Args:
        cutoff: least similarity, from 0 to 1; the result is empty if no option reaches it.
    """
    by_lower = {option.lower(): option for option in options}
    return next((by_lower[near] for near in difflib.get_close_matches(name.lower(), by_lower, 1, cutoff)), "")


def check_counts(source: str, num_rows: int, **counts: int) -> None:
    """Check that generation returned one entry per row.

    Args:
        source: the code that returned them.
        counts: number of entries by what they are.

    Raises:
        ConfigError: with all numbers.
    """
    if any(count != num_rows for count in counts.values()):
        given = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ConfigError(
            f"{source} returned {given} for {num_rows} rows; it must return one of each per row"
        )
