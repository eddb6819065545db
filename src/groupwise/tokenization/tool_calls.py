"""Parse a turn of the policy to an assistant message and its tool calls."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from groupwise.errors import ConfigError
from groupwise.tokenization.prompts import Message
from groupwise.tokenization.text import replace_surrogates, response_attribute

#: JSON schema of a tool: ``{"type": "function", "function": {"name": ..., "parameters": ...}}``.
ToolSchema = dict[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool.

    Attributes:
        name: name of the tool; "unknown" if the policy gave none.
        error: reason why the call is invalid, which becomes its result; None for a valid call.
    """

    name: str
    arguments: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True)
class ParsedTurn:
    """A turn of the policy: its message as chat templates expect it, and its tool calls in order."""

    message: Message
    tool_calls: list[ToolCall]


# The policy writes these texts: every pattern below takes time linear in their length.

_FUNCTION = re.compile(r"([^>\n]{1,200})>")
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,200})>")
_NAME = re.compile(r"[\w.-]+")
_CALL = re.compile(r"[\s,]*([\w.-]{1,200})\(")
_KEYWORD = re.compile(r"[\s,]*(\w{1,200})\s?=\s?")
_BARE = re.compile(r'\{\s*"(?:type"\s*:\s*"function"\s*,\s*")?name"\s*:')
_CONSTANTS = {"true": True, "false": False, "null": None, "None": None}
_TYPES = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}

#: Marks of the thoughts of a turn, by a string that chat templates with these marks contain.
_THOUGHT_MARKS = {
    "<|channel|>": ("<|channel|>analysis<|message|>", "<|end|>"),
    "<|channel>": ("<|channel>thought\n", "<channel|>"),
    "<think>": ("<think>", "</think>"),
    "<tool_call>": ("<think>", "</think>"),  # models of these families are trained to think, too
}

#: Strings that chat templates contain in which thoughts are the key "thinking", not "reasoning_content".
_THINKING = ("<|channel|>", "<|tool_call_start|>")

#: Prompt tokens that are searched for an opening mark, with which some templates begin a turn.
_MARK_TOKENS = 16

#: A call: the tool's name and its arguments, as JSON or one text each; or None, and a JSON object with both.
_Call = tuple[str | None, str | dict[str, str]]

#: Returns the text before the first call, and the calls.
_Match = Callable[[str], tuple[str, list[_Call]]]


def _blocks(start: str, end: str, parse: Callable[[str], list[_Call]]) -> _Match:
    """Return a function that finds blocks from ``start`` to ``end``, and the calls in them by ``parse``.

    A block without ``end`` extends to the next ``start``, or to the end of the text.
    """

    def match(text: str) -> tuple[str, list[_Call]]:
        before, *blocks = text.split(start)
        return before, [call for each in blocks for call in parse(each.partition(end)[0].strip())]

    return match


#: Matches ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Qwen, SmolLM3, Hermes).
_match_objects = _blocks("<tool_call>", "</tool_call>", lambda block: [(None, block)])


def _parameter_tags(block: str) -> list[_Call]:
    """Parse ``name><parameter=key>value</parameter>...`` (Qwen3.5 and later).

    A value is without a line break at either end.
    """
    name = _FUNCTION.match(block)
    if name is None:
        return []
    values: dict[str, str] = {}
    end = name.end()
    while end >= 0 and (opening := _PARAMETER.search(block, end)) is not None:
        end = block.find("</parameter>", opening.end())
        if end >= 0:
            values[opening[1]] = block[opening.end() : end].removeprefix("\n").removesuffix("\n")
    return [(name[1], values)]


def _match_functions(text: str) -> tuple[str, list[_Call]]:
    """Match ``<tool_call><function=...></function></tool_call>``; the outer tags may be missing."""
    _, calls = _blocks("<function=", "</function>", _parameter_tags)(text)
    return (text.partition("<tool_call>")[0], calls) if calls else _match_objects(text)


def _argument_tags(block: str) -> list[_Call]:
    """Parse ``name<arg_key>key</arg_key><arg_value>value</arg_value>...`` (GLM-4.5)."""
    name, *parts = block.split("<arg_key>")
    name = name.strip()
    if not parts and name.startswith("{"):
        return [(None, block)]
    values = {}
    for part in parts:
        key, _, rest = part.partition("</arg_key>")
        value = rest.partition("<arg_value>")[2].partition("</arg_value>")[0]
        values[key.strip()] = value
    return [(name, values)]


