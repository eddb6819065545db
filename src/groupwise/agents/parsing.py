"""What a policy wrote in a turn: a message, and the tools it calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.errors import ConfigError


@dataclass(frozen=True)
class Call:
    """One call of a tool.

    name: of the tool, "unknown" where the policy gave none.
    arguments: by name.
    error: why the call cannot be made; None if it can.
    """

    name: str
    arguments: dict[str, Any]
    error: str | None = None


#: What ends a turn in the formats below.
_END = re.compile(r"((<\|(im_end|eot_id|eom_id|call|return|end)\|>|<turn\|>|<\|tool_response>)\s*)+$")


@dataclass(frozen=True)
class Turn:
    """An assistant message in the form that chat templates read, and its calls in order."""

    message: dict[str, Any]
    calls: list[Call]


#: (text before the first call, one JSON value or text per call, whose key of arguments is the second)
_Found = tuple[str, list[tuple[str | None, str]]]


def _tagged(text: str, _schemas: list[Any]) -> _Found:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Qwen, SmolLM3, Hermes."""
    blocks = re.findall(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|$)", text, flags=re.DOTALL)
    return text.partition("<tool_call>")[0], [(None, block.strip()) for block in blocks]


def _bare(text: str, _schemas: list[Any]) -> _Found:
    """A turn that is one JSON object with a name and ``parameters``: Llama 3."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    called = re.match(r'\{\s*"(?:type"\s*:\s*"function"\s*,\s*")?name"\s*:', body)
    return ("", [(None, body)]) if called else (text, [])


def _harmony(text: str, _schemas: list[Any]) -> _Found:
    """``to=functions.name<|channel|>commentary json<|message|>{...}``, in either order: GPT-OSS."""
    name = re.search(r"to=functions\.([\w.-]+)", text)
    if name is None:
        final = text.rpartition("<|channel|>final<|message|>")
        return (final[2] if final[1] else text), []
    thought = re.search(r"<\|channel\|>analysis<\|message\|>(.*?)<\|end\|>", text, flags=re.DOTALL)
    return thought[1] if thought else "", [(name[1], text[name.end() :].rpartition("<|message|>")[2])]


def _parameters(text: str, schemas: list[Any]) -> _Found:
    """``<tool_call><function=name><parameter=key>value</parameter>...``: Qwen3.5 and later.

    A value is text, or JSON where the tool says that the parameter is something else.
    """
    properties = {
        tool["function"]["name"]: tool["function"].get("parameters", {}).get("properties", {})
        for tool in schemas
    }

    def read(name: str, key: str, value: str) -> Any:
        if properties.get(name, {}).get(key, {}).get("type", "string") == "string":
            return value
        try:
            return json.loads(value)
        except ValueError:  # the tool says what it cannot take
            return value

    calls: list[tuple[str | None, str]] = []
    for name, body in re.findall(
        r"<function=([^>\n]+)>(.*?)(?:</function>|(?=<function=)|$)", text, flags=re.DOTALL
    ):
        found = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", body, flags=re.DOTALL)
        calls.append((name, json.dumps({key: read(name, key, value) for key, value in found})))
    return (text.partition("<tool_call>")[0], calls) if calls else _tagged(text, schemas)


def _braced(text: str, _schemas: list[Any]) -> _Found:
    """``<|tool_call>call:name{key:<|"|>text<|"|>,other:3}<tool_call|>``: Gemma 4."""
    calls: list[tuple[str | None, str]] = []
    call = r"<\|tool_call>call:([\w.-]+)(.*?)(?:<tool_call\|>|$)"
    for name, body in re.findall(call, text, flags=re.DOTALL):
        parts = body.split('<|"|>')  # every other one is a string
        parts[::2] = [re.sub(r"([\w-]+)\s*:", r'"\1":', part) for part in parts[::2]]
        parts[1::2] = [json.dumps(part) for part in parts[1::2]]
        calls.append((name, "".join(parts)))
    return text.partition("<|tool_call>")[0], calls


#: What in a chat template tells how its model calls tools, and how to find those calls in a text. The first
#: that is there counts.
FORMATS: dict[str, Callable[[str, list[Any]], _Found]] = {
    "<function=": _parameters,
    "<tool_call>": _tagged,
    "<|tool_call>": _braced,
    "<|channel|>": _harmony,
    "<|python_tag|>": _bare,
    "ipython": _bare,
}


class TurnParser:
    """Tokens of a turn to a :class:`Turn`: with the tokenizer's response template, else by the chat template.

    Args:
        tokenizer: has a ``response_template`` (or ``response_schema``, as older versions of transformers call
            it) and ``parse_response``, or a chat template that :data:`FORMATS` knows.
        chat_template: the template that prompts are written with.
        needed: whether there are tools to call; else a turn in no known format is all text.

    Raises:
        ConfigError: neither tells how tools are called.
    """

    def __init__(self, tokenizer: Any, chat_template: str, *, needed: bool = True) -> None:
        self.tokenizer = tokenizer
        self.declared = next(
            (n for n in ("response_template", "response_schema") if getattr(tokenizer, n, None)), None
        )
        self.find = next((find for marker, find in FORMATS.items() if marker in chat_template), None)
        if needed and self.declared is None and self.find is None:
            raise ConfigError(
                "the chat template does not tell how the model calls tools; known are "
                f"{', '.join(map(repr, FORMATS))}; set tokenizer.response_template (see 'response parsing' "
                "in the documentation of transformers)"
            )

    def __call__(self, context: Sequence[int], tokens: Sequence[int], schemas: list[Any]) -> Turn:
        """The turn that ``tokens`` are, sampled after ``context`` with these tools in the prompt.

        A turn that tries to call a tool and fails to say how has one call with an ``error``.
        """
        if self.declared is None:
            return self._found(tokens, schemas)
        extra = {"prefix": list(context), "tools": schemas} if self.declared == "response_template" else {}
        try:
            parsed = self.tokenizer.parse_response(list(tokens), **extra) or {}
        except (ValueError, TypeError) as problem:
            return self._plain(tokens, [Call("unknown", {}, f"the tool call cannot be read: {problem}")])
        entries = parsed.get("tool_calls") or []
        if not entries:
            return self._plain(tokens, [], parsed)
        calls = [_as_call(entry.get("function", entry)) for entry in entries]
        return Turn(_message(str(parsed.get("content") or ""), calls, parsed), calls)

    def _found(self, tokens: Sequence[int], schemas: list[Any]) -> Turn:
        # The end of the turn is no part of what it says; markers of calls may be special tokens.
        text = _END.sub("", self.tokenizer.decode(tokens))
        text = text.removesuffix(self.tokenizer.eos_token or "")
        before, bodies = (text, []) if self.find is None else self.find(text, schemas)
        calls = [_read(name, body) for name, body in bodies]
        if calls and all(call.error is None for call in calls):
            return Turn(_message(before.rstrip(), calls, {}), calls)
        # Where the format sets an answer apart from what surrounds it, the answer is the content.
        return self._plain(tokens, calls, {"content": before} if not calls and before != text else None)

    def _plain(self, tokens: Sequence[int], calls: list[Call], parsed: dict[str, Any] | None = None) -> Turn:
        """A turn whose text is its content: nothing is called, or nothing that could be written as a call."""
        content = (parsed or {}).get("content")
        text = (
            content if isinstance(content, str) else self.tokenizer.decode(tokens, skip_special_tokens=True)
        )
        return Turn(_message(text, [], parsed or {}), calls)


def _message(content: str, calls: list[Call], parsed: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message.update({key: parsed[key] for key in ("reasoning_content", "thinking") if parsed.get(key)})
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def _read(name: str | None, body: str) -> Call:
    """One call from its JSON text."""
    try:
        value = json.loads(body)
    except ValueError as problem:
        return Call(name or "unknown", {}, f"the tool call is not valid JSON: {problem}")
    return _as_call(value if name is None else {"name": name, "arguments": value})


def _as_call(value: Any) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call("unknown", {}, "the tool call is not an object with the name of a tool and its arguments")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as problem:
            return Call(value["name"], {}, f"the arguments are not valid JSON: {problem}")
    if arguments is not None and not isinstance(arguments, dict):
        return Call(value["name"], {}, "the arguments are not an object")
    return Call(value["name"], arguments or {})
