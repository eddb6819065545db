"""Whether a chat template can be used for several turns, and what stands in for one that cannot.

Tokens are appended to what was sampled, so a template has to write the messages so far in the same way
whatever follows them ("prefix-preserving"). A stand-in is a chat template for the turns after the prompt: the
prompt is always written by the model's own template, which it was trained with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from groupwise.errors import ConfigError

_NAME, _KEY, _VALUE, _RESULT = "probe_tool", "probe_key", "probe_value", "probe result"
_SCHEMA = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "Anything."}},
            "required": [_KEY],
        },
    },
}


def assistant(names: list[str], content: str = "", **arguments: Any) -> dict[str, Any]:
    """An assistant message that calls tools by these names."""
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name in names]
    return {"role": "assistant", "content": content, "tool_calls": calls}


_TALK = [
    {"role": "user", "content": "probe question"},
    {"role": "assistant", "content": "probe answer"},
    {"role": "user", "content": "probe question"},
    {"role": "assistant", "content": "probe answer"},
]
_CONVERSATION = [
    {"role": "user", "content": "probe question"},
    assistant([_NAME], "", **{_KEY: _VALUE}),
    {"role": "tool", "name": _NAME, "content": _RESULT},
    assistant([_NAME], "", **{_KEY: _VALUE}),
    {"role": "tool", "name": _NAME, "content": _RESULT},
]


@dataclass(frozen=True)
class Family:
    """Models whose chat templates are alike.

    name: of the models.
    markers: what all of their templates hold.
    turns: the stand-in for the turns after the prompt; its ``opening`` is what the model's own template
        writes for a turn of the policy to begin.
    tools_argument: how the template calls the list of tools.
    """

    name: str
    markers: tuple[str, ...]
    turns: str
    tools_argument: str = "tools"


_CHATML = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '' if loop.first and not message.content else '\\n' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
RESULT
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{{- opening if add_generation_prompt }}"""

# Qwen puts the results of one turn into one message of the user, in tags.
_QWEN_RESULT = """\
{{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}"""

_SMOLLM3_RESULT = "{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}"

_LLAMA = """\
{%- for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
{%- elif message.role == 'tool' %}
{{- message.content | tojson }}
{%- else %}
{{- message.content | trim }}
{%- endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{{- opening if add_generation_prompt }}"""

_HARMONY = """\
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start|>functions.' + message.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson + '<|end|>' }}
{%- elif message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{{- opening if add_generation_prompt }}"""

FAMILIES = (
    Family("SmolLM3", ("<|im_start|>", "xml_tools"), _CHATML.replace("RESULT", _SMOLLM3_RESULT), "xml_tools"),
    Family("Qwen", ("<|im_start|>", "<tool_call>"), _CHATML.replace("RESULT", _QWEN_RESULT)),
    Family("Llama 3", ("<|start_header_id|>", "ipython"), _LLAMA),
    Family("GPT-OSS", ("<|start|>", "<|channel|>"), _HARMONY),
)


@dataclass(frozen=True)
class TurnTemplate:
    """How the turns after the prompt are written.

    template: a chat template, or None for the model's own.
    tools_argument: how the model's own template calls the list of tools.
    opening: what begins a turn of the policy.
    """

    template: str | None = None
    tools_argument: str = "tools"
    opening: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of ``apply_chat_template`` that it needs."""
        return {} if self.template is None else {"chat_template": self.template, "opening": self.opening}


#: (messages, settings of apply_chat_template) -> text
Render = Callable[..., str]


def choose_turn_template(
    render: Render, chat_template: str | None, *, shows_tools: bool = True
) -> TurnTemplate:
    """The model's own template if it can be used for several turns, else the stand-in of its family.

    Args:
        render: renders messages to text, with the model's own template or the ``chat_template`` given.
        shows_tools: whether there are tools to show in the prompt.

    Raises:
        ConfigError: there is no template, it hides the tools from the model, or it cannot be used for several
            turns and belongs to no family with a stand-in.
    """
    if chat_template is None:
        raise ConfigError("tools and environments need a tokenizer with a chat template; this one has none")
    family = next((f for f in FAMILIES if all(marker in chat_template for marker in f.markers)), None)
    argument = "tools" if family is None else family.tools_argument
    question = _CONVERSATION[:1]
    if shows_tools and _NAME not in (render(question, **{argument: [_SCHEMA]}) or ""):
        raise ConfigError(
            "the chat template does not show tools to the model (it has no place for them); set one that "
            "does as processing_class.chat_template"
        )
    problem = multi_turn_problem(render, with_tools=shows_tools)
    if problem is None:
        return TurnTemplate(None, argument)
    if (
        family is not None
        and multi_turn_problem(
            lambda m, **k: render(m, chat_template=family.turns, **k), with_tools=shows_tools
        )
        is None
    ):
        opening = render(question, add_generation_prompt=True).removeprefix(render(question))
        return TurnTemplate(family.turns, argument, opening)
    raise ConfigError(
        f"the chat template cannot be used for several turns: {problem}; stand-ins exist for "
        f"{', '.join(f.name for f in FAMILIES)}; set a template without this problem on "
        "processing_class.chat_template"
    )


def multi_turn_problem(render: Render, *, with_tools: bool = True) -> str | None:
    """Why a template cannot be used for several turns; None if it can."""
    messages = _CONVERSATION if with_tools else _TALK
    try:
        texts = [render(messages[:end]) for end in range(1, len(messages) + 1)]
    except Exception as problem:  # templates raise errors of their own, of jinja and of Python
        what = "a tool's message" if with_tools else "a second turn"
        return f"it refuses {what} ({type(problem).__name__}: {problem})"
    shown = (_NAME, _VALUE, _RESULT) if with_tools else ()  # some formats give arguments by position
    missing = [part for part in shown if part not in texts[-1]]
    if missing:
        return f"it leaves out parts of tool calls or results ({', '.join(missing)})"
    roles = [message["role"] for message in messages]
    for (text, longer), (role, next_role) in zip(pairwise(texts), pairwise(roles), strict=True):
        if not longer.startswith(text):
            return f"it writes the {role} message in another way once a {next_role} message follows"
    return None
