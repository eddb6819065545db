"""Tokenize prompts and format completions; a prompt is plain text or a list of chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, TypeVar, cast

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from groupwise.errors import ConfigError

#: A chat message ``{"role": ..., "content": ...}``; the content is a string or a list of content blocks.
Message = dict[str, Any]

Prompt = str | list[Message]

T = TypeVar("T")

#: A tokenizer, or the processor of a vision-language model.
ProcessingClass = PreTrainedTokenizerBase | ProcessorMixin


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
    """Compare two prompts; False if they hold arrays, which have no single truth value."""
    try:
        return bool(one == other)
    except ValueError:
        return False


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


def is_content_blocks(content: object) -> TypeGuard[list[dict[str, Any]]]:
    """Return True for a non-empty list of text and image blocks; tools may return other lists."""
    return (
        isinstance(content, list)
        and bool(content)
        and all(
            isinstance(block, dict)
            and (
                block.get("type") == "image"
                or (block.get("type") == "text" and isinstance(block.get("text"), str))
            )
            for block in content
        )
    )


def with_rendered_results(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with tool results as chat templates render them: text, or blocks with an image."""

    def rendered(content: Any) -> Any:
        if not is_content_blocks(content):
            return str(content)
        return content if any(block["type"] == "image" for block in content) else content_text(content)

    return [
        {**message, "content": rendered(message["content"])} if message["role"] == "tool" else message
        for message in messages
    ]


def replace_surrogates(value: T) -> T:
    """Return a copy of JSON-like data without lone surrogates, which JSON can carry but no tokenizer encodes.

    Each becomes U+FFFD, in strings at any depth of lists, tuples and dicts.
    """
    given: Any = value
    if isinstance(given, str):
        return cast(
            T,
            given if given.isascii() else given.encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
        )
    if type(given) in (list, tuple):
        return type(given)(map(replace_surrogates, given))
    if type(given) is dict:
        return cast(T, {replace_surrogates(key): replace_surrogates(each) for key, each in given.items()})
    return value


def has_surrogates(value: object) -> bool:
    """Return True if a string in JSON-like data has lone surrogates, at any depth."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:  # UTF-8 encodes every other character
            return True
        return False
    if isinstance(value, dict):
        return any(map(has_surrogates, value)) or any(map(has_surrogates, value.values()))
    return isinstance(value, (list, tuple)) and any(map(has_surrogates, value))


def set_pad_token(tokenizer: PreTrainedTokenizerBase, owner: str) -> None:
    """Set a missing pad token to the EOS token.

    Args:
        owner: whose tokenizer it is, for the message.

    Raises:
        ConfigError: the tokenizer has neither.
    """
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the {type(tokenizer).__name__} of {owner} has neither a pad token nor an EOS token, so that "
            "texts of different lengths make no batch; set tokenizer.pad_token to one of its tokens"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token


def tokens_without_embedding(
    tokenizer: PreTrainedTokenizerBase, num_embeddings: int | None
) -> tuple[list[str], bool]:
    """Return the tokens whose id is beyond a model's embedding, and True if one is not an added token.

    Models are released with added tokens that only a larger relative embeds; other tokens beyond the
    embedding are a sign of another model's tokenizer.
    """
    if num_embeddings is None or len(tokenizer) <= num_embeddings:
        return [], False
    tokens = [token for token, index in tokenizer.get_vocab().items() if index >= num_embeddings]
    return tokens, not set(tokens) <= set(tokenizer.get_added_vocab())


def content_blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the content of a message as a list of blocks.

    Keys whose value is None are dropped: Arrow gives every block of a dataset the keys of all blocks.
    """
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{key: value for key, value in block.items() if value is not None} for block in content or ()]


def content_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Join the text of content blocks; a string is returned as it is.

    Raises:
        ConfigError: a block is not of type ``text``.
    """
    if isinstance(content, str):
        return content
    other = [block.get("type") for block in content if block.get("type") != "text"]
    if other:
        raise ConfigError(
            f"content block of type {other[0]!r}, but with a tokenizer, tools and environments support text "
            "only; allowed: type 'text'"
        )
    return "".join(block["text"] for block in content)


def with_text_content(prompt: Prompt) -> Prompt:
    """Return a copy of the prompt whose contents are strings, as chat templates of text models expect.

    Raises:
        ConfigError: a content block is not of type ``text``.
    """
    if not is_conversational(prompt):
        return prompt
    return [{**message, "content": content_text(message.get("content") or "")} for message in prompt]


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message; blocks of other types are skipped."""
    return "".join(block.get("text", "") for block in content_blocks(message) if block.get("type") == "text")
