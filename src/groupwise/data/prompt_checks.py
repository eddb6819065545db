"""Check prompts before anything expensive: missing, empty or too long, each named by its row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import datasets
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import chosen_backend
from groupwise.errors import ConfigError
from groupwise.policy.build import text_config
from groupwise.tokenization.images import is_processor
from groupwise.tokenization.prompts import is_conversational, tokenize_prompt

#: Upper bound of the tokens that a chat template adds to a message.
_MESSAGE_TOKENS = 64


class Context(NamedTuple):
    """Maximum number of prompt and completion tokens, and the setting that it comes from."""

    tokens: int
    setting: str


class PromptCheck:
    """Check that the prompt of a row is present, not empty, and short enough.

    Args:
        name: the dataset, for messages.
        context: limit of prompt and completion; None: no limit.
    """

    def __init__(
        self,
        name: str,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        config: GRPOConfig,
        context: Context | None,
    ) -> None:
        self.name = name
        tokenizer: Any = getattr(processing_class, "tokenizer", processing_class)
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        self.config = config
        # The tokens of an image are known only after processing it, which is too slow to do in advance.
        self.context = None if is_processor(processing_class) else context
        self.template_tokens: int | None = None
        # If only the processor has the chat template, the length of a chat cannot be computed here.
        self.template_is_in_processor = (
            self.tokenizer is not processing_class and getattr(self.tokenizer, "chat_template", None) is None
        )

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

    def check_all(self, prompts: Iterable[Any]) -> None:
        for index, prompt in enumerate(prompts):
            self.check_prompt(prompt, index)

    def check_prompt(self, prompt: Any, index: int) -> None:
        where = f"{self.name}, row {index}"
        messages = isinstance(prompt, list) and all(
            isinstance(message, dict) and "role" in message for message in prompt
        )
        if not (isinstance(prompt, str) or messages):
            raise ConfigError(
                f"{where}: the prompt is {prompt!r:.80} ({type(prompt).__name__}); allowed: a string, or a "
                "list of messages with a 'role'"
            )
        if len(prompt) == 0:
            raise ConfigError(f"{where}: the prompt is empty; remove the row or give it a prompt")
        if self.context is not None:
            self._check_length(prompt, where)

    def _check_length(self, prompt: Any, where: str) -> None:
        assert self.context is not None
        room = self.context.tokens - self.config.max_completion_length
        if is_conversational(prompt) and self.template_is_in_processor:
            return
        is_chat = is_conversational(prompt)
        texts = [message.get("content") or "" for message in prompt] if is_chat else [prompt]
        if not all(isinstance(text, str) for text in texts):  # images
            return
        # A token has at least one byte, so that most prompts need no tokenization.
        size = sum(len(text.encode(errors="replace")) + _MESSAGE_TOKENS for text in texts)
        if self.template_tokens is not None and size + self.template_tokens <= room:
            return
        length = len(
            tokenize_prompt(
                self.tokenizer,
                prompt,
                self.config.chat_template_kwargs,  # type: ignore[arg-type]
                self.config.max_prompt_length,
            )
        )
        if self.template_tokens is None:
            self.template_tokens = length
        if length > room:
            raise ConfigError(
                f"{where}: the prompt has {length} tokens, but a context of {self.context.tokens} "
                f"({self.context.setting}) leaves {max(room, 0)} beside "
                f"max_completion_length={self.config.max_completion_length}; shorten or remove it, "
                + (f"set max_prompt_length={room}, " if room > 0 else "")
                + "or lower max_completion_length"
            )


def context_length(model: str | PreTrainedModel, config: GRPOConfig) -> Context | None:
    """Return the limit of prompt and completion tokens; None if there is none."""
    limits = {"max_position_embeddings": getattr(text_config(model, config), "max_position_embeddings", None)}
    if chosen_backend(config) == "colocate":
        limits["vllm_max_model_length"] = config.vllm_max_model_length
    known = {name: tokens for name, tokens in limits.items() if tokens is not None}
    return min((Context(tokens, name) for name, tokens in known.items()), default=None)


def known_prompts(dataset: Any) -> Iterable[Any] | None:
    """Return all prompts of a dataset in memory; None if rows are computed on access."""
    if isinstance(dataset, datasets.Dataset):
        made_on_reading = dataset.format["type"] == "custom" or "Image(" in str(dataset.features["prompt"])
        return None if made_on_reading else dataset.with_format(None).select_columns("prompt")["prompt"]
    if isinstance(dataset, (list, tuple)):
        return [row.get("prompt") if isinstance(row, dict) else row for row in dataset]
    return None
