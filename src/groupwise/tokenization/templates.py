"""Check chat templates for multi-turn use, and replace those that cannot be used.

Rollouts append tokens to what was sampled. That requires a chat template which is prefix-preserving: the
rendering of a conversation is a prefix of the rendering of its continuation. Other templates are replaced,
for the turns after the prompt, by one for the model family. Prompts are always rendered by the model's own
template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from groupwise.errors import ConfigError
from groupwise.tokenization.prompts import Message

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


def tool_call_message(names: Sequence[str], arguments: dict[str, str] | None = None) -> Message:
    """Return an assistant message that calls the named tools, all with the same arguments."""
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments or {}}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": calls}


_PROBE_QUESTION: Message = {"role": "user", "content": "probe question"}
_PROBE_CHAT = [_PROBE_QUESTION, {"role": "assistant", "content": "probe answer"}] * 2
_PROBE_CALL = tool_call_message([_NAME], {_KEY: _VALUE})
_PROBE_TOOL_CHAT = [_PROBE_QUESTION, *[_PROBE_CALL, {"role": "tool", "name": _NAME, "content": _RESULT}] * 2]


@dataclass(frozen=True)
class TemplateFamily:
    """A family of models with similar chat templates, and the replacement for them.

    Attributes:
        name: name of the family, for messages.
        markers: strings that all chat templates of the family contain.
        replacement: Jinja template for the turns after the prompt. Its variable ``generation_prompt`` is the
            text with which the model's own template opens an assistant turn.
        tools_variable: variable under which the model's own template expects the tool schemas.
    """

    name: str
    markers: tuple[str, ...]
    replacement: str
    tools_variable: str = "tools"


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
{{- generation_prompt if add_generation_prompt }}"""

# Qwen puts all tool results of a turn into one user message, each in tags.
_QWEN_RESULT = """\
{{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}"""

_SMOLLM3_RESULT = "{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}"

# Of chats alone: with tools, the model's own template is usable.
_HARMONY = """\
{%- for message in messages %}
{{- '<|start|>' + message.role + ('<|channel|>final' if message.role == 'assistant' else '') }}
{{- '<|message|>' + message.content + '<|end|>' }}
{%- endfor %}
{{- generation_prompt if add_generation_prompt }}"""

TEMPLATE_FAMILIES = (
    TemplateFamily(
        "SmolLM3", ("<|im_start|>", "xml_tools"), _CHATML.replace("RESULT", _SMOLLM3_RESULT), "xml_tools"
    ),
    TemplateFamily("Qwen", ("<|im_start|>", "<tool_call>"), _CHATML.replace("RESULT", _QWEN_RESULT)),
    TemplateFamily("GPT-OSS", ("<|start|>", "<|channel|>"), _HARMONY),
)


#: ``render(messages, **template_kwargs)`` returns the conversation as text.
Render = Callable[..., str]


def select_turn_template(
    render: Render, chat_template: str | None, *, with_tools: bool = True
) -> tuple[str, dict[str, str]]:
    """Select the model's own template if it is usable for several turns, else the replacement of its family.

    Args:
        render: renders messages with the model's own template, or with the ``chat_template`` it is given.
        chat_template: source of the model's template.
        with_tools: prompts contain tool schemas.

    Returns:
        the variable under which the model's own template expects the tool schemas; and the arguments of
        ``apply_chat_template`` for the turns after the prompt: the replacement, and the text with which it
        opens an assistant turn, or none with the model's own template.

    Raises:
        ConfigError: the tokenizer has no chat template, the template does not render tool schemas, or it is
            not usable for several turns and no replacement exists.
    """
    if chat_template is None:
        raise ConfigError("tools and environments need a tokenizer with a chat template; this one has none")
    family = next((f for f in TEMPLATE_FAMILIES if all(m in chat_template for m in f.markers)), None)
    tools_variable = "tools" if family is None else family.tools_variable
    question = [_PROBE_QUESTION]
    if with_tools and _NAME not in (render(question, **{tools_variable: [_SCHEMA]}) or ""):
        raise ConfigError(
            "the chat template does not render tool schemas; set a template that does as "
            "processing_class.chat_template (chat_template of a run file)"
        )
    problem = multi_turn_problem(render, with_tools=with_tools)
    if problem is None:
        return tools_variable, {}
    if family is not None:
        replaced = partial(render, chat_template=family.replacement)
        if multi_turn_problem(replaced, with_tools=with_tools) is None:
            opening = render(question, add_generation_prompt=True).removeprefix(render(question))
            kwargs = {"chat_template": family.replacement, "generation_prompt": opening}
            return tools_variable, kwargs
    raise ConfigError(
        f"the chat template cannot be used for several turns: {problem}; replacements exist for "
        f"{', '.join(f.name for f in TEMPLATE_FAMILIES)}; set a template without this problem as "
        "processing_class.chat_template (chat_template of a run file)"
    )


def multi_turn_problem(render: Render, *, with_tools: bool = True) -> str | None:
    """Return the reason why a template is not usable for several turns, or None if it is."""
    messages = _PROBE_TOOL_CHAT if with_tools else _PROBE_CHAT
    try:
        texts = [render(messages[:end]) for end in range(1, len(messages) + 1)]
    except Exception as problem:  # raised by the template, by jinja or by Python
        what = "a tool message" if with_tools else "a second turn"
        return f"it rejects {what} ({type(problem).__name__}: {problem})"
    required = (_NAME, _VALUE, _RESULT) if with_tools else ()  # some formats give arguments by position
    missing = [part for part in required if part not in texts[-1]]
    if missing:
        return f"it leaves out parts of tool calls or results ({', '.join(missing)})"
    roles = [message["role"] for message in messages]
    for (text, longer), (role, next_role) in zip(pairwise(texts), pairwise(roles), strict=True):
        if not longer.startswith(text):
            return f"it renders the {role} message differently once a {next_role} message follows"
    return None
