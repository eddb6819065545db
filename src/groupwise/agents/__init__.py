"""Rollouts of several turns: tools, environments, and the loop that lets a policy use them."""

from __future__ import annotations

from groupwise.agents.driven import Chat, DrivenAgents, Driver, OutOfRoomError, Reply
from groupwise.agents.environments import Environments
from groupwise.agents.loop import Agents
from groupwise.agents.rendering import Renderer
from groupwise.agents.tools import Tool, Toolbox, make_tool, time_limit
from groupwise.agents.transcript import Transcript

__all__ = [
    "Agents",
    "Chat",
    "DrivenAgents",
    "Driver",
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
