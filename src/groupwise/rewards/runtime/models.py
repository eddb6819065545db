"""Classifiers as reward functions: their tokenizers, and outcome rewards of sequence classification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from groupwise.errors import ConfigError
from groupwise.threads import function_name
from groupwise.tokenization.prompts import Prompt, join_conversation
from groupwise.tokenization.text import (
    message_text,
    set_pad_token,
    tokens_without_embedding,
    with_rendered_results,
)

R = TypeVar("R")
S = TypeVar("S")


def reward_tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, trust_remote_code: bool
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a reward model, by default that of the model's id, with a padding token.

    Raises:
        ConfigError: there is no tokenizer, it is another model's, or it has no token for padding.
    """
    check_reward_tokenizer(model, tokenizer)
    if tokenizer is None:
        name = model.config.name_or_path
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise _missing_tokenizer(
                model, f"its tokenizer cannot be loaded from {name!r}: {error}"
            ) from error
        check_reward_tokenizer(model, tokenizer)
    set_pad_token(tokenizer, f"reward model {model_title(model)}")
    # Without a padding token, batches of several texts raise or are scored at the wrong token.
    model.config.pad_token_id = tokenizer.pad_token_id
    return tokenizer


def check_reward_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Check that a reward model has a tokenizer, by default that of its id, whose tokens it embeds.

    Raises:
        ConfigError: none was given and the model has no id, or it is another model's.
    """
    if tokenizer is None:
        if not model.config.name_or_path:
            raise _missing_tokenizer(model, "it has no name or path to load its tokenizer from")
        return
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    tokens, is_other_vocabulary = tokens_without_embedding(tokenizer, size)
    if is_other_vocabulary:
        raise ConfigError(
            f"reward model {model_title(model)} has {size} token embeddings, but its tokenizer has "
            f"{len(tokenizer)} tokens ({tokens[0]!r} has none): it is another model's; pass the reward "
            "model's own in reward_processing_classes, or None to load it from the model's name"
        )


def model_title(model: PreTrainedModel) -> str:
    """Return the id of a reward model in messages, or its class if it has none."""
    return repr(model.config.name_or_path or type(model).__name__)


def _missing_tokenizer(model: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"reward model {model_title(model)} has no tokenizer: {reason}; pass it in "
        "reward_processing_classes, a list with one entry per reward function"
    )


class ModelReward:
    """Reward function of a classifier: its tokenizer, and forward passes of a limited number of rows.

    Args:
        model: the classifier; set to evaluation mode.
        tokenizer: tokenizer of the classifier; None: loaded from the model's id.
        batch_size: rows per forward pass.
    """

    #: The time limit of rewards runs functions in threads; all ranks of a sharded model must finish.
    runs_in_caller_thread = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        batch_size: int,
        trust_remote_code: bool,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model.eval()
        self.tokenizer = reward_tokenizer(model, tokenizer, trust_remote_code)
        self.batch_size = batch_size
        self.template_kwargs = dict(template_kwargs or {})

    @torch.no_grad()
    def in_batches(self, rows: Sequence[R], score: Callable[[Sequence[R]], list[S]]) -> list[S]:
        """Return the scores of all rows, of at most ``batch_size`` rows per call of ``score``."""
        starts = range(0, len(rows), self.batch_size)
        return [value for start in starts for value in score(rows[start : start + self.batch_size])]


class RewardModel(ModelReward):
    """Reward function that scores prompt and completion with a one-label sequence classifier.

    Raises:
        ConfigError: the classifier has more than one label.
    """

    def __init__(self, model: PreTrainedModel, *arguments: Any, **options: Any) -> None:
        if model.config.num_labels != 1:
            raise ConfigError(
                f"reward model {model_title(model)} has {model.config.num_labels} labels; a reward "
                "model has one (load it with num_labels=1)"
            )
        super().__init__(model, *arguments, **options)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Prompt], **_: object) -> list[float]:
        """Return one score per completion."""
        texts = [
            self.text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)
        ]
        return self.in_batches(texts, lambda part: self.scores(part).tolist())

    def scores(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the scores of texts in one forward pass, float32, differentiable."""
        inputs = self.tokenizer(
            list(texts),
            return_tensors="pt",
            padding=True,
            padding_side="right",
            add_special_tokens=False,
        ).to(self.model.device)
        return self.model(**inputs).logits[:, 0].float()

    def text(self, prompt: Prompt, completion: Prompt) -> str:
        """Return prompt and completion as one text, of chats through the chat template."""
        whole = join_conversation(prompt, completion, self.template_kwargs)
        if isinstance(whole, str):
            return whole
        # Prompts end where a completion begins; here the completion is part of the conversation.
        of_prompts = ("add_generation_prompt", "continue_final_message")
        kwargs = {name: value for name, value in self.template_kwargs.items() if name not in of_prompts}
        chat = [{**message, "content": message_text(message)} for message in with_rendered_results(whole)]
        return str(self.tokenizer.apply_chat_template(chat, tokenize=False, **kwargs))


def reward_name(function: object) -> str:
    """Return the name of a reward function or model in metrics and messages."""
    if isinstance(function, str):
        return function.rstrip("/").split("/")[-1]
    if isinstance(function, PreTrainedModel):
        name = function.config.name_or_path or ""
        return name.rstrip("/").split("/")[-1] or type(function).__name__
    return function_name(function)


def reward_names(functions: Sequence[object]) -> list[str]:
    """Return names for metrics; ``_2``, ``_3``, … are appended to repeated ones."""
    counts: Counter[str] = Counter()
    unique = []
    for name in map(reward_name, functions):
        counts[name] += 1
        unique.append(name if counts[name] == 1 else f"{name}_{counts[name]}")
    return unique
