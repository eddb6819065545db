"""The trainer's class and the arguments that everything else is checked with."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from groupwise.config.grpo_config import GRPOConfig
from groupwise.errors import ConfigError

logger = logging.getLogger(__name__)

#: Methods of TRL's trainer that nothing calls here, and what to override or call in their place.
ELSEWHERE = {
    "_generate": "generate_rollouts",
    "_generate_single_turn": "generate_rollouts",
    "_tokenize_prompts": "generate_rollouts",
    "_tool_call_loop": "generate_rollouts",
    "_get_tool_suffix_ids": "generate_rollouts",
    "_calculate_rewards": "compute_rewards",
    "_generate_and_score_completions": "generate_rollouts, compute_rewards and compute_advantages",
    "_get_per_token_logps_and_entropies": "compute_logprobs",
    "_compute_loss": "compute_policy_loss",
    "get_high_entropy_mask": "compute_entropy_masks",
    "get_off_policy_mask": "compute_policy_loss",
    "get_gamma_weights": "compute_policy_loss",
    "_log_metric": "log_metric in a reward function",
    "_log_completion_extra": "log_extra in a reward function",
}


#: How a path begins that cannot be a hub id.
_LOCAL = ("/", "./", "../", "~")


def model_name(model: str | PreTrainedModel) -> str:
    """The last component of a model's id or directory."""
    path = model if isinstance(model, str) else model.config._name_or_path
    return os.path.basename(os.path.normpath(path)) if path else type(model).__name__


def check_arguments(trainer: type, model: Any, args: Any) -> GRPOConfig:
    """The configuration, the default one for None.

    Raises:
        ConfigError: a subclass overrides what is never called, ``args`` is something else, the model's
            directory does not exist, or the output directory cannot be written.
    """
    unheard = [f"{name} (here: {ELSEWHERE[name]})" for name in ELSEWHERE if hasattr(trainer, name)]
    if unheard:
        raise ConfigError(
            f"{trainer.__name__} defines {', '.join(unheard)}, which nothing calls in this trainer: it would "
            "train without it. Move the code to what is named, or rename a helper of your own; see "
            "docs/migrating.md"
        )
    if args is None:
        args = GRPOConfig(f"{model_name(model)}-GRPO")
    if not isinstance(args, GRPOConfig):
        raise ConfigError(
            f"args is a {type(args).__module__}.{type(args).__name__}; it must be a groupwise.GRPOConfig"
        )
    if isinstance(model, str) and model.startswith(_LOCAL) and not Path(model).is_dir():
        raise ConfigError(f"model={model!r} is not a directory; pass that of a checkpoint, or a hub id")
    if args.include_num_input_tokens_seen != "no":  # Trainer looks for the tokens in a dictionary of tensors
        logger.warning("include_num_input_tokens_seen is ignored: num_tokens in the logs counts them")
        args.include_num_input_tokens_seen = "no"
    if args.should_save:
        _check_writable(args.output_dir)
    return args


def _check_writable(directory: str) -> None:
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise ConfigError(f"output_dir={directory!r} cannot be made ({cause}); choose another one") from cause
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir={directory!r} cannot be written; choose another one")
