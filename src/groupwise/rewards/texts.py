"""Helpers of reward functions: text of a completion, logs, optional imports."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from groupwise.errors import as_number, checked_entries
from groupwise.tokenization.text import message_text

#: A string, or chat messages.
Text = str | Sequence[Mapping[str, Any]]


def answer_text(completion: Text) -> str:
    """Return the text to score: a string, or the content of the last message of a chat completion.

    The text of content blocks is joined; blocks without text, and other values in a list, are skipped.
    """
    if isinstance(completion, str):
        return completion
    return message_text(completion[-1]) if completion else ""


def text_with_thoughts(completion: Text) -> str:
    """Return :func:`answer_text` with the message's thoughts before it, in ``<think>`` tags.

    Thoughts without an answer have no closing tag: they may be incomplete.
    """
    answer = answer_text(completion)
    if isinstance(completion, str) or not completion:
        return answer
    message = completion[-1]
    thoughts = message.get("reasoning_content") or message.get("thinking")
    if not thoughts:
        return answer
    ended = answer or message.get("tool_calls")
    return f"<think>\n{thoughts}\n" + (f"</think>\n\n{answer}" if ended else "")


_as_numbers = partial(checked_entries, convert=as_number, allowed="one number")


class RewardLog:
    """Arguments ``log_extra`` and ``log_metric`` of reward functions that score ``num_rows`` completions.

    columns: values of ``log_extra`` by column, one per completion.
    metrics: names and values of ``log_metric``.

    Args:
        check: checks a metric and returns it as a dictionary.
    """

    def __init__(self, num_rows: int, check: Callable[..., dict[str, float]] = _as_numbers) -> None:
        self.num_rows, self.check = num_rows, check
        self.columns: dict[str, list[Any]] = {}
        self.metrics: list[tuple[str, float]] = []

    def log_extra(self, column: str, values: Sequence[Any], rows: Sequence[int] | None = None) -> None:
        values, rows = list(values), range(self.num_rows) if rows is None else rows
        if len(values) != len(rows):
            given = f"{len(rows)} completions; give one for each" if len(rows) > 1 else "one completion"
            raise ValueError(f"log_extra({column!r}, ...) has {len(values)} values for {given}")
        logged = self.columns.setdefault(str(column), [None] * self.num_rows)
        for row, value in zip(rows, values, strict=True):  # functions of other sources log the other rows
            logged[row] = value

    def log_metric(self, name: str, value: float) -> None:
        self.metrics += self.check({name: value}, f"log_metric({name!r}, ...)", ValueError).items()


def require(module: str, user: str) -> Any:
    """Import and return an optional package.

    Raises:
        ImportError: the package is not installed; names the extra to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{user} needs {package.replace('_', '-')}, which is not installed; "
            "run pip install 'groupwise[rewards]'"
        ) from error
