"""Check and load the reward functions of a trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from groupwise.config.grpo_config import GRPOConfig
from groupwise.errors import ConfigError
from groupwise.random_state import preserved_state
from groupwise.rewards.distillation import DistillationReward
from groupwise.rewards.process import ProcessRewardModel, StepScorer, is_process_reward, load_process_reward
from groupwise.rewards.runtime.calling import reward_name, unique_names
from groupwise.rewards.runtime.marking import is_per_sample_reward
from groupwise.rewards.runtime.models import RewardModel, check_reward_tokenizer, load_reward_model
from groupwise.rewards.runtime.partial import with_partial_results

#: A callable; a sequence-classification or token-classification model, or the id of one; a wrapped one.
RewardFunc = Callable[..., Any] | PreTrainedModel | ProcessRewardModel | str
#: Entries of ``reward_funcs`` that are models.
_MODELS = (str, PreTrainedModel, ProcessRewardModel)
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
    *,
    multi_turn: bool = False,
) -> RewardSetup:
    """Convert ``reward_funcs`` and ``reward_processing_classes`` to lists of equal length and check them.

    The caller's lists are not modified.

    Args:
        environment_rewards: reward functions of environments; appended with weight 1.
        multi_turn: the rollouts have tools or environments, whose results have no steps of the policy.

    Raises:
        ConfigError: there is no function, an entry is not one, lengths differ, one tokenizer is given for
            several reward models, a model has no tokenizer or another model's, or a process reward model for
            rollouts of several turns.
    """
    functions = [] if reward_funcs is None else _as_list(reward_funcs)
    if not functions and not environment_rewards:
        raise ConfigError("reward_funcs is missing; pass a reward function, a reward model or a list of them")
    for function in functions:
        _check_function(function)
        if multi_turn and is_process_reward(function, config.trust_remote_code):
            raise ConfigError(
                f"process reward model {reward_name(function)!r} does not support tools and environments: "
                "their results are part of the completion; return (index of the step's last token, reward) "
                "from a reward function"
            )
    num_models = sum(isinstance(function, _MODELS) for function in functions)
    if num_models > 1 and not isinstance(processing_classes, (list, tuple, type(None))):
        raise ConfigError(
            f"reward_processing_classes is one {type(processing_classes).__name__} for {num_models} reward "
            "models; give a list with one entry per reward function (None for the model's own tokenizer, and "
            "for functions)"
        )
    tokenizers = (
        list(processing_classes)
        if isinstance(processing_classes, (list, tuple))
        else [processing_classes] * len(functions)
    )
    _check_lengths(
        functions,
        {"reward_processing_classes": tokenizers, "reward_weights": config.reward_weights or functions},
    )
    for function, tokenizer in zip(functions, tokenizers, strict=True):
        model = function.model if isinstance(function, ProcessRewardModel) else function
        if isinstance(model, PreTrainedModel):
            check_reward_tokenizer(model, tokenizer)
    return RewardSetup([*functions, *environment_rewards], [*tokenizers, *[None] * len(environment_rewards)])


def _as_list(functions: RewardFunc | Sequence[RewardFunc]) -> list[RewardFunc]:
    return list(functions) if isinstance(functions, (list, tuple)) else [cast("RewardFunc", functions)]


#: Keyword arguments of every reward function, for any dataset.
_ALWAYS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def _check_lengths(functions: Sequence[object], lists: Mapping[str, Sequence[object]]) -> None:
    for name, given in lists.items():
        if len(given) != len(functions):
            raise ConfigError(
                f"{name} has {len(given)} entries for {len(functions)} reward functions; give one for each"
            )


def _check_function(function: RewardFunc) -> None:
    if isinstance(function, _MODELS):
        return
    if not callable(function):
        raise ConfigError(
            f"reward_funcs holds {function!r} ({type(function).__name__}); allowed: callables, sequence- and "
            "token-classification models, ids of such models, and ProcessRewardModel"
        )
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


def check_teachers(
    functions: Sequence[RewardFunc],
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    policy: PreTrainedModel,
) -> None:
    """Check the vocabularies of the teachers among the reward functions.

    Raises:
        ConfigError: a teacher has another vocabulary than the policy.
    """
    tokenizer = cast(PreTrainedTokenizerBase, getattr(processing_class, "tokenizer", processing_class))
    for function in functions:
        if isinstance(function, DistillationReward):
            function.check_vocabulary(tokenizer, policy)


def load_reward_models(rewards: RewardSetup, config: GRPOConfig) -> RewardSetup:
    """Load the reward models that are given by id; new heads draw from the global generators.

    Raises:
        ConfigError: a model has a wrong number of labels.
    """
    return replace(rewards, functions=[_load(function, config) for function in rewards.functions])


def _load(function: RewardFunc, config: GRPOConfig) -> RewardFunc:
    if is_process_reward(function, config.trust_remote_code):
        reward = function if isinstance(function, ProcessRewardModel) else ProcessRewardModel(function)  # type: ignore[arg-type]
        loaded = load_process_reward(reward, config.trust_remote_code)
        return loaded if isinstance(function, ProcessRewardModel) else cast("PreTrainedModel", loaded.model)
    if isinstance(function, str):
        return load_reward_model(function, config.trust_remote_code)
    return function


def prepare_rewards(
    rewards: RewardSetup,
    config: GRPOConfig,
    accelerator: Accelerator,
    policy_tokenizer: PreTrainedTokenizerBase,
) -> LoadedRewards:
    """Move all reward models to their device.

    Args:
        rewards: with loaded models.
        policy_tokenizer: decodes the steps of completions for process reward models.

    Raises:
        ConfigError: a model has a wrong number of labels, or its step separator is no token.
    """
    pairs = zip(rewards.functions, rewards.processing_classes, strict=True)
    entries = [
        _prepare(function, tokenizer, config, accelerator, policy_tokenizer) for function, tokenizer in pairs
    ]
    callables, tokenizers = (list(column) for column in zip(*entries, strict=True))
    functions = rewards.functions
    return LoadedRewards(
        functions, callables, _names(functions), tokenizers, with_default_weights(config, functions)
    )


def _prepare(
    function: RewardFunc,
    tokenizer: Tokenizer,
    config: GRPOConfig,
    accelerator: Accelerator,
    policy_tokenizer: PreTrainedTokenizerBase,
) -> tuple[Callable[..., Any], Tokenizer]:
    """Return the callable of the function's rewards and the tokenizer of a reward model."""
    if is_process_reward(function):
        reward = function if isinstance(function, ProcessRewardModel) else ProcessRewardModel(function)  # type: ignore[arg-type]
        scorer = StepScorer(
            accelerator.prepare_model(reward.model, evaluation_mode=True),
            reward,
            tokenizer,
            policy_tokenizer,
            config.per_device_train_batch_size,
            config.trust_remote_code,
            config.chat_template_kwargs,  # type: ignore[arg-type]
        )
        return scorer, scorer.tokenizer
    if isinstance(function, DistillationReward):
        function.teacher = accelerator.prepare_model(function.teacher, evaluation_mode=True)
    if isinstance(function, PreTrainedModel):
        model = accelerator.prepare_model(function, evaluation_mode=True)
        reward_model = RewardModel(
            model,
            tokenizer,
            config.per_device_train_batch_size,
            config.trust_remote_code,
            config.chat_template_kwargs,  # type: ignore[arg-type]
        )
        return reward_model, reward_model.tokenizer
    assert callable(function)
    # Partial calls start when a backend calls `SamplingOptions.on_finished`.
    return with_partial_results(function) if is_per_sample_reward(function) else function, None


