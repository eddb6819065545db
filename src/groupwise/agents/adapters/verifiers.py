"""Environments of the ``verifiers`` library (0.1 and 0.2), which lead the conversation themselves."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import time
import uuid
from collections.abc import Callable
from typing import Any

from groupwise.agents.environment_driven import Chat, OutOfRoomError, Reply
from groupwise.errors import ConfigError

_KEPT = ("prompt", "example_id", "answer", "info", "task")


def verifiers_dataset(environment: Any) -> Any:
    """The environment's training rows, with the columns that it needs again to play and to score them."""
    rows = environment.get_dataset()
    return rows.select_columns([column for column in _KEPT if column in rows.column_names])


class VerifiersDriver:
    """Plays an environment of ``verifiers`` with the policy in place of an API; its rubric scores it.

    The environment decides what the messages are, calls its tools and says when a rollout ends. Rewards that
    compare the rollouts of a group are not supported; write those as a reward function.

    Args:
        environment: from ``verifiers.load_environment``, or made in code.
        time_limit: seconds that the environment may take between two turns.

    Raises:
        ConfigError: verifiers is missing, or of a version whose environments are something else.
    """

    def __init__(self, environment: Any, time_limit: float = 120.0) -> None:
        _client_class()
        if not hasattr(environment, "rollout") or not hasattr(environment, "rubric"):
            raise ConfigError(
                f"VerifiersDriver got a {type(environment).__name__}; allowed: an environment of verifiers, "
                "such as verifiers.load_environment(...) returns"
            )
        self.environment, self.time_limit = environment, time_limit
        self.uses_tools = bool(getattr(environment, "tool_defs", None))

    async def drive(self, row: dict[str, Any], chat: Chat) -> dict[str, Any]:
        environment = self.environment
        given = {"example_id": 0, **{key: value for key, value in row.items() if value is not None}}
        state = await environment.rollout(given, _client_class()(chat), "policy", {})
        if state.get("error") is not None:
            raise state["error"]
        await environment.rubric.score_rollout(state)
        return {"verifiers_reward": state["reward"], "verifiers_metrics": dict(state.get("metrics") or {})}

    def rewards(self) -> list[Callable[..., Any]]:
        return [rubric_reward]


def rubric_reward(
    verifiers_reward: list[float | None], verifiers_metrics: list[Any], log_metric: Any, **_: Any
) -> list[float | None]:
    """What the environment's rubric gave; its single functions become metrics."""
    for name in dict.fromkeys(name for metrics in verifiers_metrics for name in metrics or ()):
        values = [metrics[name] for metrics in verifiers_metrics if metrics and name in metrics]
        log_metric(f"verifiers/{name}", sum(values) / len(values))
    return verifiers_reward


def _installed() -> str:
    try:
        return f"verifiers {importlib.metadata.version('verifiers')} is installed"
    except importlib.metadata.PackageNotFoundError:
        return "none is installed"


@functools.cache
def _client_class() -> type:
    """A client of verifiers that asks the policy. Made here, because its base class is in the library."""
    try:
        names = ("verifiers.clients", "verifiers.types", "verifiers.errors")
        clients, types, errors = map(importlib.import_module, names)
    except ImportError as missing:
        raise ConfigError(
            f"VerifiersDriver takes environments of verifiers 0.1.12 to 0.2.x, and {_installed()} (later "
            f"versions replaced them; pip install 'groupwise[verifiers]'): {missing}"
        ) from missing

    class PolicyClient(clients.Client):  # type: ignore[name-defined]
        """Its ``client`` is the function that asks the policy for a turn."""

        def setup_client(self, config: Any) -> Any:
            raise NotImplementedError("the policy needs no configuration of a client")

        async def to_native_tool(self, tool: Any) -> dict[str, Any]:
            described = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            return {"type": "function", "function": described}

        async def to_native_prompt(self, messages: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            return as_chat([message.model_dump(exclude_none=True) for message in messages]), {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Reply:
            try:
                return await self.client(prompt, tools or [])
            except OutOfRoomError as full:
                raise errors.OverlongPromptError("the completion has reached max_completion_length") from full

        async def raise_from_native_response(self, response: Reply) -> None: ...

        async def from_native_response(self, response: Reply) -> Any:
            message = response.message
            calls = [
                types.ToolCall(
                    id=f"call-{uuid.uuid4().hex[:12]}",
                    name=call["function"]["name"],
                    arguments=json.dumps(call["function"]["arguments"]),
                )
                for call in message.get("tool_calls", [])
            ]
            reason = "length" if response.truncated else "tool_calls" if calls else "stop"
            return types.Response(
                id=uuid.uuid4().hex,
                created=int(time.time()),
                model="policy",
                message=types.ResponseMessage(
                    content=message["content"],
                    tool_calls=calls or None,
                    finish_reason=reason,
                    is_truncated=response.truncated,
                ),
            )

        async def close(self) -> None: ...

    return PolicyClient


def as_chat(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of verifiers as chat templates read them: calls with parsed arguments, tools by name."""
    names: dict[str, str] = {}
    chat = []
    for message in messages:
        kept = {"role": message["role"], "content": _text(message.get("content"))}
        if message.get("tool_calls"):
            names.update({call["id"]: call["name"] for call in message["tool_calls"]})
            kept["tool_calls"] = [
                {"type": "function", "function": {"name": c["name"], "arguments": json.loads(c["arguments"])}}
                for c in message["tool_calls"]
            ]
        if message["role"] == "tool":
            kept["name"] = names.get(message.get("tool_call_id", ""), "unknown")
        chat.append(kept)
    return chat


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text", "") for part in content)
