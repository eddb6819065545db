"""Tools that the policy may call: their schemas, markers and results."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers.utils import get_json_schema

from groupwise.errors import AgentError, ConfigError, is_interrupt, warn_once
from groupwise.threads import Invocation
from groupwise.tokenization.images import is_image_object, load_blocks
from groupwise.tokenization.text import is_content_blocks, replace_surrogates
from groupwise.tokenization.tool_calls import ToolCall, ToolSchema

logger = logging.getLogger(__name__)

#: Content of a message: text, content blocks, or another list that a tool returned.
Content = str | list[Any]

F = TypeVar("F", bound=Callable[..., object])

_PATHS_NAME = "allow_image_paths"


def allow_image_paths(function: F) -> F:
    """Decorate a tool or ``reset`` whose image blocks may name local files and URLs, which the trainer opens.

    Without it only image objects (PIL, arrays, tensors, bytes) are images: a function that returns JSON from
    elsewhere cannot make the trainer read a file or fetch an address.
    """
    setattr(function, _PATHS_NAME, True)
    return function


def may_open_images(content: Sequence[Mapping[str, Any]], function: Callable[..., Any]) -> bool:
    """Return True if all images in the content blocks that a function returned may be opened."""
    return getattr(function, _PATHS_NAME, False) or all(map(is_image_object, content))


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call.

    Attributes:
        schema: JSON schema for the prompt.
        owner: environment whose method the function is; calls of one owner are sequential.
    """

    name: str
    function: Callable[..., Any]
    schema: ToolSchema
    owner: object = None


@dataclass(frozen=True)
class ToolResult:
    """Result of a call.

    Attributes:
        content: content of the tool message.
        failure: type and message of the error; empty for a successful call.
    """

    content: Content
    failure: str = ""


def make_tool(function: Callable[..., Any], owner: object = None) -> Tool:
    """Create a tool from a function's type hints and Google-style docstring, or from its ``json_schema``.

    Raises:
        ConfigError: ``function`` is not a function, or it lacks type hints or a docstring.
    """
    name = getattr(function, "__name__", None)
    if not callable(function) or name is None:
        raise ConfigError(
            f"tools holds {function!r} ({type(function).__name__}); allowed: functions and methods"
        )
    try:
        schema = getattr(function, "json_schema", None)  # set by adapters
        return Tool(name, function, schema or get_json_schema(function), owner)
    except Exception as problem:  # own exceptions, and anything that evaluating annotations raises
        kind = f"method of {type(owner).__name__}" if owner is not None else "tool"
        raise ConfigError(
            f"{kind} {name!r} cannot be described to the model: {problem}; it needs type hints for every "
            "argument and a Google-style docstring with an 'Args:' section"
        ) from problem


def check_names(tools: Sequence[Tool]) -> None:
    """Raise ConfigError if two tools of a rollout have the same name."""
    names = [tool.name for tool in tools]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError(
            f"several tools are called {', '.join(map(repr, repeated))}; give each its own name"
        )


class InvalidCallError(ValueError):
    """The policy's tool call is malformed, or names no tool."""


def invocation(call: ToolCall, tools: Mapping[str, Tool]) -> Invocation | Future[Any]:
    """Return the invocation of a tool call, or the failed future of an invalid one."""
    tool = tools.get(call.name)
    if call.error is None and tool is not None:
        return Invocation(functools.partial(tool.function, **call.arguments), tool.owner)
    failed: Future[Any] = Future()
    unknown = f"Tool {call.name} not found. Available: {', '.join(tools) or 'none'}."
    failed.set_exception(InvalidCallError(call.error or unknown))
    return failed


def tool_result(
    call: ToolCall, tools: Mapping[str, Tool], future: Future[Any], *, images: bool
) -> ToolResult:
    """Convert what a tool returned or raised to the content of a tool message.

    A list stays a list, so that reward functions receive the tool's values; others become text. An error
    becomes the result, so that the policy can react to it.

    Args:
        future: the finished call that :func:`invocation` returned.
        images: the model reads images.

    Raises:
        AgentError: the tool raised it: not the call but the environment has failed.
    """
    try:
        value = future.result()
        if not isinstance(value, list):
            return ToolResult(replace_surrogates(str(value)))
        content = replace_surrogates(list(value))
        if not is_content_blocks(content) or all(block["type"] == "text" for block in content):
            return ToolResult(content)
        if not images:
            raise TypeError("the tool returned an image, but the model reads text only")
        if not may_open_images(content, tools[call.name].function):
            warn_once(
                logger,
                "tool %r returned an image block with a path or a URL, which is not opened: the policy sees "
                "it as text; return an image object, or decorate the tool with "
                "groupwise.agents.allow_image_paths if its results can be trusted with the trainer's files",
                call.name,
            )
            return ToolResult(str(content))
        return ToolResult(load_blocks(content))
    except AgentError:  # the tool fails the whole rollout
        raise
    except BaseException as problem:  # str() of a result or of an error is code of the user, too
        if is_interrupt(problem):
            raise
        return failed_result(problem)


def failed_result(problem: BaseException) -> ToolResult:
    """Return the result of a call that raised ``problem``."""
    try:
        message = str(problem)
    except Exception:
        message = ""
    kind = type(problem).__name__
    text = message if message and isinstance(problem, Exception) else f"{kind}: {message}".removesuffix(": ")
    return ToolResult(replace_surrogates(str({"error": text})), f"{kind}: {message}")
