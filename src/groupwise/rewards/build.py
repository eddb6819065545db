"""Reward functions, as given and ready to be called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedModel

from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import chosen_backend
from groupwise.errors import ConfigError
from groupwise.rewards.runtime.calling import reward_name, unique_names
from groupwise.rewards.runtime.marking import is_per_sample_reward
from groupwise.rewards.runtime.models import RewardModel, load_reward_model
from groupwise.rewards.runtime.partial import with_partial_results


@dataclass(frozen=True)
class RewardSetup:
    """Reward functions as given: callables, models or names of models, with the tokenizers given for them."""

    functions: list[Any]
    processing_classes: list[Any]


@dataclass(frozen=True)
class LoadedRewards:
    """Reward functions ready to be called.

    functions: as given, names replaced by the models they stand for.
    callables: what is called, in the same order.
    names: unique names for metrics.
    processing_classes: the tokenizers of the reward models, None for callables.
    weights: what each counts.
    """

    functions: list[Any]
    callables: list[Callable[..., Any]]
    names: list[str]
    processing_classes: list[Any]
    weights: list[float]


def check_rewards(
    reward_funcs: Any,
    processing_classes: Any,
    config: GRPOConfig,
    own_rewards: Sequence[Callable[..., Any]] = (),
) -> RewardSetup:
    """One or several reward functions, and their tokenizers, as lists of equal length; the caller's lists
    stay.

    Args:
        own_rewards: those that environments give themselves. They come last, with weight 1.

    Raises:
        ConfigError: no function, something that is not one, or lists whose lengths differ.
    """
    functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    functions = [] if functions == [None] else functions
    if not functions and not own_rewards:
        raise ConfigError("reward_funcs is missing; pass a reward function, a reward model or a list of them")
    for function in functions:
        if not (callable(function) or isinstance(function, str)):
            raise ConfigError(
                f"reward_funcs holds {function!r} ({type(function).__name__}); allowed: callables, "
                "sequence-classification models and ids of such models"
            )
        _check_signature(function)
    if not isinstance(processing_classes, (list, tuple)):
        processing_classes = [processing_classes] * len(functions)
    for name, given in (
        ("reward_processing_classes", processing_classes),
        ("reward_weights", config.reward_weights or functions),
    ):
        if len(given) != len(functions):
            raise ConfigError(
                f"{name} has {len(given)} entries for {len(functions)} reward functions; give one for each"
            )
    return RewardSetup([*functions, *own_rewards], [*processing_classes, *[None] * len(own_rewards)])


#: Keyword arguments that every reward function gets, whatever the dataset is.
_ALWAYS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def _check_signature(function: Any) -> None:
    if isinstance(function, (str, PreTrainedModel)):
        return
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # not every callable tells
        return
    refused = [name for name in _ALWAYS if name not in parameters]
    if refused and all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise ConfigError(
            f"reward function {reward_name(function)!r} does not accept {', '.join(refused)}; these and "
            "every dataset column are passed as keyword arguments: add **kwargs to its parameters"
        )


def load_rewards(rewards: RewardSetup, config: GRPOConfig, accelerator: Accelerator) -> LoadedRewards:
    """Load the reward models that were given by name and put all reward models where they score."""
    functions: list[Any] = []
    callables: list[Callable[..., Any]] = []
    tokenizers: list[Any] = []
    for function, tokenizer in zip(rewards.functions, rewards.processing_classes, strict=True):
        if isinstance(function, str):
            function = load_reward_model(function, config.trust_remote_code)
        functions.append(function)
        if isinstance(function, PreTrainedModel):
            model = accelerator.prepare_model(function, evaluation_mode=True)
            scorer = RewardModel(
                model, tokenizer, config.per_device_train_batch_size, config.trust_remote_code
            )
            callables.append(scorer)
            tokenizers.append(scorer.tokenizer)
        else:
            # The other backends need the thread of the caller until all is generated.
            early = is_per_sample_reward(function) and chosen_backend(config) == "server"
            callables.append(with_partial_results(function) if early else function)
            tokenizers.append(None)
    names = unique_names([reward_name(function) for function in functions])
    given = config.reward_weights or []  # environments' own rewards come after those and weigh 1
    weights = given + [1.0] * (len(functions) - len(given))
    return LoadedRewards(functions, callables, names, tokenizers, weights)
