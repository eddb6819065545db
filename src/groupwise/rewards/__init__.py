"""Reward library. Each public name loads its module, torch and optional packages when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.rewards.accuracy import (
        accuracy_reward,
        get_cosine_scaled_reward,
        reasoning_accuracy_reward,
    )
    from groupwise.rewards.distillation import get_distillation_reward
    from groupwise.rewards.process import ProcessRewardModel
    from groupwise.rewards.runtime.marking import per_sample_reward
    from groupwise.rewards.shaping import (
        get_repetition_penalty_reward,
        get_soft_overlong_punishment,
        think_format_reward,
    )

#: Public names by module, which is loaded when one of them is first used.
_MODULES = {
    "accuracy": ("accuracy_reward", "get_cosine_scaled_reward", "reasoning_accuracy_reward"),
    "distillation": ("get_distillation_reward",),
    "process": ("ProcessRewardModel",),
    "runtime.marking": ("per_sample_reward",),
    "shaping": ("get_repetition_penalty_reward", "get_soft_overlong_punishment", "think_format_reward"),
}

__all__ = [
    "ProcessRewardModel",
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "get_distillation_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "per_sample_reward",
    "reasoning_accuracy_reward",
    "think_format_reward",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
