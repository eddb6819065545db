"""Render and tokenize prompts, format completions; a prompt is plain text or a list of chat messages."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, cast

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from groupwise.errors import ConfigError
from groupwise.tokenization.text import content_text, message_text

#: A chat message ``{"role": ..., "content": ...}``; the content is a string or a list of content blocks.
Message = dict[str, Any]

Prompt = str | list[Message]

#: Beginning of a list of messages that was written as a text.
_JSON_CHAT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")


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


def render_chat(
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    messages: list[Message],
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Return a chat as the text of its template; contents are strings, for a processor content blocks.

    Raises:
        ConfigError: there is no template, it fails, it prints a list of content blocks, or it leaves out the
            text or a tool call of a message.
    """
    kind = type(processing_class).__name__
    if not ((template_kwargs or {}).get("chat_template") or getattr(processing_class, "chat_template", None)):
        raise ConfigError(
            f"the prompt is a list of messages, but the {kind} has no chat template; set "
            "processing_class.chat_template (chat_template of a run file), pass the tokenizer of a chat "
            "model, or make prompts strings"
        )
    options = generation_options(messages, template_kwargs)
    marks: dict[str, str] = {}
    try:
        text, marked = (
            str(cast(Any, processing_class).apply_chat_template(chat, tokenize=False, **options))
            for chat in (messages, _marked(messages, marks))
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        blocks = [m["content"] for m in messages if m["content"] and isinstance(m["content"], list)]
        lost = [text for mark, text in marks.items() if mark not in marked]
        if not lost and not any(str(content) in text for content in blocks):
            return text
        reason = f"it leaves out {lost[0]!r:.80}" if lost else "it prints a list of content blocks as it is"
    raise ConfigError(
        f"the chat template of the {kind} cannot render the prompt ({reason}): {messages!r:.200}; change the "
        "messages, set processing_class.chat_template, or pass the processor of a vision-language model"
    )


def _marked(value: Any, marks: dict[str, str], key: str = "") -> Any:
    """Copy messages with a mark at the end of every text and name of a called tool, added to ``marks``."""
    if isinstance(value, list):
        return [_marked(each, marks, key) for each in value]
    if isinstance(value, Mapping):
        read = ("content", "tool_calls") if "role" in value else value  # others may be left out
        return {k: _marked(each, marks, k) if k in read else each for k, each in value.items()}
    if key not in ("content", "text", "name") or not isinstance(value, str) or not value.strip():
        return value
    mark = f"mark{len(marks)}."
    marks[mark] = value
    return value + mark


def text_problem(tokenizer: PreTrainedTokenizerBase, prompt: str, *, adds_bos: bool = True) -> str:
    """Return what is probably wrong with a prompt that is a text, and the way out; empty for most texts.

    Args:
        adds_bos: the tokenizer is called with its special tokens.
    """
    if _JSON_CHAT.match(prompt):
        return (
            f"the prompt is a string that looks like a list of messages, {prompt!r:.80}: it is sampled as "
            "text, without the chat template; convert the column, for example with json.loads"
        )
    bos = tokenizer.bos_token
    starts_with_bos = adds_bos and bos and prompt.startswith(bos)
    if starts_with_bos and tokenizer(prompt)["input_ids"][:2] == [tokenizer.bos_token_id] * 2:
        return (
            f"the prompt begins with {bos!r}, and the tokenizer adds another one; remove it from the column, "
            "or make prompts lists of messages"
        )
    return ""


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


def without_added_keys(prompt: Prompt) -> Prompt:
    """Return a copy of the prompt without keys of None in messages and tool calls; contents stay as they are.

    Arrow gives every message, and the arguments of every call, the keys of all in the dataset. A null that is
    meant as an argument cannot be distinguished; arguments that are a JSON string keep it.
    """
    if not is_conversational(prompt):
        return prompt
    kept = [{"content": message["content"]} if "content" in message else {} for message in prompt]
    return [{**_without_none(message), **content} for message, content in zip(prompt, kept, strict=True)]


def _without_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_none(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return value


def with_text_content(prompt: Prompt) -> Prompt:
    """Return a copy of the prompt whose contents are strings, as chat templates of text models expect.

    Raises:
        ConfigError: a content block is not of type ``text``.
    """
    if not is_conversational(prompt):
        return prompt
    return [{**message, "content": content_text(message.get("content") or "")} for message in prompt]
