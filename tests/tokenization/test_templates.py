"""Which chat templates can be used, what stands in for others, and the tokens behind a turn."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.scripted import CHAT, byte_tokenizer, call

from groupwise.agents import Renderer
from groupwise.agents.parsing import TurnParser
from groupwise.errors import ConfigError
from groupwise.tokenization.templates import FAMILIES

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "What."}}},
    },
}
ANSWER = [{"role": "tool", "name": "look", "content": "a cat"}]
USER = {"role": "user", "content": "What is it?"}


def looks(content: str = "") -> dict:
    function = {"name": "look", "arguments": {"at": "it"}}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "function": function}],
    }


def renderer(tokenizer, **settings) -> Renderer:
    return Renderer(tokenizer, frozenset([tokenizer.eos_token_id]), settings)


#: Writes an empty thought into the last turn only, as Qwen3's own template does.
QWEN3_LIKE = CHAT.replace(
    "'<|im_start|>assistant\\n' + message.content",
    "'<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n\\n' if loop.last else '') + message.content",
)


def test_a_template_that_rewrites_the_last_turn_is_replaced_by_that_of_its_family():
    tokenizer = byte_tokenizer(QWEN3_LIKE)
    written = renderer(tokenizer)
    assert written.turns.template == next(f.turns for f in FAMILIES if f.name == "Qwen")
    text = tokenizer.decode(written.observation(ANSWER, tokenizer.eos_token_id))
    assert text == (
        "\n<|im_start|>user\n<tool_response>\na cat\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    # The prompt stays the model's own.
    own = tokenizer.apply_chat_template([USER], tools=[TOOL], add_generation_prompt=True)["input_ids"]
    assert written.prompt([USER], [TOOL]) == own


#: What the models' own templates write for a turn to begin.
OPENINGS = {
    "SmolLM3": "<|im_start|>assistant\n",
    "Qwen": "<|im_start|>assistant\n",
    "Llama 3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "GPT-OSS": "<|start|>assistant",
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_stand_ins_keep_earlier_messages_as_they_are(family):
    tokenizer = byte_tokenizer(family.turns)
    messages = [USER, looks(), *ANSWER, looks(), *ANSWER, {"role": "assistant", "content": "A cat."}, USER]
    texts = [tokenizer.apply_chat_template(messages[:n], tokenize=False) for n in range(1, len(messages) + 1)]
    assert all(text.startswith(shorter) for shorter, text in pairwise(texts))
    for text, message in zip(texts, messages, strict=True):
        assert (message["content"] or "look") in text
    opened = tokenizer.apply_chat_template(
        messages[:3], tokenize=False, add_generation_prompt=True, opening=OPENINGS[family.name]
    )
    assert texts[3].startswith(opened)  # the next turn of the policy continues what opened it


SMOLLM3_LIKE = CHAT.replace("if tools", "if xml_tools").replace("in tools", "in xml_tools")
SMOLLM3_LIKE = SMOLLM3_LIKE.replace("message.tool_calls or []", "[]")


def test_smollm3_shows_its_tools_under_its_own_name():
    tokenizer = byte_tokenizer(SMOLLM3_LIKE)
    written = renderer(tokenizer)
    assert "look" in tokenizer.decode(written.prompt([USER], [TOOL]))
    assert written.turns.template is not None
    text = tokenizer.decode(written.observation(ANSWER, tokenizer.eos_token_id))
    assert text == "\n<|im_start|>user\na cat<|im_end|>\n<|im_start|>assistant\n"


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
        (GEMMA_LIKE, "does not show tools to the model"),
        ("{{ tools }}" + GEMMA_LIKE, "it refuses a tool's message .*roles must alternate"),
        ("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", "leaves out parts of tool calls"),
        (COUNTING, "writes the user message in another way"),
        (None, "need a tokenizer with a chat template"),
    ],
)
def test_other_templates_are_refused_with_the_reason(template, reason):
    with pytest.raises(ConfigError, match=reason):
        renderer(byte_tokenizer(template))


def test_a_template_whose_calls_cannot_be_read_is_refused():
    with pytest.raises(ConfigError, match=r"does not tell how the model calls tools.*response_template"):
        TurnParser(byte_tokenizer(), CHAT.replace("tool_call>", "act>"))


@pytest.mark.parametrize(
    ("template", "text", "content", "calls"),
    [
        (CHAT, f"Well. {call('look', at='it')}<|im_end|>", "Well.", [("look", {"at": "it"})]),
        (
            CHAT,
            f"{call('look', at='it')}\n{call('see')}<|im_end|>",
            "",
            [("look", {"at": "it"}), ("see", {})],
        ),
        (CHAT, "A cat. <|im_end|>", "A cat. ", []),
        ("ipython", '{"name": "look", "parameters": {"at": "it"}}<|eot_id|>', "", [("look", {"at": "it"})]),
        ("ipython", 'It is {"name": 3}.', 'It is {"name": 3}.', []),
        (
            "<|channel|>",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.look<|channel|>"
            'commentary json<|message|>{"at": "it"}<|call|>',
            "Hm.",
            [("look", {"at": "it"})],
        ),
        (
            "<|channel|>",
            '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "it"}<|call|>',
            "",
            [("look", {"at": "it"})],
        ),
        ("<|channel|>", "<|channel|>final<|message|>A cat.<|return|>", "A cat.", []),
    ],
)
def test_turns_are_read_in_the_format_of_the_family(template, text, content, calls):
    special = ("<|im_start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>", "<|start|>", "<|pad|>")
    tokenizer = byte_tokenizer(special=special)
    turn = TurnParser(tokenizer, template)([], tokenizer(text)["input_ids"], [])
    assert turn.message["content"] == content
    assert [(each.name, each.arguments) for each in turn.calls] == calls
    assert all(each.error is None for each in turn.calls)


RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "[[",
            "close": "]]",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}


def test_a_response_template_goes_before_the_known_formats():
    tokenizer = byte_tokenizer()
    tokenizer.response_template = RESPONSE
    read = TurnParser(tokenizer, CHAT)
    prompt = renderer(tokenizer).prompt([USER], [TOOL])
    text = '<think>Hm.</think>Well.[[{"name": "look", "arguments": {"at": "it"}}]]<|im_end|>'
    turn = read(prompt, tokenizer(text)["input_ids"], [TOOL])
    assert turn.message == {**looks("Well."), "reasoning_content": "Hm."}
    assert [(each.name, each.arguments, each.error) for each in turn.calls] == [("look", {"at": "it"}, None)]
    broken = read(prompt, tokenizer('[[{"name": "lo]]<|im_end|>')["input_ids"], [TOOL])
    assert broken.calls[0].error is not None and "tool_calls" not in broken.message
    assert read(prompt, tokenizer("A cat.<|im_end|>")["input_ids"], [TOOL]).message["content"] == "A cat."


def test_a_token_that_ends_a_turn_and_begins_the_answer_stands_once():
    """Gemma 4 stops where the answer of the tool begins."""
    closing = "{{- '<|im_end|>\\n' }}\n{%- else %}"
    template = CHAT.replace(
        closing, "{%- elif message.role == 'tool' %}<|im_end|>{{ message.content }}{%- else %}"
    )
    assert template != CHAT
    tokenizer = byte_tokenizer(template)
    ids = renderer(tokenizer).observation(ANSWER, tokenizer.eos_token_id)
    assert tokenizer.decode(ids) == "a cat<|im_start|>assistant\n"
