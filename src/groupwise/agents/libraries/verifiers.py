"""Adapter for environments of the ``verifiers`` library (0.1.12 to 0.3), which run rollouts themselves."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from datasets import Dataset

from groupwise.agents import ChatFunction, ChatResponse, MaxLengthReachedError
from groupwise.errors import ConfigError
from groupwise.tokenization.prompts import Message
from groupwise.tokenization.text import message_text
from groupwise.tokenization.tool_calls import ToolSchema

_COLUMNS = ("prompt", "example_id", "answer", "info", "task")


class _VerifiersEnvironment(Protocol):
    rubric: Any

    def get_dataset(self) -> Dataset: ...
    async def rollout(self, *arguments: object) -> Any: ...


def verifiers_dataset(environment: _VerifiersEnvironment) -> Dataset:
    """Return the environment's training rows, with the columns that its rollouts and rubric need."""
    rows = environment.get_dataset()
    return rows.select_columns([column for column in _COLUMNS if column in rows.column_names])


class VerifiersEnvironment:
    """Run rollouts of a ``verifiers`` environment with the policy as its client; the rubric is the reward.

    The environment builds the messages, calls its tools and ends the rollout. Rubrics that compare the
    rollouts of a group are not supported; use a reward function.

    Args:
        environment: environment from ``verifiers.load_environment``, or created in code.
        time_limit: maximum time in seconds between two turns of the policy.

    Raises:
        ConfigError: verifiers is missing or has an unsupported version, or ``environment`` is something else.
    """

    def __init__(self, environment: _VerifiersEnvironment, time_limit: float = 120.0) -> None:
        _client_class()
        if not hasattr(environment, "rollout") or not hasattr(environment, "rubric"):
            raise ConfigError(
                f"VerifiersEnvironment got a {type(environment).__name__}; allowed: an environment of "
                "verifiers, such as verifiers.load_environment(...) returns"
            )
        self.environment, self.time_limit = environment, time_limit
        self.uses_tools = bool(getattr(environment, "tool_defs", None))

    async def run_rollout(self, row: dict[str, Any], chat: ChatFunction) -> dict[str, Any]:
        environment = self.environment
        task = {"example_id": 0, **{key: value for key, value in row.items() if value is not None}}
        state = await environment.rollout(task, _client_class()(chat), "policy", {})
        if state.get("error") is not None:
            raise state["error"]
        await environment.rubric.score_rollout(state)
        return {"verifiers_reward": state["reward"], "verifiers_metrics": dict(state.get("metrics") or {})}

    def reward_funcs(self) -> list[Callable[..., Any]]:
        return [rubric_reward]


def rubric_reward(
    verifiers_reward: list[float | None],
    verifiers_metrics: list[dict[str, float] | None],
    log_metric: Callable[[str, float], None],
    **_: object,
) -> list[float | None]:
    """Return the rubric's reward; its single functions are logged as metrics ``verifiers/<name>``."""
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
    """Return the client class; defined here because its base class is imported with verifiers."""
    try:
        names = ("verifiers.clients", "verifiers.types", "verifiers.errors")
        clients, types, errors = map(importlib.import_module, names)
    except ImportError as missing:
        raise ConfigError(
            f"VerifiersEnvironment takes environments of verifiers 0.1.12 to 0.3.x, and {_installed()} "
            f"(0.4 removed them; pip install 'groupwise[verifiers]'): {missing}"
        ) from missing

    class PolicyClient(clients.Client):  # type: ignore[name-defined]
        """A verifiers client whose ``client`` is the chat function of the policy."""

        def setup_client(self, config: object) -> object:
            raise NotImplementedError("the policy needs no configuration of a client")

        async def to_native_tool(self, tool: Any) -> ToolSchema:
            function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            return {"type": "function", "function": function}

        async def to_native_prompt(self, messages: Sequence[Any]) -> tuple[list[Message], dict[str, Any]]:
            return to_chat_messages([message.model_dump(exclude_none=True) for message in messages]), {}

        async def get_native_response(
            self,
            prompt: list[Message],
            model: str,
            sampling_args: object,
            tools: list[ToolSchema] | None = None,
            **_: object,
        ) -> ChatResponse:
            try:
                return await self.client(prompt, tools or [])
            except MaxLengthReachedError as reached:
                raise errors.OverlongPromptError(
                    "the completion has reached max_completion_length"
                ) from reached

        async def raise_from_native_response(self, response: ChatResponse) -> None: ...

        async def from_native_response(self, response: ChatResponse) -> object:
            return _to_response(types, response)

        async def close(self) -> None: ...

    return PolicyClient


def _to_response(types: ModuleType, response: ChatResponse) -> object:
    """Convert a turn of the policy to the ``Response`` of verifiers."""
    calls = [
        types.ToolCall(
            id=f"call-{uuid.uuid4().hex[:12]}",
            name=call["function"]["name"],
            arguments=json.dumps(call["function"]["arguments"]),
        )
        for call in response.message.get("tool_calls", [])
    ]
    return types.Response(
        id=uuid.uuid4().hex,
        created=int(time.time()),
        model="policy",
        message=types.ResponseMessage(
            content=response.message["content"],
            tool_calls=calls or None,
            finish_reason="length" if response.truncated else "tool_calls" if calls else "stop",
            is_truncated=response.truncated,
        ),
    )


def to_chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Convert messages of verifiers for chat templates: parsed arguments, and tools by name."""
    names: dict[str, str] = {}
    chat = []
    for message in messages:
        converted: Message = {"role": message["role"], "content": message_text(message)}
        if message.get("tool_calls"):
            names.update({call["id"]: call["name"] for call in message["tool_calls"]})
            converted["tool_calls"] = [
                {"type": "function", "function": {"name": c["name"], "arguments": json.loads(c["arguments"])}}
                for c in message["tool_calls"]
            ]
        if message["role"] == "tool":
            converted["name"] = names.get(message.get("tool_call_id", ""), "unknown")
        chat.append(converted)
    return chat
