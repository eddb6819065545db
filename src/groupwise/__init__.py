"""GRPO and its relatives inside ``transformers.Trainer``.

Importing the package loads nothing; each public name loads its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from groupwise.commands.iterative.iterative import IterativeGRPO
    from groupwise.commands.iterative.iterative_config import IterativeConfig
    from groupwise.commands.report.html_report import write_report
    from groupwise.commands.sweeps.scheduler import Sweep
    from groupwise.config.grpo_config import GRPOConfig
    from groupwise.core.advantages import register_advantage, register_aggregation
    from groupwise.core.objectives import register_objective
    from groupwise.core.weights import register_normalizer
    from groupwise.errors import (
        AgentError,
        BackendError,
        ConfigError,
        GroupwiseError,
        RewardError,
        TrainingError,
    )
    from groupwise.generation.backends import register_backend
    from groupwise.generation.base import GenerationBackend
    from groupwise.records import (
        Completion,
        Experience,
        LogprobOutput,
        LossOutput,
        MicroBatch,
        RewardBatch,
        RolloutBatch,
        RolloutRequest,
        SamplingOptions,
        TokenBatch,
    )
    from groupwise.reporting.callback import GRPOCallback
    from groupwise.trainer import GRPOTrainer

_MODULES = {
    "GRPOConfig": "config.grpo_config",
    "GRPOTrainer": "trainer",
    "IterativeConfig": "commands.iterative.iterative_config",
    "IterativeGRPO": "commands.iterative.iterative",
    "register_normalizer": "core.weights",
    "register_objective": "core.objectives",
    "register_advantage": "core.advantages",
    "register_aggregation": "core.advantages",
    "register_backend": "generation.backends",
    "GenerationBackend": "generation.base",
    "Completion": "records",
    "SamplingOptions": "records",
    "RolloutBatch": "records",
    "RewardBatch": "records",
    "MicroBatch": "records",
    "LossOutput": "records",
    "LogprobOutput": "records",
    "Experience": "records",
    "TokenBatch": "records",
    "RolloutRequest": "records",
    "GRPOCallback": "reporting.callback",
    "write_report": "commands.report.html_report",
    "Sweep": "commands.sweeps.scheduler",
    "GroupwiseError": "errors",
    "ConfigError": "errors",
    "RewardError": "errors",
    "BackendError": "errors",
    "AgentError": "errors",
    "TrainingError": "errors",
}

__all__ = [
    "AgentError",
    "BackendError",
    "Completion",
    "ConfigError",
    "Experience",
    "GRPOCallback",
    "GRPOConfig",
    "GRPOTrainer",
    "GenerationBackend",
    "GroupwiseError",
    "IterativeConfig",
    "IterativeGRPO",
    "LogprobOutput",
    "LossOutput",
    "MicroBatch",
    "RewardBatch",
    "RewardError",
    "RolloutBatch",
    "RolloutRequest",
    "SamplingOptions",
    "Sweep",
    "TokenBatch",
    "TrainingError",
    "register_advantage",
    "register_aggregation",
    "register_backend",
    "register_normalizer",
    "register_objective",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
