"""What the rewards of the library share: the text to judge, and checks of their arguments."""

from __future__ import annotations

import importlib
import math
from typing import Any

from groupwise.errors import ConfigError


def answer_text(completion: Any) -> str:
    """The text to judge: a string itself, or the content of the last message of a chat completion.

    Content blocks are joined; those without text count as nothing.
    """
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    if isinstance(content, list):
        return "".join(block.get("text") or "" for block in content)
    return content or ""


def require(module: str, user: str) -> Any:
    """Import an optional package.

    Raises:
        ImportError: naming what needs it and the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{user} needs {package.replace('_', '-')}, which is not installed; install groupwise[rewards]"
        ) from error


def check_whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise ``ConfigError`` unless ``value`` is an integer in the range (both ends are allowed)."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        raise ConfigError(f"{name}={value!r} is not valid; allowed: {allowed}")


def check_number(name: str, value: Any, *, above: float = -math.inf, most: float = math.inf) -> None:
    """Raise ``ConfigError`` unless ``value`` is a finite number with ``above < value <= most``."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not above < value <= most:
        limits = [f"> {above:g}"] * (above > -math.inf) + [f"<= {most:g}"] * (most < math.inf)
        raise ConfigError(f"{name}={value!r} is not valid; allowed: {' '.join(['a finite number', *limits])}")
