"""Prompts under the chat templates of many models: every message is read, or the row is refused.

Files: ``tokenization/prompts.py``, ``data/prompt_checks.py``.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import trl
from datasets import Dataset
from support.configs import config_of
from support.fakes.scripted import byte_tokenizer

from groupwise.data.dataset_checks import checked_rows
from groupwise.data.prompt_checks import PromptCheck
from groupwise.errors import ConfigError
from groupwise.rewards.process import StepScorer
from groupwise.rewards.runtime.models import RewardModel
from groupwise.tokenization.images import encode_prompt, insert_images

TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
USER = {"role": "user", "content": "Q1?"}


def call(name, **arguments):
    return {"type": "function", "id": "abcdefghi", "function": {"name": name, "arguments": arguments}}


def calls(*given, content=""):
    return {"role": "assistant", "content": content, "tool_calls": list(given)}


LOOK = call("look", at="it")
CHATS = {
    "user": [USER],
    "system": [{"role": "system", "content": "S0."}, USER],
    "systems": [{"role": "system", "content": "S0."}, {"role": "system", "content": "S1."}, USER],
    "developer": [{"role": "developer", "content": "D0."}, USER],
    "assistant": [USER, {"role": "assistant", "content": "A2."}, {"role": "user", "content": "Q3?"}],
    "call": [USER, calls(LOOK, content=None), {"role": "tool", "name": "look", "content": "T4."}],
    "call and text": [USER, calls(LOOK, content="A2."), {"role": "tool", "name": "look", "content": "T4."}],
}


def tokenizer_of(template):
    tokenizer = byte_tokenizer(template)
    tokenizer.bos_token = "<s>"
    return tokenizer


def check_of(tokenizer):
    return PromptCheck("train_dataset", tokenizer, config_of(), None, renders=True)


def in_blocks(chat):
    return [
        {**m, "content": [{"type": "text", "text": part} for part in m["content"].partition(" ") if part]}
        if m["content"]
        else m
        for m in chat
    ]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_the_policy_reads_every_message_or_the_row_is_refused(path):
    """Qwen3's template prints nothing for a user message of text blocks, and many leave out roles."""
    tokenizer = tokenizer_of(path.read_text())
    read = []
    for name, chat in CHATS.items():
        outcomes = []
        for given in (chat, in_blocks(chat)):
            try:
                check_of(tokenizer).check_prompt(given, 0)
            except ConfigError:
                outcomes.append(None)
                continue
            ids, _ = encode_prompt(tokenizer, insert_images({"prompt": given}))
            text = tokenizer.decode(ids)
            assert all(m["content"] in text for m in chat if m["content"]), (name, text)
            assert ("look" in text.replace("T4.", "")) == ("call" in name), (name, text)
            outcomes.append(text)
            read.append(name)
        assert outcomes[0] == outcomes[1], name
    takes_blocks_only = path.stem.startswith(("idefics3", "llava_next", "smolvlm"))  # those of processors
    assert ("user" in read) != takes_blocks_only


def test_a_refused_message_is_quoted():
    tokenizer = tokenizer_of((TEMPLATES[0].parent / "qwen3.jinja").read_text())
    with pytest.raises(
        ConfigError, match=r"^train_dataset, row 7: .* \(it leaves out 'D0\.'\): .*; change the me"
    ):
        check_of(tokenizer).check_prompt(CHATS["developer"], 7)


def test_keys_that_arrow_adds_are_removed():
    """Arrow gives every message and every call the keys of all of them, with None."""
    chats = [
        [USER, calls(call("buy", item="tea", options={"hot": True}))],
        [USER, calls(call("see", town="Rome", options={"days": [1, 2]})), {"role": "tool", "content": "T4."}],
    ]
    rows = Dataset.from_list([{"prompt": chat} for chat in chats])
    assert rows[0]["prompt"][1]["tool_calls"][0]["function"]["arguments"]["town"] is None
    assert [insert_images(row) for row in rows] == chats
    for template in ("qwen3_5_think", "qwen3_6", "llama3_1", "glm4moe", "gptoss"):
        tokenizer = tokenizer_of((TEMPLATES[0].parent / f"{template}.jinja").read_text())
        read, expected = (
            tokenizer.decode(encode_prompt(tokenizer, insert_images({"prompt": chat}))[0])
            for chat in (rows[0]["prompt"], chats[0])
        )
        assert read == expected and "None" not in read and "null" not in read


def test_contents_of_none_are_kept_and_read_as_empty():
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": [LOOK], "name": None}]
    assert insert_images({"prompt": chat}) == [USER, calls(LOOK, content=None)]
    tokenizer = tokenizer_of((TEMPLATES[0].parent / "glm4moe.jinja").read_text())
    text = tokenizer.decode(encode_prompt(tokenizer, chat)[0])
    assert "None" not in text and "look" in text


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        ("llama3_1", [USER, calls(LOOK, LOOK)], "single tool-calls at once"),
        ("qwen3_5_think", [USER, calls({"function": {"name": "look", "arguments": "x"}})], "cannot render"),
        ("qwen3", [USER, calls(LOOK, content=[{"type": "image"}])], "a tokenizer reads text only"),
    ],
)  # fmt: skip
def test_a_row_whose_calls_the_template_rejects_is_named(template, row, message):
    """Rows before it have the same roles and one well-formed call each."""
    tokenizer = tokenizer_of((TEMPLATES[0].parent / f"{template}.jinja").read_text())
    rows = [{"prompt": [USER, calls(LOOK)]}] * 8 + [{"prompt": row}] + [{"prompt": [USER]}] * 3
    with pytest.raises(ConfigError, match=rf"^train_dataset, row 8: .*{message}"):
        checked_rows(rows, check_of(tokenizer))


def test_reward_models_read_text_blocks():
    """Images are left out: these models have a tokenizer."""
    tokenizer = tokenizer_of((TEMPLATES[0].parent / "qwen3.jinja").read_text())
    model = SimpleNamespace(tokenizer=tokenizer, template_kwargs={}, step_token_ids=[])
    answer = [{"role": "assistant", "content": "A2."}]
    expected = RewardModel.text(model, [USER], answer)
    expected_ids = StepScorer._inputs(model, [USER], [])
    assert "Q1?" in expected
    chat = in_blocks([USER])
    chat[0]["content"].insert(0, {"type": "image"})
    assert RewardModel.text(model, chat, answer) == expected
    assert StepScorer._inputs(model, chat, []) == expected_ids
