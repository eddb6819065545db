"""Rollouts of several turns: tools, environments, and the loop that lets a policy use them."""

from __future__ import annotations

from groupwise.agents.environment_driven import Chat, Driver, EnvironmentDrivenRollouts, OutOfRoomError, Reply
from groupwise.agents.environments import Environments
from groupwise.agents.loop import Agents
from groupwise.agents.tools import Tool, Toolbox, make_tool, time_limit
from groupwise.agents.transcript import Transcript
from groupwise.tokenization.rendering import Renderer

__all__ = [
    "Agents",
    "Chat",
    "Driver",
    "EnvironmentDrivenRollouts",
    "Environments",
    "OutOfRoomError",
    "Renderer",
    "Reply",
    "Tool",
    "Toolbox",
    "Transcript",
    "make_tool",
    "time_limit",
]
