"""Check and load the reward functions of a trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.advantages import above_lowest
from groupwise.errors import ConfigError, nearest_name, shortened
from groupwise.policy.introspection import check_model, unwrapped
from groupwise.random_state import preserved_state
from groupwise.rewards.distillation import DistillationReward
from groupwise.rewards.process import ProcessRewardModel, StepScorer, is_process_reward
from groupwise.rewards.runtime.marking import mark_of
from groupwise.rewards.runtime.models import RewardModel, check_reward_tokenizer, reward_name, reward_names
from groupwise.rewards.runtime.partial import with_partial_results
from groupwise.rewards.texts import require

#: A callable; a sequence-classification or token-classification model, or the id of one; a wrapped one.
RewardFunc = Callable[..., Any] | PreTrainedModel | ProcessRewardModel | str
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
#: Entries of ``reward_funcs`` that are models.
_MODELS = (str, PreTrainedModel, ProcessRewardModel)
Tokenizer = PreTrainedTokenizerBase | None


def check_rewards(
    reward_funcs: RewardFunc | list[RewardFunc] | tuple[RewardFunc, ...] | None,
    processing_classes: Tokenizer | list[Tokenizer] | tuple[Tokenizer, ...],
    config: GRPOConfig,
    environment_rewards: Sequence[Callable[..., Any]] = (),
    *,
    multi_turn: bool = False,
) -> tuple[list[RewardFunc], list[Tokenizer]]:
    """Check ``reward_funcs`` and ``reward_processing_classes`` before any model is loaded.

    The caller's lists are not modified.

    Args:
        environment_rewards: reward functions of environments; appended with weight 1.
        multi_turn: the rollouts have tools or environments, whose results have no steps of the policy.

    Returns:
        Reward functions and their tokenizers, lists of equal length.

    Raises:
        ConfigError: there is no function, an entry is not one or needs a package that is not installed,
            lengths differ, one tokenizer is given for several reward models, a model has no tokenizer or
            another model's, or a process reward model for rollouts of several turns.
    """
    functions = [] if reward_funcs is None else _as_list(reward_funcs)
    if not functions and not environment_rewards:
        raise ConfigError("reward_funcs is missing; pass a reward function, a reward model or a list of them")
    num_models = sum(isinstance(function, _MODELS) for function in functions)
    if num_models > 1 and not isinstance(processing_classes, (list, tuple, type(None))):
        raise ConfigError(
            f"reward_processing_classes is one {type(processing_classes).__name__} for {num_models} reward "
            "models; give a list with one entry per reward function (None for the model's own tokenizer, and "
            "for functions)"
        )
    for function in functions:
        _check_function(function)
        if is_process_reward(function, config.trust_remote_code) and multi_turn:  # a wrong id raises here
            raise ConfigError(
                f"process reward model {reward_name(function)!r} does not support tools and environments: "
                "their results are part of the completion; return (index of the step's last token, reward) "
                "from a reward function"
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
    return [*functions, *environment_rewards], [*tokenizers, *[None] * len(environment_rewards)]


def _as_list(functions: RewardFunc | Sequence[RewardFunc]) -> list[RewardFunc]:
    return list(functions) if isinstance(functions, (list, tuple)) else [cast("RewardFunc", functions)]


#: Keyword arguments of every reward function, for any dataset.
_ALWAYS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_IN_SOME_RUNS = ("row_ids", "turn_ends", "completion_logprobs")


def _check_lengths(functions: Sequence[object], lists: Mapping[str, Sequence[object]]) -> None:
    for name, given in lists.items():
        if len(given) != len(functions):
            raise ConfigError(
                f"{name} has {len(given)} entries for {len(functions)} reward functions; give one for each"
            )


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return {}


def _check_function(function: RewardFunc) -> None:
    if isinstance(function, nn.Module) and isinstance(unwrapped(function), PreTrainedModel):
        check_model(function, f"reward {reward_name(function)!r}")
    if isinstance(function, _MODELS):
        return
    if not callable(function):
        raise ConfigError(
            f"reward_funcs holds {shortened(function)} ({type(function).__name__}); allowed: callables, "
            "sequence- and token-classification models, ids of such models, and ProcessRewardModel; pass a "
            "function itself, not the result of its call"
        )
    if module := mark_of(function, "required_package"):
        try:
            require(module, reward_name(function))
        except ImportError as missing:
            raise ConfigError(str(missing)) from missing
    parameters = _parameters(function)
    refused = [name for name in _ALWAYS if name not in parameters]
    takes_others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if parameters and refused and not takes_others:
        single = [name for name in ("prompt", "completion") if name in parameters]
        renamed = "".join(f"rename {name} to {name}s, and " for name in single)
        raise ConfigError(
            f"reward function {reward_name(function)!r} does not accept {', '.join(refused)}; these and "
            "every dataset column are passed as keyword arguments, lists with an entry per completion: "
            f"{renamed}add **kwargs to its parameters"
        )


def check_columns(functions: Sequence[object], columns: Mapping[str, Sequence[str]]) -> None:
    """Check that every dataset has the columns that reward functions require.

    Args:
        columns: by dataset, of those that name them.

    Raises:
        ConfigError: naming the function, its parameter, the dataset and its columns.
    """
    for function in functions:
        parameters = {} if isinstance(function, _MODELS) else _parameters(function)
        required = [p.name for p in parameters.values() if p.default is p.empty and p.kind in _BY_NAME]
        for dataset, names in columns.items():
            known = {*_ALWAYS, *names, *_IN_SOME_RUNS} - {"prompt", "completion"}
            for name in (name for name in required if name not in known):
                raise ConfigError(
                    f"reward function {reward_name(function)!r} requires {name!r}, which is no column of "
                    f"{dataset}: {', '.join(map(repr, names))}; nearest: {nearest_name(name, known)!r}; "
                    "rename the column or the parameter, or give the parameter a default"
                )


def with_default_weights(config: GRPOConfig, functions: Sequence[object]) -> torch.Tensor:
    """Return ``reward_weights`` (F,) float32; rewards of environments follow with weight 1."""
    given = config.reward_weights or []
    return torch.tensor(given + [1.0] * (len(functions) - len(given)))


def load_reward_model(function: RewardFunc, config: GRPOConfig) -> RewardFunc:
    """Return a reward function, an id replaced by its model; a new head is drawn from torch's generator."""
    model = function.model if isinstance(function, ProcessRewardModel) else function
    if not isinstance(model, str):
        return function
    loaded: Any
    if is_process_reward(function, config.trust_remote_code):  # with the labels of its configuration
        loaded = AutoModelForTokenClassification.from_pretrained(
            model, trust_remote_code=config.trust_remote_code
        )
    else:  # model_init_kwargs are the policy's
        loaded = AutoModelForSequenceClassification.from_pretrained(
            model, num_labels=1, trust_remote_code=config.trust_remote_code
        )
    return replace(function, model=loaded) if isinstance(function, ProcessRewardModel) else loaded


