"""Rendered messages equal the full rendering, with the published chat templates that TRL includes."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.fakes.scripted import CHAT, byte_tokenizer
from support.tool_chats import LOOK

from groupwise.errors import ConfigError
from groupwise.tokenization.rendering import Renderer
from groupwise.tokenization.templates import TEMPLATE_FAMILIES

trl = pytest.importorskip("trl")
FOLDER = Path(trl.__file__).parent / "chat_templates"

USER = {"role": "user", "content": "What is it?"}
AGAIN = {"role": "user", "content": "Look again."}

#: The call look(at="it", times=2) in the format of each family, after the generation prompt.
QWEN = '<tool_call>\n{"name": "look", "arguments": {"at": "it", "times": 2}}\n</tool_call>'
PARAMETERS = (
    "<tool_call>\n<function=look>\n<parameter=at>\nit\n</parameter>\n<parameter=times>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
LLAMA = '{"name": "look", "parameters": {"at": "it", "times": 2}}'
GEMMA = '<|tool_call>call:look{at:<|"|>it<|"|>,times:2}<tool_call|>'
HARMONY = ' to=functions.look<|channel|>commentary json<|message|>{"at": "it", "times": 2}'

#: (template, end of a turn with a call, end of another turn, call, family of the replacement if any)
CASES = [
    ("qwen2_5", "<|im_end|>", "<|im_end|>", QWEN, None),
    ("qwen3", "<|im_end|>", "<|im_end|>", QWEN, "Qwen"),
    ("qwen3_instruct_2507", "<|im_end|>", "<|im_end|>", QWEN, None),
    ("qwen3_vl", "<|im_end|>", "<|im_end|>", QWEN, None),
    ("qwen3_5_nothink", "<|im_end|>", "<|im_end|>", PARAMETERS, None),
    ("qwen3_5_think", "<|im_end|>", "<|im_end|>", "Hm.\n</think>\n\n" + PARAMETERS, None),
    ("qwen3_6", "<|im_end|>", "<|im_end|>", "Hm.\n</think>\n\n" + PARAMETERS, None),
    ("qwen3_8", "<|im_end|>", "<|im_end|>", "Hm.\n</think>\n\n" + PARAMETERS, None),
    ("llama3_1", "<|eot_id|>", "<|eot_id|>", LLAMA, None),
    ("llama3_2", "<|eot_id|>", "<|eot_id|>", LLAMA, None),
    ("gemma4", "<|tool_response>", "<turn|>", GEMMA, None),
    ("gemma4_v5", "<|tool_response>", "<turn|>", GEMMA, None),
    ("gptoss", "<|call|>", "<|return|>", HARMONY, None),
]
WITH_TOOLS = pytest.mark.parametrize(("name", "end", "last", "call", "family"), CASES, ids=lambda v: v)


def tokenizer_of(name: str, *ends: str) -> Any:
    template = (FOLDER / f"{name}.jinja").read_text()
    marks = re.findall(r"<\|\w+\|?>|<\w+\|>|<(?:start|end)_of_(?:turn|utterance)>|<\|\"\|>", template)
    tokenizer = byte_tokenizer(template, [*dict.fromkeys([*marks, *ends, "<|pad|>"])], ends[-1])
    tokenizer.bos_token = "<bos>"
    return tokenizer


def renderer_of(tokenizer: Any, *ends: str, **settings: Any) -> Renderer:
    return Renderer(tokenizer, frozenset(tokenizer.convert_tokens_to_ids(list(ends))), **settings)


def play(tokenizer: Any, call: str, end: str, last: str, **settings: Any) -> tuple[list[int], list[Any]]:
    """Token ids of two turns with a call and its result each, and the messages parsed from them."""
    renderer = renderer_of(tokenizer, end, last, **settings)
    parse = renderer.parser
    messages: list[Any] = [USER]
    context = renderer.render_prompt(messages, [LOOK])
    for answer in ("a cat", "two cats"):
        tokens = tokenizer(call + end, add_special_tokens=False)["input_ids"]
        turn = parse(context, tokens, [LOOK])
        made = [(each.name, each.arguments, each.error) for each in turn.tool_calls]
        assert made == [("look", {"at": "it", "times": 2}, None)]
        results = [{"role": "tool", "name": "look", "content": answer}]
        context = context + tokens + renderer.render_next_messages(results, tokens[-1])[0]
        thought, ended, rest = turn.message["content"].rpartition("</think>")
        reasoning = {"reasoning_content": thought.strip(), "content": rest} if ended else {}
        messages += [{**turn.message, **reasoning}, *results]
    return context, messages


@WITH_TOOLS
def test_appended_turns_equal_the_full_rendering(name, end, last, call, family):
    tokenizer = tokenizer_of(name, end, last)
    context, messages = play(tokenizer, call, end, last)
    whole = tokenizer.apply_chat_template(messages, tools=[LOOK], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(context) == whole


@WITH_TOOLS
def test_only_qwen3_needs_a_replacement(name, end, last, call, family):
    kwargs = renderer_of(tokenizer_of(name, end, last), end, last).turn_kwargs
    expected = next((f.replacement for f in TEMPLATE_FAMILIES if f.name == family), None)
    assert kwargs.get("chat_template") == expected


@pytest.mark.parametrize("name", ["gemma", "gemma3", "llama3", "qwen2_5_vl", "smolvlm"])
def test_templates_without_tools_are_refused(name):
    with pytest.raises(ConfigError, match="does not render tool schemas"):
        renderer_of(tokenizer_of(name, "<|im_end|>"), "<|im_end|>")


@pytest.mark.parametrize(
    ("name", "end"),
    [(name, last) for name, _, last, _, _ in CASES]
    + [("gemma", "<end_of_turn>"), ("gemma3", "<end_of_turn>"), ("llama3", "<|eot_id|>")]
    + [("qwen2_5_vl", "<|im_end|>")],
)
def test_an_appended_user_message_equals_the_full_rendering(name, end):
    tokenizer = tokenizer_of(name, end)
    renderer = renderer_of(tokenizer, end, with_tools=False)
    ids, _ = renderer.render_next_messages([AGAIN], tokenizer.eos_token_id)
    rendered = tokenizer.decode(ids)
    talk = [USER, {"role": "assistant", "content": "A dog."}, AGAIN]
    whole = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    assert whole.endswith(rendered) and "again" in rendered and "dog" not in rendered


def test_the_generation_prompt_of_qwen3_without_thinking_is_used_in_later_turns():
    tokenizer = tokenizer_of("qwen3", "<|im_end|>")
    context, _ = play(tokenizer, QWEN, "<|im_end|>", "<|im_end|>", template_kwargs={"enable_thinking": False})
    text = tokenizer.decode(context)
    assert text.count("<|im_start|>assistant\n<think>\n\n</think>\n\n") == 3 == text.count("assistant\n")


def test_a_token_that_ends_a_turn_and_begins_the_tool_message_appears_once():
    """Gemma 4 stops at the token that begins the tool message."""
    closing = "{{- '<|im_end|>\\n' }}\n{%- else %}"
    template = CHAT.replace(
        closing, "{%- elif message.role == 'tool' %}<|im_end|>{{ message.content }}{%- else %}"
    )
    assert template != CHAT
    tokenizer = byte_tokenizer(template)
    results = [{"role": "tool", "name": "look", "content": "a cat"}]
    ids, _ = renderer_of(tokenizer, "<|im_end|>").render_next_messages(results, tokenizer.eos_token_id)
    assert tokenizer.decode(ids) == "a cat<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def qwen_tokenizer() -> Any:
    """Qwen's tokenizer, from the ranks in the wheel of its API client."""
    found = importlib.util.find_spec("dashscope")
    if found is None:
        pytest.skip("dashscope is not installed")
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks = Path(found.origin).parent / "resources" / "qwen.tiktoken"
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    converter = TikTokenConverter(str(ranks), pattern, extra_special_tokens=marks)
    return PreTrainedTokenizerFast(tokenizer_object=converter.converted(), eos_token="<|im_end|>")


@pytest.mark.parametrize(("name", "end", "last", "call", "family"), CASES[:8], ids=lambda v: v)
def test_token_ids_of_the_real_qwen_tokenizer_equal_the_full_tokenization(
    name, end, last, call, family, qwen_tokenizer
):
    qwen_tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
    context, messages = play(qwen_tokenizer, call, end, last)
    whole = qwen_tokenizer.apply_chat_template(
        messages, tools=[LOOK], add_generation_prompt=True, return_dict=False
    )
    assert context == whole
    assert qwen_tokenizer.convert_tokens_to_ids("<|im_end|>") == 151645
    assert json.dumps(LOOK["function"]["parameters"]["properties"]["at"]) in qwen_tokenizer.decode(whole)
