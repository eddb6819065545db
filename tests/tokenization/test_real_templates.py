"""The chat templates that models are published with, as TRL carries them: appended is what they write."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.scripted import byte_tokenizer

from groupwise.agents import Renderer
from groupwise.agents.parsing import TurnParser
from groupwise.errors import ConfigError
from groupwise.tokenization.templates import FAMILIES

trl = pytest.importorskip("trl")
FOLDER = Path(trl.__file__).parent / "chat_templates"

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {
            "type": "object",
            "properties": {
                "at": {"type": "string", "description": "What."},
                "times": {"type": "integer", "description": "How often."},
            },
            "required": ["at"],
        },
    },
}
USER = {"role": "user", "content": "What is it?"}
AGAIN = {"role": "user", "content": "Look again."}

#: How each family writes look(at="it", times=2), behind what its template begins a turn with.
QWEN = '<tool_call>\n{"name": "look", "arguments": {"at": "it", "times": 2}}\n</tool_call>'
PARAMETERS = (
    "<tool_call>\n<function=look>\n<parameter=at>\nit\n</parameter>\n<parameter=times>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
LLAMA = '{"name": "look", "parameters": {"at": "it", "times": 2}}'
GEMMA = '<|tool_call>call:look{at:<|"|>it<|"|>,times:2}<tool_call|>'
HARMONY = ' to=functions.look<|channel|>commentary json<|message|>{"at": "it", "times": 2}'

#: (template, end of a turn that calls, end of another, call, whose template writes later turns)
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
    """The tokens of two turns that call the tool with what it says, and the messages read from them."""
    renderer = renderer_of(tokenizer, end, last, **settings)
    read = TurnParser(tokenizer, renderer.chat_template)
    messages: list[Any] = [USER]
    context = renderer.prompt(messages, [TOOL])
    for answer in ("a cat", "two cats"):
        tokens = tokenizer(call + end, add_special_tokens=False)["input_ids"]
        turn = read(context, tokens, [TOOL])
        made = [(each.name, each.arguments, each.error) for each in turn.calls]
        assert made == [("look", {"at": "it", "times": 2}, None)]
        answers = [{"role": "tool", "name": "look", "content": answer}]
        context = context + tokens + renderer.observation(answers, tokens[-1])
        thought, ended, rest = turn.message["content"].rpartition("</think>")
        told = {"reasoning_content": thought.strip(), "content": rest} if ended else {}
        messages += [{**turn.message, **told}, *answers]
    return context, messages


@WITH_TOOLS
def test_appended_turns_are_what_the_models_own_template_writes(name, end, last, call, family):
    tokenizer = tokenizer_of(name, end, last)
    context, messages = play(tokenizer, call, end, last)
    whole = tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(context) == whole


@WITH_TOOLS
def test_whose_template_writes_the_turns(name, end, last, call, family):
    turns = renderer_of(tokenizer_of(name, end, last), end, last).turns
    assert turns.template == next((f.turns for f in FAMILIES if f.name == family), None)


@pytest.mark.parametrize("name", ["gemma", "gemma3", "llama3", "qwen2_5_vl", "smolvlm"])
def test_templates_without_tools_are_refused(name):
    with pytest.raises(ConfigError, match="does not show tools to the model"):
        renderer_of(tokenizer_of(name, "<|im_end|>"), "<|im_end|>")


@pytest.mark.parametrize(
    ("name", "end"),
    [(name, last) for name, _, last, _, _ in CASES]
    + [("gemma", "<end_of_turn>"), ("gemma3", "<end_of_turn>"), ("llama3", "<|eot_id|>")]
    + [("qwen2_5_vl", "<|im_end|>")],
)
def test_what_the_user_says_next_is_what_the_models_own_template_writes(name, end):
    tokenizer = tokenizer_of(name, end)
    written = tokenizer.decode(
        renderer_of(tokenizer, end, shows_tools=False).observation([AGAIN], tokenizer.eos_token_id)
    )
    talk = [USER, {"role": "assistant", "content": "A dog."}, AGAIN]
    whole = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    assert whole.endswith(written) and "again" in written and "dog" not in written


def test_without_thinking_qwen3_begins_later_turns_with_its_empty_thought():
    tokenizer = tokenizer_of("qwen3", "<|im_end|>")
    context, _ = play(tokenizer, QWEN, "<|im_end|>", "<|im_end|>", template_kwargs={"enable_thinking": False})
    text = tokenizer.decode(context)
    assert text.count("<|im_start|>assistant\n<think>\n\n</think>\n\n") == 3 == text.count("assistant\n")


@pytest.mark.parametrize(
    "text", ["<tool_call>\n<parameter=at>\nit\n</parameter>\n</tool_call>", "<tool_call>look"]
)
def test_a_call_without_its_function_is_an_error_for_the_model(text):
    tokenizer = tokenizer_of("qwen3_6", "<|im_end|>")
    turn = TurnParser(tokenizer, tokenizer.chat_template)([], tokenizer(text)["input_ids"], [TOOL])
    assert len(turn.calls) == 1 and "not valid JSON" in turn.calls[0].error


@pytest.fixture(scope="module")
def qwen_tokenizer() -> Any:
    """The tokens of Qwen, from the ranks that its service's client carries."""
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
def test_the_tokens_of_qwen_are_those_of_the_whole_conversation(
    name, end, last, call, family, qwen_tokenizer
):
    qwen_tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
    context, messages = play(qwen_tokenizer, call, end, last)
    whole = qwen_tokenizer.apply_chat_template(
        messages, tools=[TOOL], add_generation_prompt=True, return_dict=False
    )
    assert context == whole
    assert qwen_tokenizer.convert_tokens_to_ids("<|im_end|>") == 151645
    assert json.dumps(TOOL["function"]["parameters"]["properties"]["at"]) in qwen_tokenizer.decode(whole)
