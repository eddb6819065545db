"""Adapters for environments of other libraries and of servers."""

from __future__ import annotations

from groupwise.agents.libraries.capture import CapturedAgent, Endpoint
from groupwise.agents.libraries.openenv import OpenEnvSession, openenv_factory
from groupwise.agents.libraries.verifiers import VerifiersEnvironment, rubric_reward, verifiers_dataset

__all__ = [
    "CapturedAgent",
    "Endpoint",
    "OpenEnvSession",
    "VerifiersEnvironment",
    "openenv_factory",
    "rubric_reward",
    "verifiers_dataset",
]
