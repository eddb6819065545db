"""Checks of the trainer's class and arguments, before anything is loaded."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path

from packaging.version import Version
from transformers import PreTrainedModel

from groupwise.compat.transformers import name_or_path
from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.rules import unsupported_parallelism
from groupwise.errors import ConfigError

#: Methods of TRL's trainer that are never called here, and the method to override or call instead.
TRL_METHODS = {
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

#: The way out for subclasses and scripts written for TRL.
TRL_HOOKS = (
    "'from groupwise.trl_hooks import GRPOConfig, GRPOTrainer', with which code written for TRL runs as it is"
)

#: The oldest DeepSpeed whose updates were seen to be those of one process; the extra in pyproject.toml.
_OLDEST_DEEPSPEED = "0.19"

#: Prefixes of local paths; a hub id has none of them.
_LOCAL = ("/", "./", "../", "~")


def model_name(model: str | PreTrainedModel) -> str:
    """Return the last component of a model's hub id or directory."""
    path = model if isinstance(model, str) else name_or_path(model.config)
    return os.path.basename(os.path.normpath(path)) if path else type(model).__name__


def check_methods(trainer: object, uncalled: Mapping[str, str]) -> None:
    """Refuse methods that would be ignored, whether a subclass defines them or a script sets them.

    Args:
        uncalled: method to override or call instead, by name of the method that is never called.

    Raises:
        ConfigError: the trainer has one of the methods ``uncalled``.
    """
    found = [
        f"{name} (here: {counterpart})" for name, counterpart in uncalled.items() if hasattr(trainer, name)
    ]
    if found:
        raise ConfigError(
            f"{type(trainer).__name__} defines {', '.join(found)}, which this trainer never calls: override "
            "the named methods instead, or rename your own helper. A subclass written for TRL runs as it is "
            "with 'from groupwise.trl_hooks import GRPOConfig, GRPOTrainer'; see docs/migrating.md"
        )


def check_arguments(model: str | PreTrainedModel, args: GRPOConfig | None) -> GRPOConfig:
    """Return the configuration of the trainer: ``args``, or the defaults if it is None.

    Raises:
        ConfigError: ``args`` has another type, the directory of the model does not exist, or the output
            directory is not writable; or an old DeepSpeed is installed.
    """
    if args is None:
        args = GRPOConfig(f"{model_name(model)}-GRPO")
    if not isinstance(args, GRPOConfig):
        raise ConfigError(
            f"args is a {type(args).__module__}.{type(args).__name__}; it must be a groupwise.GRPOConfig"
        )
    if isinstance(model, str) and model.startswith(_LOCAL) and not Path(model).is_dir():
        raise ConfigError(f"model={model!r} is not a directory; give a checkpoint directory or a hub id")
    if args.should_save and args.output_dir is not None:
        _check_writable(args.output_dir)
    if _device_map(model, args) is None:
        check_processes(args)
    if args.deepspeed_plugin is not None:
        check_version(
            "deepspeed",
            _OLDEST_DEEPSPEED,
            "training with DeepSpeed",
            "with which ZeRO-2 was seen to update embeddings wrongly, or to fail; upgrade it",
        )
    return args


def check_version(package: str, oldest: str, needed_by: str, consequence: str) -> None:
    """Check the version of an optional package.

    Raises:
        ConfigError: it is older than ``oldest``.
    """
    installed = importlib.metadata.version(package)
    if Version(installed) < Version(oldest):
        raise ConfigError(
            f"{needed_by} needs {package}>={oldest}, and {installed} is installed, {consequence}"
        )


def _device_map(model: str | PreTrainedModel, args: GRPOConfig) -> object:
    """Return the map that spreads the model over the devices of this process, or None."""
    if isinstance(model, str):
        kwargs: dict[str, object] = args.model_init_kwargs or {}  # type: ignore[assignment]
        return kwargs.get("device_map")
    return getattr(model, "hf_device_map", None)


def check_processes(args: GRPOConfig, parallelism: object = None) -> None:
    """Check that every device has a process, and that no sequence or layer is split over processes.

    Args:
        parallelism: ``ParallelismConfig`` of accelerate, which the launcher may have set.

    Raises:
        ConfigError: ``Trainer`` would use several GPUs through ``DataParallel``, which splits micro-batches
            and drops their token weights; or a split that is not supported.
    """
    if args.n_gpu > 1:
        raise ConfigError(
            f"one process sees {args.n_gpu} GPUs, and training uses one process per GPU; start it with "
            f"`accelerate launch --num_processes {args.n_gpu} SCRIPT`, or show the process one GPU with "
            "CUDA_VISIBLE_DEVICES=0"
        )
    for message in unsupported_parallelism(parallelism):
        raise ConfigError(message)


def _check_writable(directory: str) -> None:
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise ConfigError(
            f"output_dir={directory!r} cannot be created ({cause}); choose another one"
        ) from cause
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir={directory!r} is not writable; choose another one")
