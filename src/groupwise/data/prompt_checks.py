"""Check prompts before anything expensive: missing, empty, not renderable or too long, named by their row."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterable, Mapping
from typing import Any, cast

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from groupwise.config.grpo_config import GRPOConfig
from groupwise.errors import ConfigError, warn_once
from groupwise.policy.introspection import Context
from groupwise.tokenization.images import is_processor
from groupwise.tokenization.prompts import (
    Prompt,
    is_conversational,
    render_chat,
    text_problem,
    tokenize_prompt,
    with_text_content,
    without_added_keys,
)
from groupwise.tokenization.text import (
    content_blocks,
    message_text,
    replace_surrogates,
    text_tokenizer,
    tokens_without_embedding,
)

logger = logging.getLogger(__name__)

#: Upper bound of the tokens that a chat template adds to a message.
_MESSAGE_TOKENS = 64


class PromptCheck:
    """Check that the prompt of a row is present, not empty, can be rendered to tokens, and is short enough.

    Args:
        name: the dataset, for messages.
        context: limit of prompt and completion; None: no limit.
        num_embeddings: tokens that the model embeds; None: unknown.
        renders: the prompt is rendered to tokens here; False: by user code.
    """

    def __init__(
        self,
        name: str,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        config: GRPOConfig,
        context: Context | None,
        num_embeddings: int | None = None,
        *,
        renders: bool = False,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer = text_tokenizer(processing_class)
        self.processing_class = processing_class
        self.config = config
        self.template_kwargs: dict[str, Any] = dict(config.chat_template_kwargs or {})  # type: ignore[arg-type]
        self.renders = renders
        self.problems: set[str] = set()  # of texts, each warned about once
        self.rendered_shapes: set[int] = set()  # of prompts that rendered without a problem
        self.num_embeddings = num_embeddings
        # The image tokens of a processor may have an embedding of their own.
        size = None if is_processor(processing_class) else num_embeddings
        self.unembedded, self.is_other_vocabulary = tokens_without_embedding(tokenizer, size)
        # The tokens of an image are known only after processing it, which is too slow to do in advance.
        self.context = None if is_processor(processing_class) else context
        self.template_tokens: int | None = None
        # If only the processor or user code has the chat template, the length of a chat is unknown here.
        given = self.template_kwargs.get("chat_template")
        self.can_measure_chats = bool(given or getattr(tokenizer, "chat_template", None))
        known = [*inspect.signature(tokenizer.apply_chat_template).parameters, "processor_kwargs"]
        readers = f"{known} {given} {getattr(processing_class, 'chat_template', None)}"
        stock = type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
        judged = renders and stock  # a tokenizer with a method of its own may read any key
        for key in [key for key in self.template_kwargs if judged and key not in readers]:
            reason = "the chat template does not read it, and a processor reads processor_kwargs alone"
            warn_once(logger, f"chat_template_kwargs[%r] has no effect: {reason}", key)

    def __call__(self, row: object, index: int) -> None:
        """Check one row.

        Raises:
            ConfigError: naming the row and what is wrong with it.
        """
        if not isinstance(row, dict):
            raise ConfigError(
                f"{self.name}, row {index}: a {type(row).__name__} ({row!r:.80}); a row is a dictionary with "
                "a 'prompt'"
            )
        if "prompt" not in row:
            columns = ", ".join(map(repr, row))
            raise ConfigError(f"{self.name}, row {index}: no 'prompt' column; its columns are {columns}")
        self.check_prompt(row["prompt"], index)

    def check_prompt(self, prompt: Any, index: int) -> None:
        try:
            self._check_prompt(prompt, index)
        except ConfigError as error:
            raise ConfigError(f"{self.name}, row {index}: {error}") from None

    def _check_prompt(self, prompt: Any, index: int) -> None:
        messages = isinstance(prompt, list) and all(
            isinstance(message, dict) and "role" in message for message in prompt
        )
        if not (isinstance(prompt, str) or messages):
            raise ConfigError(
                f"the prompt is {prompt!r:.80} ({type(prompt).__name__}); allowed: a string, or a list of "
                "messages with a 'role'"
            )
        if len(prompt) == 0:
            raise ConfigError("the prompt is empty; remove the row or give it a prompt")
        if replace_surrogates(prompt) != prompt:
            raise ConfigError(
                "the prompt has a lone surrogate, half of a character, which no tokenizer encodes: "
                f"{prompt!r:.200}; repair the text, for example with text.encode('utf-16', "
                "'surrogatepass').decode('utf-16', 'replace')"
            )
        if self.renders:
            prompt = self._check_tokens(without_added_keys(prompt), index)
        if self.context is not None:
            self._check_length(prompt, self.context)

    def _check_tokens(self, prompt: Prompt, index: int) -> Prompt:
        """Check that the prompt has tokens, all of which the model embeds; return it as the template gets it.

        A chat template decides by roles, keys and types, so that one chat of each shape is rendered; so is
        every prompt that may have a token without an embedding.
        """
        with_images = is_processor(self.processing_class)
        if isinstance(prompt, str):
            problem = text_problem(self.tokenizer, prompt, adds_bos=not with_images)
            if problem and problem not in self.problems:
                self.problems.add(problem)
                logger.warning("%s, row %d: %s", self.name, index, problem)
        chat = prompt if is_conversational(prompt) else []
        for i, message in enumerate(chat):
            # Tool calls or thoughts may be in the place of the content.
            others = [value for key, value in message.items() if key not in ("role", "name", "content")]
            if message.get("content") is not None or any(others):
                continue
            raise ConfigError(
                f"message {i} of the prompt has no content, which a chat template prints as "
                f"'None' or rejects: {prompt!r:.200}; give it a text, if only '', or remove the message"
            )
        given = prompt if with_images else with_text_content(prompt)
        if with_images and chat:
            given = [{**message, "content": content_blocks(message)} for message in chat]
        shape = hash(_shape(given))
        if shape in self.rendered_shapes and not self._may_lack_embedding(given):
            return given
        text = given
        if is_conversational(given):
            text = render_chat(self.processing_class, given, self.template_kwargs)
        if with_images:  # the tokens of images are known only after processing them
            ids, is_empty = [], not text
        else:
            ids = tokenize_prompt(self.tokenizer, given, self.template_kwargs)
            is_empty = not ids
        if is_empty:
            source = "the chat template renders nothing for" if chat else "the tokenizer finds no token in"
            remedy = ", or set processing_class.chat_template" if chat else ""
            raise ConfigError(f"{source} the prompt {prompt!r:.200}; change the prompt{remedy}")
        beyond = [token for token in ids if self.unembedded and token >= cast(int, self.num_embeddings)]
        if beyond:
            raise ConfigError(
                f"the prompt has the token {self.tokenizer.convert_ids_to_tokens(beyond[0])!r} "
                f"(id {beyond[0]}), but the model has {self.num_embeddings} token embeddings and the "
                f"tokenizer {len(self.tokenizer)} tokens; use the model's own tokenizer, or pass the model "
                f"after model.resize_token_embeddings({len(self.tokenizer)})"
            )
        if not (isinstance(prompt, str) and prompt.isspace()):  # some whitespace may have a token
            self.rendered_shapes.add(shape)
        return given

    def _may_lack_embedding(self, prompt: Prompt) -> bool:
        if not self.unembedded or self.is_other_vocabulary:
            return bool(self.unembedded)
        text = "".join(map(message_text, prompt)) if is_conversational(prompt) else prompt
        return any(token in text for token in self.unembedded)

    def _check_length(self, prompt: Any, context: Context) -> None:
        room = context.tokens - self.config.max_completion_length
        is_chat = is_conversational(prompt)
        if is_chat and not self.can_measure_chats:
            return
        texts = [message.get("content") or "" for message in prompt] if is_chat else [prompt]
        if not all(isinstance(text, str) for text in texts):  # images
            return
        # A token has at least one byte, so that most prompts need no tokenization.
        size = sum(len(text.encode(errors="replace")) + _MESSAGE_TOKENS for text in texts)
        if self.template_tokens is not None and size + self.template_tokens <= room:
            return
        limit = self.config.max_prompt_length
        length = len(tokenize_prompt(self.tokenizer, prompt, self.template_kwargs, limit))
        self.template_tokens = length if self.template_tokens is None else self.template_tokens
        if length > room:
            raise ConfigError(
                f"the prompt has {length} tokens, but a context of {context.tokens} "
                f"({context.setting}) leaves {max(room, 0)} beside "
                f"max_completion_length={self.config.max_completion_length}; shorten or remove it, "
                + (f"set max_prompt_length={room}, " if room > 0 else "")
                + "or lower max_completion_length"
            )


def _shape(value: Any, key: str = "") -> object:
    """Return the roles, keys and types of messages, and which texts are blank: by these, templates differ."""
    if isinstance(value, Mapping):
        return tuple((name, _shape(each, name)) for name, each in value.items())
    if isinstance(value, list):
        return tuple(_shape(each, key) for each in value)
    if key in ("role", "type"):
        return value
    return bool(value.strip()) if isinstance(value, str) else type(value)


def known_values(dataset: Any, column: str = "prompt") -> Iterable[Any] | None:
    """Return a column of a dataset in memory; None if rows are computed on access."""
    datasets = sys.modules.get("datasets")  # else no dataset is one of its
    if datasets is not None and isinstance(dataset, datasets.Dataset):
        made_on_reading = dataset.format["type"] == "custom" or "Image(" in str(dataset.features[column])
        return None if made_on_reading else dataset.with_format(None).select_columns(column)[column]
    if isinstance(dataset, (list, tuple)):
        return [row.get(column) if isinstance(row, dict) else row for row in dataset]
    return None
