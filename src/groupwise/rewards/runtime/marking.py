"""Marks and settings of reward functions: rewards per sample, the package that one needs, its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def per_sample_reward(reward: F) -> F:
    """Decorate a reward function whose rewards depend only on their own completion and row.

    The trainer may call such a function on parts of a batch: with the vLLM server, on the prompts whose
    completions are finished while others are still being generated. Calls of one function never overlap. Each
    value passed to ``log_metric`` counts once per part, so log means and not counts.
    """
    reward.per_sample_reward = True  # type: ignore[attr-defined]
    return reward


def requires_package(module: str) -> Callable[[F], F]:
    """Decorate a reward function that imports an optional package, so that building the trainer finds it."""

    def mark(reward: F) -> F:
        reward.required_package = module  # type: ignore[attr-defined]
        return reward

    return mark


def with_settings(reward: Callable[..., Any], *settings: object) -> Callable[..., Any]:
    """Return the reward function with its first arguments, which are positional-only, under its own name.

    Dataset columns, which are passed by keyword, cannot replace them, and it can be pickled.
    """
    bound = functools.partial(reward, *settings)
    bound.__name__ = reward.__name__  # type: ignore[attr-defined]
    return bound


def mark_of(reward: object, name: str) -> Any:
    """Return the attribute ``name`` of the reward function, or of that inside a ``functools.partial``."""
    inner = reward.func if isinstance(reward, functools.partial) else reward
    return getattr(reward, name, getattr(inner, name, None))
