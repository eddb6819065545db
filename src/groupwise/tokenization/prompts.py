"""Tokenize prompts and format completions; a prompt is plain text or a list of chat messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, cast

from transformers import PreTrainedTokenizerBase

from groupwise.tokenization.text import content_text, message_text

#: A chat message ``{"role": ..., "content": ...}``; the content is a string or a list of content blocks.
Message = dict[str, Any]

Prompt = str | list[Message]


def is_conversational(prompt: Prompt) -> TypeGuard[list[Message]]:
    """Return True if ``prompt`` is a list of chat messages, False if it is plain text."""
    return not isinstance(prompt, str)


def continues_final_message(prompt: Sequence[Message], template_kwargs: Mapping[str, Any] | None) -> bool:
    """Return True if the completion continues the last message of the prompt instead of opening a turn.

    That requires ``continue_final_message`` among the variables of the chat template, and a message of the
    assistant.
    """
    wanted = (template_kwargs or {}).get("continue_final_message", False)
    return bool(wanted) and prompt[-1]["role"] == "assistant"


def generation_options(
    prompt: Sequence[Message], template_kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the arguments of ``apply_chat_template`` that end a prompt where its completion begins."""
    options = dict(template_kwargs or {})
    wanted = options.pop("continue_final_message", False)
    if not wanted:
        return {"add_generation_prompt": True, **options}
    options["add_generation_prompt"] = not continues_final_message(prompt, template_kwargs)
    if not options["add_generation_prompt"]:
        options["continue_final_message"] = wanted  # True, or the name of the field to continue
    return options


def prompts_equal(one: object, other: object) -> bool:
    """Compare two prompts; False if they hold arrays or tensors, which have no single truth value."""
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):
        return False


def prompt_digest(prompt: object) -> int:
    """Return a number that is equal on all ranks for equal prompts; of images, the class alone counts."""
    text = json.dumps(prompt, default=lambda value: type(value).__name__)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def tokenize_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    template_kwargs: Mapping[str, Any] | None = None,
    max_length: int | None = None,
) -> list[int]:
    """Tokenize a prompt up to the point where the completion begins.

    Args:
        prompt: chat messages go through the chat template, with a generation prompt unless the completion
            continues the last message (:func:`continues_final_message`); text is tokenized as it is.
        max_length: longer prompts are truncated on the left.

    Returns:
        Token ids, without padding.
    """
    if is_conversational(prompt):
        encoded = tokenizer.apply_chat_template(
            prompt, tokenize=True, return_dict=True, **generation_options(prompt, template_kwargs)
        )
    else:
        encoded = tokenizer(cast(str, prompt))
    ids = list(cast(dict[str, list[int]], encoded)["input_ids"])
    return ids if max_length is None else ids[-max_length:]


def format_completion(prompt: Prompt, text: str, template_kwargs: Mapping[str, Any] | None = None) -> Prompt:
    """Return ``text`` in the format of its prompt: a string, or a list with one assistant message.

    The message includes the text of a message that the completion continues.
    """
    if not is_conversational(prompt):
        return text
    begun = message_text(prompt[-1]) if continues_final_message(prompt, template_kwargs) else ""
    return [{"role": "assistant", "content": begun + text}]


def join_conversation(
    prompt: Prompt, completion: Prompt, template_kwargs: Mapping[str, Any] | None = None
) -> Prompt:
    """Concatenate prompt and completion to one text or one list of messages."""
    if isinstance(prompt, str) or isinstance(completion, str):
        return cast(str, prompt) + cast(str, completion)
    continued = continues_final_message(prompt, template_kwargs)
    return [*(prompt[:-1] if continued else prompt), *completion]


def with_text_content(prompt: Prompt) -> Prompt:
    """Return a copy of the prompt whose contents are strings, as chat templates of text models expect.

    Raises:
        ConfigError: a content block is not of type ``text``.
    """
    if not is_conversational(prompt):
        return prompt
    return [{**message, "content": content_text(message.get("content") or "")} for message in prompt]
