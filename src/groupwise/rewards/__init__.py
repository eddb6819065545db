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
    from groupwise.rewards.reasoning_gym import (
        create_reasoning_gym,
        get_reasoning_gym_reward,
        reasoning_gym_dataset,
    )
    from groupwise.rewards.runtime.marking import per_sample_reward
    from groupwise.rewards.shaping import (
        get_repetition_penalty_reward,
        get_soft_overlong_punishment,
        think_format_reward,
    )

#: Module of each public name, loaded when the name is first used.
_MODULES = {
    "ProcessRewardModel": "process",
    "accuracy_reward": "accuracy",
    "create_reasoning_gym": "reasoning_gym",
    "get_cosine_scaled_reward": "accuracy",
    "get_distillation_reward": "distillation",
    "get_reasoning_gym_reward": "reasoning_gym",
    "get_repetition_penalty_reward": "shaping",
    "get_soft_overlong_punishment": "shaping",
    "per_sample_reward": "runtime.marking",
    "reasoning_accuracy_reward": "accuracy",
    "reasoning_gym_dataset": "reasoning_gym",
    "think_format_reward": "shaping",
}

__all__ = [
    "ProcessRewardModel",
    "accuracy_reward",
    "create_reasoning_gym",
    "get_cosine_scaled_reward",
    "get_distillation_reward",
    "get_reasoning_gym_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "per_sample_reward",
    "reasoning_accuracy_reward",
    "reasoning_gym_dataset",
    "think_format_reward",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
