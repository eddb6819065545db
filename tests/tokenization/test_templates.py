"""Multi-turn checks of chat templates, and the replacements for templates that fail them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.fakes.scripted import CHAT, byte_tokenizer
from support.tool_chats import LOOK, look_call_message

from groupwise.errors import ConfigError
from groupwise.tokenization.rendering import Renderer
from groupwise.tokenization.templates import TEMPLATE_FAMILIES

RESULT = [{"role": "tool", "name": "look", "content": "a cat"}]
USER = {"role": "user", "content": "What is it?"}


def renderer(tokenizer) -> Renderer:
    return Renderer(tokenizer, frozenset([tokenizer.eos_token_id]))


#: Renders an empty thought into the last turn only, as Qwen3's template does.
QWEN3_LIKE = CHAT.replace(
    "'<|im_start|>assistant\\n' + message.content",
    "'<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n\\n' if loop.last else '') + message.content",
)


def test_a_template_that_rewrites_the_last_turn_is_replaced_for_later_turns_only():
    tokenizer = byte_tokenizer(QWEN3_LIKE)
    rendered = renderer(tokenizer)
    qwen = next(family for family in TEMPLATE_FAMILIES if family.name == "Qwen")
    assert rendered.turn_kwargs["chat_template"] == qwen.replacement
    ids, _ = rendered.render_next_messages(RESULT, tokenizer.eos_token_id)
    assert tokenizer.decode(ids) == (
        "\n<|im_start|>user\n<tool_response>\na cat\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    own = tokenizer.apply_chat_template([USER], tools=[LOOK], add_generation_prompt=True)["input_ids"]
    assert rendered.render_prompt([USER], [LOOK]) == own


#: Generation prompts of the models' own templates.
GENERATION_PROMPTS = {
    "SmolLM3": "<|im_start|>assistant\n",
    "Qwen": "<|im_start|>assistant\n",
    "GPT-OSS": "<|start|>assistant",
}


@pytest.mark.parametrize("family", TEMPLATE_FAMILIES, ids=lambda family: family.name)
def test_replacements_are_prefix_preserving(family):
    tokenizer = byte_tokenizer(family.replacement)
    call, answer = look_call_message(), {"role": "assistant", "content": "A cat."}
    messages = [USER, call, *RESULT, call, *RESULT, answer, USER]
    if family.name == "GPT-OSS":  # without tools
        messages = [USER, answer, USER, answer, USER]
    texts = [tokenizer.apply_chat_template(messages[:n], tokenize=False) for n in range(1, len(messages) + 1)]
    assert all(text.startswith(shorter) for shorter, text in pairwise(texts))
    for text, message in zip(texts, messages, strict=True):
        assert (message["content"] or "look") in text
    opened = tokenizer.apply_chat_template(
        messages[:3],
        tokenize=False,
        add_generation_prompt=True,
        generation_prompt=GENERATION_PROMPTS[family.name],
    )
    assert texts[3].startswith(opened)


SMOLLM3_LIKE = CHAT.replace("if tools", "if xml_tools").replace("in tools", "in xml_tools")
SMOLLM3_LIKE = SMOLLM3_LIKE.replace("message.tool_calls or []", "[]")


def test_smollm3_expects_tool_schemas_in_a_variable_of_its_own():
    tokenizer = byte_tokenizer(SMOLLM3_LIKE)
    rendered = renderer(tokenizer)
    assert "look" in tokenizer.decode(rendered.render_prompt([USER], [LOOK]))
    assert rendered.turn_kwargs
    ids, _ = rendered.render_next_messages(RESULT, tokenizer.eos_token_id)
    assert tokenizer.decode(ids) == "\n<|im_start|>user\na cat<|im_end|>\n<|im_start|>assistant\n"


COUNTING = CHAT.replace("|im_start|", "turn").replace(
    "+ message.role", "+ messages | length | string + message.role"
)
GEMMA_LIKE = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (GEMMA_LIKE, "does not render tool schemas"),
        ("{{ tools }}" + GEMMA_LIKE, "it rejects a tool message .*roles must alternate"),
        ("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", "leaves out parts of tool calls"),
        (COUNTING, "renders the user message differently once a assistant message follows"),
        (None, "need a tokenizer with a chat template"),
    ],
)
def test_other_templates_are_refused_with_the_reason(template, reason):
    with pytest.raises(ConfigError, match=reason):
        renderer(byte_tokenizer(template))