def _braces(block: str) -> list[_Call]:
    """Parse ``call:name{key:<|"|>text<|"|>,other:3}`` (Gemma 4)."""
    name = _NAME.match(block.removeprefix("call:"))
    if name is None or not block.startswith("call:"):
        return []
    parts = block[len("call:") + name.end() :].split('<|"|>')  # every second part is a string
    parts[::2] = [re.sub(r"(?<![\w-])([\w-]+)\s*:", r'"\1":', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return [(name[0], "".join(parts))]


def _match_bare_object(text: str) -> tuple[str, list[_Call]]:
    """Match a turn that is one JSON object with ``name`` and ``parameters`` (Llama 3)."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    return ("", [(None, body)]) if _BARE.match(body) else (text, [])


def _match_channels(text: str) -> tuple[str, list[_Call]]:
    """Match ``to=functions.name<|channel|>commentary json<|message|>{...}``, in either order (GPT-OSS)."""
    name = re.search(r"to=functions\.([\w.-]+)", text)
    if name is not None:
        return "", [(name[1], text[name.end() :].rpartition("<|message|>")[2])]
    final = text.rpartition("<|channel|>final<|message|>")
    return (final[2] if final[1] else text), []


def _python_calls(block: str) -> list[_Call]:
    """Parse ``[name(key='text', other=3)]`` (LFM2.5).

    Text is between single quotes and not escaped: it ends at a quote before a comma or a parenthesis.
    """
    if block.startswith("{"):  # JSON, which LFM2.5 writes if it is asked to
        return [(None, block)]
    calls: list[_Call] = []
    position = 1  # after the bracket
    while (name := _CALL.match(block, position)) is not None:
        values: dict[str, object] = {}
        position = name.end()
        while (key := _KEYWORD.match(block, position)) is not None:
            end = _end_of_value(block, key.end())
            values[key[1]] = _literal(block[key.end() : end].strip())
            position = end
        if not block.startswith(")", position):
            calls.append((name[1], block[name.end() :]))  # not JSON: an error
            break
        calls.append((name[1], json.dumps(values)))
        position += 1
    return calls or [(None, block)]


def _end_of_value(body: str, start: int) -> int:
    """Return the position after the value of an argument: of a comma or a parenthesis outside it."""
    if body.startswith(("'", '"'), start):
        quote = re.compile(body[start] + r"(?=[,)])").search(body, start + 1)
        return len(body) if quote is None else quote.end()
    depth, quoted = 0, ""
    for position in range(start, len(body)):
        letter = body[position]
        if quoted:
            quoted = "" if letter == quoted else quoted
        elif letter in "'\"":
            quoted = letter
        elif letter in "[{(":
            depth += 1
        elif letter in ",)" and depth == 0:
            return position
        elif letter in "]})":
            depth -= 1
    return len(body)


def _literal(text: str) -> object:
    """Parse JSON or a Python literal, constants also as TRUE or False; the text if it is neither.

    A text between quotes is taken as it is, without escapes.
    """
    if len(text) >= 2 and text[0] in "'\"" and text[-1] == text[0]:
        return text[1:-1]
    for word in (text, text.lower()):
        if word in _CONSTANTS:
            return _CONSTANTS[word]
    for parse in (json.loads, ast.literal_eval):
        if text[:1].isalpha():
            break
        try:
            value = parse(text)
            json.dumps(value)  # arguments are JSON: no sets, bytes or complex numbers
            return value
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return text


def _typed(text: str, types: set[str], *, is_text: bool) -> object:
    """Return the value that an argument's text stands for; the text if it is of none of the schema's types.

    Args:
        is_text: the format writes all arguments as text, so that a type besides ``string`` is looked for.
    """
    if types <= {"string"} or ("string" in types and not is_text):
        return text
    value = _literal(text.strip())
    kind = _TYPES.get(type(value))  # None: a string
    if "string" in types and kind not in types and not (kind == "integer" and "number" in types):
        return text
    return text if kind is None else value  # of a wrong type: the tool reports it


def _types(schema: object, definitions: Mapping[str, Any]) -> set[str]:
    """Return the types that a JSON schema allows; none if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    types = schema.get("type") or ()
    own = {types} if isinstance(types, str) else set(types)
    referred = definitions.get(str(schema.get("$ref")).rpartition("/")[2])
    choices = (referred, *schema.get("anyOf", ()), *schema.get("oneOf", ()))
    nullable = {"null"} if schema.get("nullable") else set()  # how transformers describes Optional
    return own.union(nullable, *(_types(each, definitions) for each in choices))


#: Tool-call format by a string that chat templates with this format contain; the first match is used.
TOOL_CALL_FORMATS: dict[str, _Match] = {
    "<function=": _match_functions,
    "<arg_key>": _blocks("<tool_call>", "</tool_call>", _argument_tags),
    "<|tool_call_start|>": _blocks("<|tool_call_start|>", "<|tool_call_end|>", _python_calls),
    "<tool_call>": _match_objects,
    "<|tool_call>": _blocks("<|tool_call>", "<tool_call|>", _braces),
    "<|channel|>": _match_channels,
    "<|python_tag|>": _match_bare_object,
    "ipython": _match_bare_object,
}


def split_thoughts(text: str, marks: tuple[str, str], *, opened: bool = False) -> tuple[str, str]:
    """Return the thoughts of a turn and the text without them.

    Thoughts without a closing mark extend to the end. If no text follows them, the text before them is
    returned.

    Args:
        marks: opening and closing mark.
        opened: the prompt ends with the opening mark.
    """
    opening, closing = marks
    before, mark, rest = ("", opening, text) if opened else text.partition(opening)
    if not mark:
        return "", text
    thoughts, _, after = rest.partition(closing)
    return thoughts.strip(), after if after.strip() else before


class TurnParser:
    """Parse the tokens of a turn, with the tokenizer's response template or in the chat template's format.

    Thoughts become the key ``reasoning_content`` (``thinking`` for GPT-OSS and LFM2.5) of the message.

    Args:
        tokenizer: its ``parse_response`` is used if it has a ``response_template`` (``response_schema`` in
            older versions of transformers).
        chat_template: source of the template of the prompts; selects one of :data:`TOOL_CALL_FORMATS`.
        end_tokens: token ids that end a turn.
        with_tools: prompts contain tool schemas. Without, turns in an unknown format are plain text.

    Raises:
        ConfigError: there are tools, but the format of tool calls is unknown.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str,
        end_tokens: Collection[int] = (),
        *,
        with_tools: bool = True,
    ) -> None:
        self.tokenizer, self.end_tokens = tokenizer, end_tokens
        self.response_attribute = response_attribute(tokenizer)
        self.match = next(
            (match for marker, match in TOOL_CALL_FORMATS.items() if marker in chat_template), None
        )
        self.thought_marks = next(
            (marks for marker, marks in _THOUGHT_MARKS.items() if marker in chat_template), None
        )
        has_thinking = any(marker in chat_template for marker in _THINKING)
        self.thoughts_key = "thinking" if has_thinking else "reasoning_content"
        if with_tools and self.response_attribute is None and self.match is None:
            raise ConfigError(
                "the format of tool calls cannot be derived from the chat template; known are "
                f"{', '.join(map(repr, TOOL_CALL_FORMATS))}; set tokenizer.response_template (see 'response "
                "parsing' in the documentation of transformers)"
            )

    @property
    def reads_context(self) -> bool:
        """True if the content of a turn includes the beginning of the turn in the prompt."""
        return self.response_attribute == "response_template"

    def __call__(
        self, context_ids: Sequence[int], token_ids: Sequence[int], schemas: Sequence[ToolSchema]
    ) -> ParsedTurn:
        """Parse the turn ``token_ids``, sampled after ``context_ids``.

        Returns:
            The turn; a malformed tool call is returned with its ``error``.
        """
        try:
            if self.response_attribute is None:
                return self._parse_format(context_ids, token_ids, schemas)
            return self._parse_response(context_ids, token_ids, schemas)
        except Exception as problem:  # any: the policy can write anything, such as deeply nested JSON
            call = ToolCall("unknown", {}, f"the tool call cannot be parsed: {problem}")
            return self._text_turn(token_ids, [call])

    def _parse_response(
        self, context_ids: Sequence[int], token_ids: Sequence[int], schemas: Sequence[ToolSchema]
    ) -> ParsedTurn:
        kwargs: dict[str, Any] = {}
        if self.reads_context:
            kwargs = {"prefix": list(context_ids), "tools": list(schemas)}
        parsed = cast(dict[str, Any], self.tokenizer.parse_response(list(token_ids), **kwargs) or {})
        parsed = replace_surrogates(parsed)
        if not parsed:
            return self._text_turn(token_ids, [])
        entries = parsed.get("tool_calls") or []
        calls = [_to_tool_call(entry.get("function", entry), schemas) for entry in entries]
        content = parsed.get("content") or ""
        if isinstance(content, str):  # some templates leave the end token in it
            content = content.removesuffix(cast(str, self.tokenizer.eos_token or ""))
        return ParsedTurn(_message(content, calls, parsed), calls)

    def _parse_format(
        self, context_ids: Sequence[int], token_ids: Sequence[int], schemas: Sequence[ToolSchema]
    ) -> ParsedTurn:
        # Special tokens are kept, because they may delimit tool calls; only the one that ended the turn is
        # removed.
        has_end = len(token_ids) > 0 and token_ids[-1] in self.end_tokens
        text = cast(str, self.tokenizer.decode(list(token_ids[:-1] if has_end else token_ids)))
        if self.match is None:
            return self._text_turn(token_ids, [])
        thoughts, rest = self._split_thoughts(context_ids, text)
        before, matches = self.match(rest)
        calls = [_parse_call(name, body, schemas) for name, body in matches]
        if any(call.error is not None for call in calls):
            return self._text_turn(token_ids, calls)
        if before == text:  # nothing was split from it: without the special tokens
            before = cast(str, self.tokenizer.decode(list(token_ids), skip_special_tokens=True))
        return ParsedTurn(_message(before.strip(), calls, {self.thoughts_key: thoughts}), calls)

    def _split_thoughts(self, context_ids: Sequence[int], text: str) -> tuple[str, str]:
        assert self.match is not None
        if self.thought_marks is None:
            return "", text
        opening = self.thought_marks[0]
        context = cast(str, self.tokenizer.decode(list(context_ids[-_MARK_TOKENS:])))
        opened = context.rstrip().endswith(opening.rstrip())
        if not opened and self.match(text.partition(opening)[0])[1]:
            return "", text  # the mark is part of a tool call
        return split_thoughts(text, self.thought_marks, opened=opened)

    def _text_turn(self, token_ids: Sequence[int], calls: list[ToolCall]) -> ParsedTurn:
        """Return a turn whose text is its content: without calls, or with malformed ones."""
        content = cast(str, self.tokenizer.decode(list(token_ids), skip_special_tokens=True))
        return ParsedTurn(_message(content, [], {}), calls)


def _message(content: str, calls: list[ToolCall], parsed: Mapping[str, Any]) -> Message:
    message: Message = {"role": "assistant", "content": content}
    message.update({key: parsed[key] for key in ("reasoning_content", "thinking") if parsed.get(key)})
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def _parse_call(name: str | None, body: str | dict[str, str], schemas: Sequence[ToolSchema]) -> ToolCall:
    try:
        value = replace_surrogates(json.loads(body) if isinstance(body, str) else body)
    except (ValueError, RecursionError) as problem:
        return ToolCall(name or "unknown", {}, f"the tool call is not valid JSON: {problem}")
    call = value if name is None else {"name": name, "arguments": value}
    return _to_tool_call(call, schemas, is_text=not isinstance(body, str))


def _to_tool_call(value: object, schemas: Sequence[ToolSchema], *, is_text: bool = False) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall(
            "unknown", {}, "the tool call is not an object with the name of a tool and its arguments"
        )
    name, arguments = value["name"], value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = replace_surrogates(json.loads(arguments))
        except (ValueError, RecursionError) as problem:
            return ToolCall(name, {}, f"the arguments are not valid JSON: {problem}")
    if arguments is not None and not isinstance(arguments, dict):
        return ToolCall(name, {}, "the arguments are not an object")
    known = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in schemas}
    arguments, schema = arguments or {}, known.get(name, {})
    for key, each in schema.get("properties", {}).items():
        if isinstance(arguments.get(key), str):
            types = _types(each, schema.get("$defs", {}))
            arguments[key] = _typed(arguments[key], types, is_text=is_text)
    return ToolCall(name, arguments)
