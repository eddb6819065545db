"""Multi-turn rollouts: tools, environments, and the scheduler of their turns.

Each public name loads its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.agents.environment_driven import ChatFunction as ChatFunction
    from groupwise.agents.environment_driven import MaxLengthReachedError as MaxLengthReachedError
    from groupwise.agents.environment_driven import RolloutEnvironment as RolloutEnvironment
    from groupwise.agents.loop import ChatResponse as ChatResponse
    from groupwise.agents.tools import allow_image_paths as allow_image_paths
    from groupwise.agents.tools import make_tool as make_tool
    from groupwise.threads import thread_safe as thread_safe

#: Module of each public name.
_MODULES = {
    "ChatFunction": "agents.environment_driven",
    "MaxLengthReachedError": "agents.environment_driven",
    "RolloutEnvironment": "agents.environment_driven",
    "ChatResponse": "agents.loop",
    "allow_image_paths": "agents.tools",
    "make_tool": "agents.tools",
    "thread_safe": "threads",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"groupwise.{_MODULES[name]}"), name)
