"""Tiny runs of iterative GRPO with a reward model that is trained on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from groupwise import GRPOConfig, IterativeConfig, IterativeGRPO
from support.resume_runs import LETTERS, llama, prompts, tokenizer


def reward_model(vocab_size: int = len(LETTERS) + 3, **changes: Any) -> LlamaForSequenceClassification:
    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=vocab_size, num_labels=1, pad_token_id=0, **sizes, **changes)
    return LlamaForSequenceClassification(config)


def has_vowel(completions: list[str], **_: Any) -> list[float]:
    """Labels of the completions."""
    return [float(any(letter in "aeiou" for letter in text)) for text in completions]


def runner(
    output_dir: str | Path,
    rewards: Any = None,
    label_func: Any = has_vowel,
    iterative: dict[str, Any] | None = None,
    callbacks: Any = None,
    judge: Any = None,
    **settings: Any,
) -> IterativeGRPO:
    """Two iterations of two steps; the reward model is trained on the completions of six prompts."""
    defaults: dict[str, Any] = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 4,
        "save_steps": 1,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "beta": 0.5,
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    loop = {"iterations": 2, "reward_prompts": 6, "reward_learning_rate": 1e-2, "reward_epochs": 2}
    functions = [judge or reward_model(), *(rewards or [])]
    return IterativeGRPO(
        llama(),
        functions if label_func is not None else rewards,
        GRPOConfig(**{**defaults, **settings}),
        iterative=IterativeConfig(**{**loop, **(iterative or {})}),
        label_func=label_func,
        train_dataset=prompts(12),
        processing_class=tokenizer(),
        reward_processing_classes=[tokenizer(), *[None] * len(rewards or [])] if label_func else None,
        callbacks=callbacks,
    )
