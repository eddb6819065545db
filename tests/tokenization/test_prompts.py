"""Prompts to token ids, and completions in the format of their prompt.

Files: ``tokenization/text.py``.
"""

from __future__ import annotations

import pytest
from support.fakes.scripted import byte_tokenizer

from groupwise.tokenization.prompts import format_completion, join_conversation, tokenize_prompt

USER, BEGUN = {"role": "user", "content": "3 x 4?"}, {"role": "assistant", "content": "It is"}
ASKED = "<|im_start|>user\n3 x 4?<|im_end|>\n"
CONTINUE = {"continue_final_message": True}


def rendered(prompt, template_kwargs=None, max_length=None):
    tokenizer = byte_tokenizer()
    return tokenizer.decode(tokenize_prompt(tokenizer, prompt, template_kwargs, max_length))


@pytest.mark.parametrize(
    ("prompt", "template_kwargs", "text"),
    [
        ([USER], None, f"{ASKED}<|im_start|>assistant\n"),
        ([USER], CONTINUE, f"{ASKED}<|im_start|>assistant\n"),
        (
            [USER, BEGUN],
            None,
            f"{ASKED}<|im_start|>assistant\nIt is<|im_end|>\n<|im_start|>assistant\n",
        ),
        ([USER, BEGUN], CONTINUE, f"{ASKED}<|im_start|>assistant\nIt is"),
        ([USER, BEGUN], {**CONTINUE, "add_generation_prompt": False}, f"{ASKED}<|im_start|>assistant\nIt is"),
        ([USER], {**CONTINUE, "add_generation_prompt": False}, f"{ASKED}<|im_start|>assistant\n"),
        ([USER], {"add_generation_prompt": False}, ASKED),
        ("It is", CONTINUE, "It is"),
    ],
)
def test_prompts_end_where_the_completion_begins(prompt, template_kwargs, text):
    assert rendered(prompt, template_kwargs) == text


def test_completions_of_chats_are_messages():
    assert format_completion("3 x 4?", " 12") == " 12"
    assert format_completion([USER], "12") == [{"role": "assistant", "content": "12"}]
    assert format_completion([USER, BEGUN], "12") == [{"role": "assistant", "content": "12"}]
    whole = [{"role": "assistant", "content": "It is 12"}]
    assert format_completion([USER, BEGUN], " 12", CONTINUE) == whole


def test_conversations_contain_a_continued_message_once():
    whole = [{"role": "assistant", "content": "It is 12"}]
    assert join_conversation("a", "b") == "ab"
    assert join_conversation([USER], whole) == [USER, *whole]
    assert join_conversation([USER, BEGUN], whole) == [USER, BEGUN, *whole]
    assert join_conversation([USER, BEGUN], whole, CONTINUE) == [USER, *whole]
