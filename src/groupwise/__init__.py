"""GRPO and its relatives inside ``transformers.Trainer``.

Importing the package loads nothing; each public name loads its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from groupwise.commands.iterative.iterative import IterativeGRPO as IterativeGRPO
    from groupwise.commands.iterative.iterative_config import IterativeConfig as IterativeConfig
    from groupwise.commands.report.html_report import write_report as write_report
    from groupwise.commands.sweeps.scheduler import Sweep as Sweep
    from groupwise.config.grpo_config import GRPOConfig as GRPOConfig
    from groupwise.core.advantages import register_advantage as register_advantage
    from groupwise.core.advantages import register_aggregation as register_aggregation
    from groupwise.core.objectives import register_objective as register_objective
    from groupwise.core.weights import register_normalizer as register_normalizer
    from groupwise.errors import AgentError as AgentError
    from groupwise.errors import BackendError as BackendError
    from groupwise.errors import ConfigError as ConfigError
    from groupwise.errors import GroupwiseError as GroupwiseError
    from groupwise.errors import RewardError as RewardError
    from groupwise.errors import TrainingError as TrainingError
    from groupwise.generation.backends import register_backend as register_backend
    from groupwise.generation.base import GenerationBackend as GenerationBackend
    from groupwise.records import Completion as Completion
    from groupwise.records import Experience as Experience
    from groupwise.records import LogprobOutput as LogprobOutput
    from groupwise.records import LossOutput as LossOutput
    from groupwise.records import MicroBatch as MicroBatch
    from groupwise.records import RewardBatch as RewardBatch
    from groupwise.records import RolloutBatch as RolloutBatch
    from groupwise.records import RolloutRequest as RolloutRequest
    from groupwise.records import SamplingOptions as SamplingOptions
    from groupwise.records import TokenBatch as TokenBatch
    from groupwise.reporting.callback import GRPOCallback as GRPOCallback
    from groupwise.trainer import GRPOTrainer as GRPOTrainer

#: Module of each public name.
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

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