def _names(functions: Sequence[RewardFunc]) -> list[str]:
    return unique_names([reward_name(function) for function in functions])


def with_default_weights(config: GRPOConfig, functions: Sequence[object]) -> list[float]:
    """Return ``reward_weights``; rewards of environments follow with weight 1."""
    given = config.reward_weights or []
    return given + [1.0] * (len(functions) - len(given))


def reload_rewards(
    loaded: LoadedRewards,
    functions: RewardFunc | Sequence[RewardFunc],
    names: Sequence[str],
    processing_classes: Sequence[Tokenizer],
    weights: Sequence[float],
    config: GRPOConfig,
    accelerator: Accelerator,
    policy_tokenizer: PreTrainedTokenizerBase,
) -> LoadedRewards:
    """Return the reward functions after a script replaced some of them, their names or their weights.

    Names, tokenizers and weights that are as before follow from the functions.

    Args:
        loaded: the reward functions of the step before; returned if nothing was replaced.
        functions, names, processing_classes, weights: attributes of the trainer.
        policy_tokenizer: as in :func:`prepare_rewards`.

    Raises:
        ConfigError: an entry is not a reward function, or lengths differ.
    """
    chosen = _as_list(functions)
    same_names = list(names) == loaded.names
    same_weights = list(weights) == torch.tensor(loaded.weights).tolist()  # both rounded to float32
    same_functions = _identical(chosen, loaded.functions)
    same_tokenizers = _identical(processing_classes, loaded.processing_classes)
    if same_functions and same_names and same_weights and same_tokenizers:
        return loaded
    if not chosen:
        raise ConfigError("reward_funcs is empty; give it at least one reward function")
    for function in chosen:
        _check_function(function)
    columns = zip(loaded.functions, loaded.callables, loaded.processing_classes, strict=True)
    before = {id(entry[0]): entry for entry in columns}
    if same_tokenizers:
        processing_classes = [before[id(f)][2] if id(f) in before else None for f in chosen]
    if same_names and not same_functions:
        names = _names(chosen)
    if same_weights and set(loaded.weights) == {1.0}:
        weights = [1.0] * len(chosen)
    _check_lengths(
        chosen,
        {
            "reward_func_names": names,
            "reward_processing_classes": processing_classes,
            "reward_weights": weights,
        },
    )
    entries = []
    for function, tokenizer in zip(chosen, processing_classes, strict=True):
        entry = before.get(id(function))
        if entry is None or entry[2] is not tokenizer:
            with preserved_state():
                torch.manual_seed(config.seed)  # all ranks initialise the same head
                model = _load(function, config)
            entry = model, *_prepare(model, tokenizer, config, accelerator, policy_tokenizer)
        entries.append(entry)
    made, callables, tokenizers = (list(column) for column in zip(*entries, strict=True))
    return LoadedRewards(made, callables, list(names), tokenizers, [float(weight) for weight in weights])


def _identical(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
