"""The exceptions of this package, the nearest valid name for their messages, and calls of user code."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


class GroupwiseError(Exception):
    """Base of every error of this package."""


class ConfigError(GroupwiseError, ValueError):
    """A setting, or a combination of settings, that cannot be trained with."""


class RewardError(GroupwiseError, ValueError):
    """A reward function failed, or returned something that is not one reward per completion."""


class BackendError(GroupwiseError, RuntimeError):
    """A generation backend failed."""


class TrainingError(GroupwiseError, RuntimeError):
    """Training cannot go on from here without spoiling the weights."""


class AgentError(GroupwiseError, RuntimeError):
    """An environment or the running of tools failed, in a way that no message to the model can mend."""


@contextmanager
def boundary(error: type[GroupwiseError], name: str, **sample: object) -> Iterator[None]:
    """Run user code; whatever it raises comes out as ``error``, naming the code and what it was given.

    >>> with boundary(RewardError, "reward function 'length'", row=3, prompt="2+2="):
    ...     rewards = length(**columns)

    Args:
        error: the class to raise.
        name: the user's code, as it should be called in the message.
        sample: what was being processed; long values are shortened.

    Raises:
        error: with the original exception as its ``__cause__``. ``KeyboardInterrupt``, ``SystemExit`` and the
            cancellation of a task are no failures of user code and pass through.
    """
    try:
        yield
    except Exception as cause:
        given = ", ".join(f"{key}={_SHORT.repr(value)}" for key, value in sample.items())
        where = f"{name} (given {given})" if given else name
        raise error(f"{where} raised {type(cause).__name__}: {cause}") from cause


def nearest_name(name: str, options: Iterable[str]) -> str:
    """Return the option closest in spelling to ``name``, ignoring case."""
    by_lower = {option.lower(): option for option in options}
    return by_lower[difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0)[0]]
