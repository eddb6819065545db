"""Multi-turn rollouts: tools, environments, and the scheduler of their turns.

Each public name loads its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = {
    "environment_driven": ("ChatFunction", "EnvironmentLoop", "MaxLengthReachedError", "RolloutEnvironment"),
    "environments": ("EnvironmentPool",),
    "loop": ("AgentLoop", "ChatResponse"),
    "multi_turn": ("MultiTurnRollouts",),
    "tool_loop": ("ToolLoop",),
    "tools": ("Tool", "ToolSet", "allow_image_paths", "make_tool"),
    "trajectory": ("Trajectory",),
}


def __getattr__(name: str) -> Any:
    module = next((f"agents.{module}" for module, names in _MODULES.items() if name in names), None)
    module = module or {"Renderer": "tokenization.rendering", "thread_safe": "threads"}.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"groupwise.{module}"), name)
