"""What a reward function promises about itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def per_sample_reward(reward: F) -> F:
    """Promise that each reward depends on nothing but its own completion and row. A decorator.

    A function that promises it may be called on a part of the completions: with vLLM's server, on those of
    the prompts that are finished, while others are still generated. It is never called twice at a time. What
    it gives to ``log_metric`` counts once for every part, so log means and not counts.
    """
    reward.per_sample_reward = True  # type: ignore[attr-defined]
    return reward


def is_per_sample_reward(reward: Any) -> bool:
    """Whether the reward function promises it, itself or inside a ``functools.partial``."""
    if isinstance(reward, functools.partial) and is_per_sample_reward(reward.func):
        return True
    return getattr(reward, "per_sample_reward", False) is True
