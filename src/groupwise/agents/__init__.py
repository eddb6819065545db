"""Multi-turn rollouts: tools, environments, and the parsing of tool calls."""

from __future__ import annotations

from groupwise.agents.environment_driven import (
    ChatFunction,
    ChatResponse,
    EnvironmentDrivenRollouts,
    MaxLengthReachedError,
    RolloutEnvironment,
)
from groupwise.agents.environments import EnvironmentPool
from groupwise.agents.executor import thread_safe
from groupwise.agents.multi_turn import MultiTurnRollouts, MultiTurnSettings
from groupwise.agents.tools import Tool, ToolSet, allow_image_paths, make_tool
from groupwise.agents.trajectory import Trajectory
from groupwise.tokenization.rendering import Renderer

__all__ = [
    "ChatFunction",
    "ChatResponse",
    "EnvironmentDrivenRollouts",
    "EnvironmentPool",
    "MaxLengthReachedError",
    "MultiTurnRollouts",
    "MultiTurnSettings",
    "Renderer",
    "RolloutEnvironment",
    "Tool",
    "ToolSet",
    "Trajectory",
    "allow_image_paths",
    "make_tool",
    "thread_safe",
]
