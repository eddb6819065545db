"""Multi-turn rollouts: tools, environments, and the scheduler of their turns.

Each public name loads its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.agents.environment_driven import ChatFunction as ChatFunction
    from groupwise.agents.environment_driven import EnvironmentLoop as EnvironmentLoop
    from groupwise.agents.environment_driven import MaxLengthReachedError as MaxLengthReachedError
    from groupwise.agents.environment_driven import RolloutEnvironment as RolloutEnvironment
    from groupwise.agents.environments import EnvironmentPool as EnvironmentPool
    from groupwise.agents.loop import AgentLoop as AgentLoop
    from groupwise.agents.loop import ChatResponse as ChatResponse
    from groupwise.agents.multi_turn import MultiTurnRollouts as MultiTurnRollouts
    from groupwise.agents.tool_loop import ToolLoop as ToolLoop
    from groupwise.agents.tools import Tool as Tool
    from groupwise.agents.tools import ToolSet as ToolSet
    from groupwise.agents.tools import allow_image_paths as allow_image_paths
    from groupwise.agents.tools import make_tool as make_tool
    from groupwise.agents.trajectory import Trajectory as Trajectory
    from groupwise.threads import thread_safe as thread_safe
    from groupwise.tokenization.rendering import Renderer as Renderer

#: Module of each public name.
_MODULES = {
    "ChatFunction": "agents.environment_driven",
    "EnvironmentLoop": "agents.environment_driven",
    "MaxLengthReachedError": "agents.environment_driven",
    "RolloutEnvironment": "agents.environment_driven",
    "EnvironmentPool": "agents.environments",
    "AgentLoop": "agents.loop",
    "ChatResponse": "agents.loop",
    "MultiTurnRollouts": "agents.multi_turn",
    "ToolLoop": "agents.tool_loop",
    "Tool": "agents.tools",
    "ToolSet": "agents.tools",
    "allow_image_paths": "agents.tools",
    "make_tool": "agents.tools",
    "Trajectory": "agents.trajectory",
    "thread_safe": "threads",
    "Renderer": "tokenization.rendering",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"groupwise.{_MODULES[name]}"), name)
