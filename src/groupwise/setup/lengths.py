"""Prompts that the sampler has room for."""

from __future__ import annotations

from typing import Any

from groupwise.config import GRPOConfig
from groupwise.errors import ConfigError
from groupwise.prompts import tokenize_prompt
from groupwise.setup.data import named_datasets
from groupwise.setup.step import chosen_backend

# the prompts with the most characters, whose tokens are counted
_LONGEST = 32


def check_prompt_lengths(
    train_dataset: Any, eval_dataset: Any, config: GRPOConfig, processing_class: Any
) -> None:
    """Refuse prompts that a colocated engine has no room for beside a whole completion.

    Tokens are counted for the prompts with the most characters; streams are not read.

    Raises:
        ConfigError: with the length that is needed.
    """
    room = config.vllm_max_model_length
    if chosen_backend(config) != "colocate" or room is None or config.max_prompt_length is not None:
        return  # a limit for prompts has been compared when the configuration was built
    for dataset in named_datasets(train_dataset, eval_dataset).values():
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "column_names"):
            continue
        longest = sorted(dataset["prompt"], key=lambda prompt: -len(str(prompt)))[:_LONGEST]
        tokens = [
            len(tokenize_prompt(processing_class, prompt, config.chat_template_kwargs))  # type: ignore[arg-type]
            for prompt in longest
        ]
        needed = max(tokens) + config.max_completion_length
        if needed > room:
            raise ConfigError(
                f"a prompt of {max(tokens)} tokens and max_completion_length={config.max_completion_length} "
                f"do not fit into vllm_max_model_length={room}; nearest valid: vllm_max_model_length="
                f"{needed}, or max_prompt_length={room - config.max_completion_length}"
            )
