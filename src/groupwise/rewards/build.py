"""Check and load the reward functions of a trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from groupwise.config.grpo_config import GRPOConfig
from groupwise.errors import ConfigError
from groupwise.rewards.runtime.calling import reward_name, unique_names
from groupwise.rewards.runtime.marking import is_per_sample_reward
from groupwise.rewards.runtime.models import RewardModel, load_reward_model
from groupwise.rewards.runtime.partial import with_partial_results

#: A callable, a sequence-classification model, or the id of one.
RewardFunc = Callable[..., Any] | PreTrainedModel | str
Tokenizer = PreTrainedTokenizerBase | None


@dataclass(frozen=True)
class RewardSetup:
    """Checked arguments: reward functions and their tokenizers, lists of equal length."""

    functions: list[RewardFunc]
    processing_classes: list[Tokenizer]


@dataclass(frozen=True)
class LoadedRewards:
    """Loaded reward functions; all lists have F entries.

    functions: the user's functions and models, ids replaced by the loaded models.
    callables: functions to call with the arguments of a reward function.
    names: unique names for metrics.
    processing_classes: tokenizers of reward models, None for callables.
    weights: weights in the aggregated reward.
    """

    functions: list[RewardFunc]
    callables: list[Callable[..., Any]]
    names: list[str]
    processing_classes: list[Tokenizer]
    weights: list[float]


def check_rewards(
    reward_funcs: RewardFunc | list[RewardFunc] | tuple[RewardFunc, ...] | None,
    processing_classes: Tokenizer | list[Tokenizer] | tuple[Tokenizer, ...],
    config: GRPOConfig,
    environment_rewards: Sequence[Callable[..., Any]] = (),
) -> RewardSetup:
    """Convert ``reward_funcs`` and ``reward_processing_classes`` to lists of equal length and check them.

    The caller's lists are not modified.

    Args:
        environment_rewards: reward functions of environments; appended with weight 1.

    Raises:
        ConfigError: there is no function, an entry is not one, or lengths differ.
    """
    functions: list[RewardFunc] = []
    if isinstance(reward_funcs, (list, tuple)):
        functions = list(reward_funcs)
    elif reward_funcs is not None:
        functions = [reward_funcs]
    if not functions and not environment_rewards:
        raise ConfigError("reward_funcs is missing; pass a reward function, a reward model or a list of them")
    for function in functions:
        if not (callable(function) or isinstance(function, str)):
            raise ConfigError(
                f"reward_funcs holds {function!r} ({type(function).__name__}); allowed: callables, "
                "sequence-classification models and ids of such models"
            )
        _check_signature(function)
    tokenizers = (
        list(processing_classes)
        if isinstance(processing_classes, (list, tuple))
        else [processing_classes] * len(functions)
    )
    for name, given in (
        ("reward_processing_classes", tokenizers),
        ("reward_weights", config.reward_weights or functions),
    ):
        if len(given) != len(functions):
            raise ConfigError(
                f"{name} has {len(given)} entries for {len(functions)} reward functions; give one for each"
            )
    return RewardSetup([*functions, *environment_rewards], [*tokenizers, *[None] * len(environment_rewards)])


#: Keyword arguments of every reward function, for any dataset.
_ALWAYS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def _check_signature(function: RewardFunc) -> None:
    if isinstance(function, (str, PreTrainedModel)):
        return
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return
    refused = [name for name in _ALWAYS if name not in parameters]
    if refused and all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise ConfigError(
            f"reward function {reward_name(function)!r} does not accept {', '.join(refused)}; these and "
            "every dataset column are passed as keyword arguments: add **kwargs to its parameters"
        )


def load_rewards(rewards: RewardSetup, config: GRPOConfig, accelerator: Accelerator) -> LoadedRewards:
    """Load reward models given by id and move all reward models to their device."""
    functions: list[RewardFunc] = []
    callables: list[Callable[..., Any]] = []
    tokenizers: list[Tokenizer] = []
    for function, tokenizer in zip(rewards.functions, rewards.processing_classes, strict=True):
        if isinstance(function, str):
            function = load_reward_model(function, config.trust_remote_code)
        functions.append(function)
        if isinstance(function, PreTrainedModel):
            model = accelerator.prepare_model(function, evaluation_mode=True)
            reward_model = RewardModel(
                model,
                tokenizer,
                config.per_device_train_batch_size,
                config.trust_remote_code,
                config.chat_template_kwargs,  # type: ignore[arg-type]
            )
            callables.append(reward_model)
            tokenizers.append(reward_model.tokenizer)
        else:
            # Partial calls start when a backend calls `SamplingOptions.on_finished`.
            callables.append(with_partial_results(function) if is_per_sample_reward(function) else function)
            tokenizers.append(None)
    names = unique_names([reward_name(function) for function in functions])
    given = config.reward_weights or []  # rewards of environments follow with weight 1
    weights = given + [1.0] * (len(functions) - len(given))
    return LoadedRewards(functions, callables, names, tokenizers, weights)
