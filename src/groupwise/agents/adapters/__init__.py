"""Environments of other libraries and of servers, as environments of the trainer."""

from __future__ import annotations

from groupwise.agents.adapters.openenv import OpenEnvSession, openenv_factory
from groupwise.agents.adapters.reasoning_gym import reasoning_gym_factory
from groupwise.agents.adapters.verifiers import VerifiersDriver, verifiers_dataset

__all__ = [
    "OpenEnvSession",
    "VerifiersDriver",
    "openenv_factory",
    "reasoning_gym_factory",
    "verifiers_dataset",
]