class RewardLoader:
    """Load reward functions, each once, and notice which of them a script has replaced.

    Args:
        policy: teachers among the functions must have its vocabulary.
        policy_tokenizer: decodes the steps of completions for process reward models.

    Attributes:
        functions: the user's functions and models, ids replaced by the loaded models. All have F entries.
        callables: functions to call with the arguments of a reward function.
        names: unique names for metrics.
        processing_classes: tokenizers of reward models, None for functions.
        weights_F: weights in the aggregated reward, (F,) float32.
    """

    def __init__(
        self,
        config: GRPOConfig,
        accelerator: Accelerator,
        policy: PreTrainedModel,
        policy_tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.config, self.accelerator = config, accelerator
        self.policy, self.policy_tokenizer = policy, policy_tokenizer
        self.functions: list[RewardFunc] = []
        self.callables: list[Callable[..., Any]] = []
        self.names: list[str] = []
        self.processing_classes: list[Tokenizer] = []
        self.weights_F = torch.ones(0)

    def load(
        self,
        functions: RewardFunc | Sequence[RewardFunc],
        names: Sequence[str],
        processing_classes: Sequence[Tokenizer],
        weights_F: torch.Tensor | Sequence[float],
    ) -> bool:
        """Load the functions that are not loaded, compared by identity; return False if all is as before.

        The arguments are attributes of the trainer. Names, tokenizers and weights that are as before, beside
        other functions, follow from the functions.

        Raises:
            ConfigError: an entry is not a reward function, lengths differ, a model has a wrong number of
                labels, a step separator is no token, or a teacher has another vocabulary than the policy.
        """
        chosen, weights_F = _as_list(functions), torch.as_tensor(weights_F, dtype=torch.float32, device="cpu")
        loaded = {
            id(entry[0]): entry
            for entry in zip(self.functions, self.callables, self.processing_classes, strict=True)
        }
        same_functions = [*map(id, chosen)] == [*map(id, self.functions)]
        same_tokenizers = [*map(id, processing_classes)] == [*map(id, self.processing_classes)]
        same_names, same_weights = list(names) == self.names, torch.equal(weights_F, self.weights_F)
        if same_functions and same_names and same_tokenizers and same_weights:
            return False
        if not chosen:
            raise ConfigError("reward_funcs is empty; give it at least one reward function")
        for function in chosen:
            _check_function(function)
        if not same_functions:  # a new function has its own name and tokenizer, and weight 1
            names = reward_names(chosen) if same_names else names
            if same_tokenizers:
                processing_classes = [loaded[id(f)][2] if id(f) in loaded else None for f in chosen]
            if same_weights and bool((weights_F == 1.0).all()):
                weights_F = torch.ones(len(chosen))
        lists = {"reward_func_names": names, "reward_processing_classes": processing_classes}
        _check_lengths(chosen, {**lists, "reward_weights": weights_F.tolist()})
        entries = [
            entry
            if (entry := loaded.get(id(function))) and entry[2] is tokenizer
            else self._load(function, tokenizer)
            for function, tokenizer in zip(chosen, processing_classes, strict=True)
        ]
        self.functions, self.callables, self.processing_classes = map(list, zip(*entries, strict=True))
        self.names, self.weights_F = list(names), weights_F.clone()
        return True

    @preserved_state()  # the head of a model that a script assigns later changes no sample
    def _load(
        self, function: RewardFunc, tokenizer: Tokenizer
    ) -> tuple[RewardFunc, Callable[..., Any], Tokenizer]:
        """Return the function, an id replaced by its model on the device; its callable; its tokenizer."""
        config, prepare = self.config, partial(self.accelerator.prepare_model, evaluation_mode=True)
        options: Any = (
            config.per_device_train_batch_size,
            config.trust_remote_code,
            config.chat_template_kwargs,
        )
        torch.manual_seed(config.seed)  # all ranks initialise the same head
        function = load_reward_model(function, config)
        if is_process_reward(function, config.trust_remote_code):
            reward = function if isinstance(function, ProcessRewardModel) else ProcessRewardModel(function)  # type: ignore[arg-type]
            steps = StepScorer(prepare(reward.model), reward, tokenizer, self.policy_tokenizer, *options)
            return function, steps, steps.tokenizer
        if isinstance(function, PreTrainedModel):
            scorer = RewardModel(prepare(function), tokenizer, *options)
            return function, scorer, scorer.tokenizer
        if isinstance(function, DistillationReward):
            function.check_vocabulary(self.policy_tokenizer, self.policy)
            function.teacher = prepare(function.teacher)
        assert callable(function)
        # Partial calls start when a backend calls `SamplingOptions.on_finished`.
        is_per_sample = mark_of(function, "per_sample_reward") is True
        return function, with_partial_results(function) if is_per_sample else function, None


def rounded_functions(rewards_FN: torch.Tensor, num_generations: int) -> list[int]:
    """Return the functions with a group whose spread is below 100 times the rounding error of float32.

    A spread at the rounding error of float64 is none: the rewards are equal.
    """
    if not rewards_FN.numel():
        return []
    rewards_FPG = rewards_FN.reshape(len(rewards_FN), -1, num_generations)  # (F, N) -> (F, P, G)
    error_FP = (rewards_FPG - rewards_FPG.float().double()).abs().nan_to_num(0.0).amax(-1)
    spread_FP = above_lowest(rewards_FPG, -1).nan_to_num(0.0).amax(-1)
    magnitude_FP = rewards_FPG.abs().nan_to_num(0.0).amax(-1)
    # 1e9 + [0, 1, 2, 3] has a spread of 3, but neighbours in float32 are 64 apart there.
    is_rounded_FP = (spread_FP > 1e-12 * magnitude_FP) & (spread_FP < 100 * error_FP)
    return is_rounded_FP.any(-1).nonzero().flatten().tolist()
