"""Render prompts with tool schemas, and the messages between two turns of the policy, to token ids."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from groupwise.records.images import ImageInputs
from groupwise.tokenization.images import is_processor, process_text, processor_required, prompt_images
from groupwise.tokenization.prompts import Message, tokenize_prompt, with_text_content
from groupwise.tokenization.templates import select_turn_template, tool_call_message
from groupwise.tokenization.text import ProcessingClass, content_blocks, text_tokenizer
from groupwise.tokenization.tool_calls import ToolSchema, TurnParser

_QUESTION: Message = {"role": "user", "content": "."}


class PrefixMismatchError(Exception):
    """The chat template renders earlier turns differently because of the messages that follow them."""


class Renderer:
    """Render prompts with the model's chat template, and later messages as token ids to append.

    Args:
        processing_class: tokenizer, or processor of a vision-language model, with a chat template.
        end_tokens: token ids that end a turn of the policy.
        with_tools: prompts contain tool schemas.
        with_images: messages may have images, if there is a processor.

    Attributes:
        tools_variable, turn_kwargs: as :func:`select_turn_template` returns them.
        parser: parses turns in the chat template's format.

    Raises:
        ConfigError: the chat template cannot be used, with the reason.
    """

    def __init__(
        self,
        processing_class: ProcessingClass,
        end_tokens: frozenset[int] = frozenset(),
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        with_tools: bool = True,
        with_images: bool = True,
    ) -> None:
        self.tokenizer = tokenizer = text_tokenizer(processing_class)
        self.processor = processing_class if with_images and is_processor(processing_class) else None
        self.end_tokens = end_tokens
        self.template_kwargs = dict(template_kwargs or {})
        if tokenizer is not processing_class and getattr(processing_class, "chat_template", None):
            self.template_kwargs.setdefault("chat_template", processing_class.chat_template)
        chat_template = self.template_kwargs.get("chat_template") or tokenizer.chat_template
        if isinstance(chat_template, dict):
            chat_template = chat_template.get("tool_use") or chat_template.get("default")
        self.tools_variable, self.turn_kwargs = select_turn_template(
            self._render, chat_template, with_tools=with_tools
        )
        self.parser = TurnParser(tokenizer, cast(str, chat_template), end_tokens, with_tools=with_tools)

    def render_prompt(self, messages: list[Message], schemas: Sequence[ToolSchema]) -> list[int]:
        """Tokenize a conversation with the model's own template, ending where the policy's turn begins."""
        return tokenize_prompt(self.tokenizer, messages, self.prompt_kwargs(schemas))

    def prompt_kwargs(self, schemas: Sequence[ToolSchema]) -> dict[str, Any]:
        """Return the chat template's variables for a prompt with these tools."""
        # Some templates announce tools for an empty list.
        tools = {self.tools_variable: schemas} if schemas else {}
        return {**self.template_kwargs, **tools}

    def may_fit(self, messages: Sequence[Message], num_tokens: int) -> bool:
        """Return False if the messages have more text than ``num_tokens`` tokens can encode.

        A result of many megabytes is refused by its length, before it is tokenized.
        """
        texts = [
            block["text"] for message in messages for block in content_blocks(message) if "text" in block
        ]
        return sum(map(len, texts)) <= num_tokens * self._max_token_length

    @functools.cached_property
    def _max_token_length(self) -> int:
        """Maximum number of characters of a token."""
        return max(map(len, self.tokenizer.get_vocab()))

    def render_next_messages(
        self, messages: list[Message], end_token: int
    ) -> tuple[list[int], ImageInputs | None]:
        """Tokenize the messages after a turn of the policy, up to where its next turn begins.

        The messages are rendered behind a short placeholder turn; the tokens behind the end of that turn are
        the result. Sampled tokens are therefore never tokenized again.

        Args:
            messages: tool or user messages.
            end_token: the token that ended the policy's turn.

        Returns:
            Token ids to append, and the model's image inputs if the messages contain images.

        Raises:
            PrefixMismatchError: the placeholder turn is rendered differently because of the messages.
        """
        turn: Message = {"role": "assistant", "content": "."}
        if messages[0]["role"] == "tool":
            turn = tool_call_message([messages[0]["name"]])  # some templates accept one call per turn only
        history = [_QUESTION, turn]
        start = len(self._tokenize([_QUESTION]))
        history_ids = self._tokenize(history)
        ids, images = self._encode(history + messages)
        end = (
            _end_of_last(history_ids, start, {end_token})
            or _end_of_last(history_ids, start, self.end_tokens)
            or len(history_ids)
        )
        if ids[:end] != history_ids[:end]:
            raise PrefixMismatchError(f"the template renders a turn differently before {messages!r:.200}")
        # Gemma 4 ends a turn with the token that begins the tool message: the policy sampled it already.
        end += ids[end : end + 1] == [end_token]
        return ids[end:], None if images is None else images.without_first(end)

    def _encode(self, messages: list[Message]) -> tuple[list[int], ImageInputs | None]:
        """Tokenize a conversation with a generation prompt, images included."""
        images = prompt_images(messages)
        if not images:
            return self._tokenize(messages, add_generation_prompt=True), None
        if self.processor is None:
            raise processor_required(f"a tool returned {len(images)} image(s)", self.tokenizer)
        text = self._render(messages, **self.turn_kwargs, add_generation_prompt=True)
        options = {**(self.template_kwargs.get("processor_kwargs") or {}), "add_special_tokens": False}
        return process_text(self.processor, text, images, **options)

    def _render(self, messages: list[Message], **template_kwargs: object) -> str:
        if self.processor is not None:  # templates of vision-language models expect content blocks
            messages = [{**message, "content": content_blocks(message)} for message in messages]
        else:
            messages = cast(list[Message], with_text_content(messages))
        kwargs = {**self.template_kwargs, **template_kwargs}
        kwargs.pop("continue_final_message", None)  # of prompts only
        return cast(str, self.tokenizer.apply_chat_template(messages, tokenize=False, **kwargs))

    def _tokenize(self, messages: list[Message], **template_kwargs: object) -> list[int]:
        text = self._render(messages, **template_kwargs, **self.turn_kwargs)
        return cast(list[int], self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _end_of_last(tokens: Sequence[int], start: int, wanted: Collection[int]) -> int | None:
    """Return the position after the last of the ``wanted`` tokens in ``tokens[start:]``, or None."""
    return next((i + 1 for i in range(len(tokens) - 1, start - 1, -1) if tokens[i] in wanted), None)
