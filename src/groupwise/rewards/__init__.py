"""Reward library. Optional packages (extra ``rewards``), and torch, are imported at the first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from groupwise.rewards.accuracy import accuracy_reward, get_cosine_scaled_reward, reasoning_accuracy_reward
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

if TYPE_CHECKING:
    from groupwise.rewards.distillation import get_distillation_reward
    from groupwise.rewards.process import ProcessRewardModel

#: Modules that import torch, by the public name that loads them.
_MODULES = {"ProcessRewardModel": "process", "get_distillation_reward": "distillation"}

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
