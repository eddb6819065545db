"""Rollouts of several turns: tools, environments, and the loop that lets a policy use them."""

from __future__ import annotations

from groupwise.agents.environments import Environments
from groupwise.agents.loop import Agents
from groupwise.agents.rendering import Renderer
from groupwise.agents.tools import Tool, Toolbox, time_limit
from groupwise.agents.transcript import Transcript

__all__ = ["Agents", "Environments", "Renderer", "Tool", "Toolbox", "Transcript", "time_limit"]
