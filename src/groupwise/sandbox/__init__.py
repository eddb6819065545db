"""Processes with limits for rewards: isolated reward functions, and a sandbox for untrusted programs.

Processes of :func:`isolated` rewards import this package, which loads neither torch nor transformers.
"""

from __future__ import annotations

from groupwise.sandbox.code import get_code_execution_reward
from groupwise.sandbox.isolation import isolated
from groupwise.sandbox.linux import Sandbox, SandboxLimits, SandboxResult

__all__ = ["Sandbox", "SandboxLimits", "SandboxResult", "get_code_execution_reward", "isolated"]
