"""Text of messages and properties of tokenizers: helpers that every room shares."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, TypeVar, cast

from groupwise.errors import ConfigError

if TYPE_CHECKING:  # worker processes of rewards read texts without loading transformers
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

#: A tokenizer, or the processor of a vision-language model.
ProcessingClass: TypeAlias = "PreTrainedTokenizerBase | ProcessorMixin"

T = TypeVar("T")


def content_blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the content of a message as a list of blocks.

    Keys whose value is None are dropped: Arrow gives every block of a dataset the keys of all blocks.
    """
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{key: value for key, value in block.items() if value is not None} for block in content or ()]


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


def content_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Join the text of content blocks; a string is returned as it is.

    Raises:
        ConfigError: a block is not of type ``text``.
    """
    if isinstance(content, str):
        return content
    for block in content:
        if not (isinstance(block, Mapping) and block.get("type") == "text" and "text" in block):
            raise ConfigError(
                f"content block {block!r:.80}, but a tokenizer reads text only; allowed: {{'type': 'text', "
                "'text': ...}; for images pass the processor of a vision-language model as processing_class"
            )
    return "".join(block["text"] for block in content)


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message; blocks without text, and other values in a list, are skipped."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(block.get("text") or "" for block in content if isinstance(block, Mapping))


def with_rendered_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with tool results as chat templates render them: text, or blocks with an image."""

    def rendered(content: Any) -> Any:
        if content is None or (is_content_blocks(content) and any(b["type"] == "image" for b in content)):
            return content
        return content_text(content) if is_content_blocks(content) else str(content)

    return [
        {**message, "content": rendered(message.get("content"))} if message["role"] == "tool" else message
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


def text_tokenizer(processing_class: ProcessingClass) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a processor, or the tokenizer itself."""
    return cast("PreTrainedTokenizerBase", getattr(processing_class, "tokenizer", processing_class))


def end_tokens(config: object, tokenizer: PreTrainedTokenizerBase | None = None) -> list[int]:
    """Return the token ids that end a completion: ``config.eos_token_id``, and the tokenizer's EOS token.

    Args:
        config: generation config of the model, or its config; None: there is none.
    """
    of_model = getattr(config, "eos_token_id", None)
    of_tokenizer = getattr(tokenizer, "eos_token_id", None)
    tokens = [*(of_model if isinstance(of_model, Sequence) else [of_model]), of_tokenizer]
    return sorted({token for token in tokens if token is not None})


def is_truncated(token_ids: Sequence[int], end_tokens: Collection[int]) -> bool:
    """Return True for a completion that does not end in an end token."""
    return not token_ids or token_ids[-1] not in end_tokens


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


def response_attribute(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the name of the attribute by which ``parse_response`` splits a turn; None: there is none.

    Raises:
        ConfigError: there is one, but the installed transformers does not read it.
    """
    has_schema = bool(getattr(tokenizer, "response_schema", None))  # read by older versions of transformers
    if getattr(tokenizer, "response_template", None):
        if "prefix" in inspect.signature(tokenizer.parse_response).parameters:
            return "response_template"
        if not has_schema:
            raise ConfigError(
                "the tokenizer has a response_template, but the installed version of transformers reads "
                "tokenizer.response_schema: set that, or install a newer version (5.19 reads templates)"
            )
    return "response_schema" if has_schema else None
