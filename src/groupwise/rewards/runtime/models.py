"""Sequence-classification models as reward functions."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from groupwise.errors import ConfigError
from groupwise.tokenization.prompts import join_conversation


def load_reward_model(name: str, trust_remote_code: bool) -> PreTrainedModel:
    """A reward model by id or directory, with one output; the policy's own loading options do not apply."""
    return AutoModelForSequenceClassification.from_pretrained(
        name, num_labels=1, trust_remote_code=trust_remote_code
    )


class RewardModel:
    """Scores prompt and completion together with a one-label classifier.

    Args:
        model: the classifier; put in evaluation mode, never trained.
        tokenizer: its own tokenizer; loaded from the model's id when None.
        batch_size: texts per forward pass.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, batch_size: int, trust_remote_code: bool
    ) -> None:
        if model.config.num_labels != 1:
            raise ConfigError(
                f"reward model {model.config._name_or_path!r} has {model.config.num_labels} labels; a reward "
                "model has one (load it with num_labels=1)"
            )
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(
                model.config._name_or_path, trust_remote_code=trust_remote_code
            )
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        # Without it, batches of more than one text are refused or scored at the wrong token.
        model.config.pad_token_id = tokenizer.pad_token_id
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.batch_size = batch_size

    @torch.no_grad()
    def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        texts = [
            self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)
        ]
        scores: list[float] = []
        for start in range(0, len(texts), self.batch_size):
            inputs = self.tokenizer(
                texts[start : start + self.batch_size],
                return_tensors="pt",
                padding=True,
                padding_side="right",
                add_special_tokens=False,
            ).to(self.model.device)
            scores += self.model(**inputs).logits[:, 0].float().tolist()
        return scores

    def _text(self, prompt: Any, completion: Any) -> str:
        whole = join_conversation(prompt, completion)
        return whole if isinstance(whole, str) else self.tokenizer.apply_chat_template(whole, tokenize=False)
