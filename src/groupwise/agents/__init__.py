"""Multi-turn rollouts: tools, environments, and the scheduler of their turns."""

from __future__ import annotations

from groupwise.agents.environment_driven import (
    ChatFunction,
    EnvironmentLoop,
    MaxLengthReachedError,
    RolloutEnvironment,
)
from groupwise.agents.environments import EnvironmentPool
from groupwise.agents.loop import AgentLoop, ChatResponse
from groupwise.agents.multi_turn import MultiTurnRollouts
from groupwise.agents.tool_loop import ToolLoop
from groupwise.agents.tools import Tool, ToolSet, allow_image_paths, make_tool
from groupwise.agents.trajectory import Trajectory
from groupwise.threads import thread_safe
from groupwise.tokenization.rendering import Renderer

__all__ = [
    "AgentLoop",
    "ChatFunction",
    "ChatResponse",
    "EnvironmentLoop",
    "EnvironmentPool",
    "MaxLengthReachedError",
    "MultiTurnRollouts",
    "Renderer",
    "RolloutEnvironment",
    "Tool",
    "ToolLoop",
    "ToolSet",
    "Trajectory",
    "allow_image_paths",
    "make_tool",
    "thread_safe",
]
