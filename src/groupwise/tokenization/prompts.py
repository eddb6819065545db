"""Prompts to tokens, tokens to completions."""

from __future__ import annotations

from typing import Any

#: A string, or a list of chat messages ``{"role": ..., "content": ...}``.
Prompt = Any


def is_chat(prompt: Prompt) -> bool:
    """Whether a prompt is a list of chat messages rather than plain text."""
    return not isinstance(prompt, str)


def continues(prompt: Prompt) -> bool:
    """Whether a chat prompt ends in an assistant message that is to be continued."""
    return prompt[-1]["role"] == "assistant"


def same_prompt(one: Prompt, other: Prompt) -> bool:
    """Whether two prompts are equal; arrays as images, which cannot tell, are different."""
    try:
        return bool(one == other)
    except ValueError:
        return False


def tokenize_prompt(
    tokenizer: Any,
    prompt: Prompt,
    template_kwargs: dict[str, Any] | None = None,
    max_length: int | None = None,
) -> list[int]:
    """Token ids of a prompt, ready to be continued.

    Chat prompts go through the chat template; one that ends with an assistant message is continued where it
    stops. Prompts longer than ``max_length`` lose tokens on the left.
    """
    if is_chat(prompt):
        unfinished = continues(prompt)
        ids = tokenizer.apply_chat_template(
            prompt,
            add_generation_prompt=not unfinished,
            continue_final_message=unfinished,
            tokenize=True,
            return_dict=True,
            **(template_kwargs or {}),
        )["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]
    return list(ids) if max_length is None else list(ids)[-max_length:]


def as_completion(prompt: Prompt, text: str) -> Prompt:
    """A completion in the form of its prompt: text, or the assistant message that answers the chat."""
    if not is_chat(prompt):
        return text
    started = message_text(prompt[-1]) if continues(prompt) else ""
    return [{"role": "assistant", "content": started + text}]


def message_text(message: dict[str, Any]) -> str:
    """The text of a message whose content is a string or a list of blocks."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.get("text") or "" for block in content if block.get("type") == "text")


def conversation(prompt: Prompt, completion: Prompt) -> Prompt:
    """Prompt and completion as one text or one list of messages."""
    if not is_chat(prompt):
        return prompt + completion
    asked = prompt[:-1] if prompt[-1]["role"] == "assistant" else prompt
    return [*asked, *completion]
