"""Reward library. Each public name loads its module, torch and optional packages when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.rewards.accuracy import accuracy_reward as accuracy_reward
    from groupwise.rewards.accuracy import get_cosine_scaled_reward as get_cosine_scaled_reward
    from groupwise.rewards.accuracy import reasoning_accuracy_reward as reasoning_accuracy_reward
    from groupwise.rewards.distillation import get_distillation_reward as get_distillation_reward
    from groupwise.rewards.process import ProcessRewardModel as ProcessRewardModel
    from groupwise.rewards.runtime.marking import per_sample_reward as per_sample_reward
    from groupwise.rewards.shaping import get_repetition_penalty_reward as get_repetition_penalty_reward
    from groupwise.rewards.shaping import get_soft_overlong_punishment as get_soft_overlong_punishment
    from groupwise.rewards.shaping import think_format_reward as think_format_reward

#: Module of each public name.
_MODULES = {
    "accuracy_reward": "rewards.accuracy",
    "get_cosine_scaled_reward": "rewards.accuracy",
    "reasoning_accuracy_reward": "rewards.accuracy",
    "get_distillation_reward": "rewards.distillation",
    "ProcessRewardModel": "rewards.process",
    "per_sample_reward": "rewards.runtime.marking",
    "get_repetition_penalty_reward": "rewards.shaping",
    "get_soft_overlong_punishment": "rewards.shaping",
    "think_format_reward": "rewards.shaping",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"groupwise.{_MODULES[name]}"), name)
