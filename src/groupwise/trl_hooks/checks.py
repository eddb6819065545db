"""Overrides and settings of TRL's trainer that the hooks do not support, with their counterparts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from transformers import TrainerCallback

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.objectives import OBJECTIVES
from groupwise.core.weights import NORMALIZERS
from groupwise.errors import ConfigError, warn_once
from groupwise.reporting.callback import GRPOCallback
from groupwise.tokenization.images import is_processor

logger = logging.getLogger(__name__)

#: Methods of TRL's trainer, and of groupwise's, that are not called here, or not for training, and the
#: counterpart. An override is refused.
REFUSED_METHODS = {
    "_tool_call_loop": "generate_rollouts, or tools and environment_factory",
    "_get_tool_suffix_ids": "generate_rollouts, or tools and environment_factory",
    "get_off_policy_mask": "_compute_loss",
    "get_gamma_weights": "_compute_loss",
    "_prepare_input": "_prepare_inputs",
    "_get_dataloader": "get_train_dataloader and get_eval_dataloader",
    "_remove_unused_columns": "get_train_dataloader and get_eval_dataloader",
    "_log_metric": "log_metric in a reward function",
    "_log_completion_extra": "log_extra in a reward function",
    "make_window": "_prepare_inputs",
    "make_train_experience": "_generate_and_score_completions",
    "make_micro_batches": "_prepare_inputs",
    "set_token_weights": "_compute_loss",
    "compute_entropy_masks": "get_high_entropy_mask",
    "compute_logprobs": "_get_per_token_logps_and_entropies",
}

#: Methods that exist here, but whose overrides would not be called with tools or environments.
NOT_CALLED_WITH_TOOLS = {
    "_tokenize_prompts": "with tools or environments the chat template of processing_class, or _generate",
}

#: Settings that TRL's hooks cannot express: the default, the reason, and the counterpart.
REFUSED_SETTINGS: dict[str, tuple[Any, str, str]] = {
    "dynamic_sampling": (
        False,
        "calls the hooks of generation and rewards several times per batch",
        "drop rows in _generate_and_score_completions, or use groupwise.GRPOTrainer, whose generate_rollouts "
        "and compute_rewards are called once per round",
    ),
    **dict.fromkeys(
        ("prompt_filter", "curriculum"),
        (
            None,
            "chooses prompts by earlier rewards, and TRL reads the next ones before",
            "override _get_train_sampler, or use groupwise.GRPOTrainer",
        ),
    ),
    "rollout_staleness": (
        0,
        "samples completions before their hook is called",
        "use groupwise.GRPOTrainer, whose compute_rewards receives completions that were sampled ahead",
    ),
    "router_aux_loss_scope": (
        "micro_batch",
        "computes the loss of a micro-batch before the next one is known",
        "use groupwise.GRPOTrainer, which has all micro-batches of an update",
    ),
    "router_replay": (
        "disabled",
        "needs the experts of every token, and hooks receive token ids alone",
        "use groupwise.GRPOTrainer",
    ),
    "rollout_on_error": (
        "raise",
        "takes failed completions out of their groups, which have num_generations rows in the hooks",
        "return an error message from the tool, or use groupwise.GRPOTrainer, whose compute_rewards receives "
        "the completions that succeeded",
    ),
}

NO_REF_LOGPS = (
    "beta={beta} needs 'ref_per_token_logps', which the dictionary of a micro-batch lacks: return it from "
    "_generate_and_score_completions. If the run resumed inside a generation that was made with beta=0, "
    "resume with beta=0 and set trainer.args.beta later, or from a checkpoint at the end of a generation"
)

#: Keys of a dictionary of a micro-batch that TRL passes to the model.
IMAGE_INPUTS = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)

NO_IMAGES = (
    "groupwise.trl_hooks does not support images; use groupwise.GRPOTrainer, whose generate_rollouts, "
    "compute_logprobs and compute_policy_loss receive them in records"
)


def refuse_images(inputs: Mapping[str, Any]) -> None:
    """Refuse inputs of which one in ``IMAGE_INPUTS`` is not None.

    Raises:
        ConfigError: with the counterpart.
    """
    given = [name for name in IMAGE_INPUTS if inputs.get(name) is not None]
    if given:
        raise ConfigError(f"{', '.join(given)}: {NO_IMAGES}")


def refuse_resampling() -> NoReturn:
    """Refuse to iterate the loader of the run, which here does not continue the run's order.

    TRL's sampler goes on with its generator, so that a hook which iterates the loader gets rows of the next
    permutations and changes the rows of later epochs.

    Raises:
        ConfigError: always, with the counterpart.
    """
    raise ConfigError(
        "callback_handler.train_dataloader was iterated, whose rows would not be those of TRL: iterate a "
        "loader of your own, made once, such as trainer.get_train_dataloader(), or use groupwise.GRPOTrainer "
        "with dynamic_sampling=True"
    )


def check_settings(args: GRPOConfig, processing_class: Any, curriculum: object = None) -> None:
    """Refuse settings that change the step in a way that TRL's hooks cannot express.

    Raises:
        ConfigError: with the counterpart.
    """
    for name, (default, reason, counterpart) in REFUSED_SETTINGS.items():
        value = getattr(args, name, curriculum)
        if value != default:
            raise ConfigError(
                f"{name}={value!r} {reason}, so groupwise.trl_hooks does not support it; set "
                f"{name}={default!r}, or {counterpart}"
            )
    if args.use_liger_kernel and args.device.type != "cuda":
        logger.warning(
            "use_liger_kernel=True has no effect: as in TRL, the loss is that of _compute_loss, and Liger's "
            "layers need a GPU"
        )
    if is_processor(processing_class):
        raise ConfigError(f"processing_class is a {type(processing_class).__name__}: {NO_IMAGES}")


def warn_of_callbacks(callbacks: Iterable[TrainerCallback]) -> None:
    """Warn about callbacks with events for records that TRL's step does not make."""
    events = ("on_window_begin", "on_loss")
    for kind in [type(callback) for callback in callbacks if isinstance(callback, GRPOCallback)]:
        if any(getattr(kind, event) is not getattr(GRPOCallback, event) for event in events):
            warn_once(
                logger,
                "%s: here a step calls on_generation_end, and neither on_window_begin nor on_loss",
                kind.__name__,
            )


def check_objective(args: GRPOConfig) -> None:
    """Refuse objectives that count the tokens of whole groups.

    Raises:
        ConfigError: with the counterpart.
    """
    if NORMALIZERS[OBJECTIVES[args.loss_type].normalizer].needs_group_tokens:
        raise ConfigError(
            f"loss_type={args.loss_type!r} counts the tokens of whole groups, which TRL's hooks may split; "
            "use another loss_type, or groupwise.GRPOTrainer"
        )
