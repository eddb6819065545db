"""Public attributes of the trainer that read and change settings, or are read when it is built."""

from __future__ import annotations

import sys
from types import MappingProxyType
from typing import Any, cast

from groupwise.config.step_settings import checked
from groupwise.errors import ConfigError


class SettingAttribute:
    """Attribute of the trainer that reads a setting and writes through to it: ``trainer.args``.

    ``Setting.changes`` says when a change takes effect.

    >>> class Trainer:
    ...     epsilon_low = SettingAttribute("epsilon")

    Args:
        name: field of the configuration; None: it has the name of the attribute.
        none: value that is read instead of None.
    """

    def __init__(self, name: str | None = None, *, none: Any = None) -> None:
        self.name = name
        self.none = none

    def __set_name__(self, owner: type, attribute: str) -> None:
        self.attribute = attribute
        self.name = self.name or attribute

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        value = getattr(trainer.args, cast(str, self.name))
        return self.none if value is None else value

    def __set__(self, trainer: Any, value: Any) -> None:
        name = cast(str, self.name)
        setattr(trainer.args, name, checked(trainer.args, name, value, self.attribute))


class BuiltAttribute:
    """Attribute of the trainer that is set when the trainer is built; a later assignment is an error.

    Args:
        way_out: arguments or settings to use instead.
    """

    def __init__(self, way_out: str) -> None:
        self.way_out = way_out

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        return self if trainer is None else vars(trainer)[self.name]

    def __set__(self, trainer: Any, value: Any) -> None:
        if self.name in vars(trainer):
            raise ConfigError(
                f"trainer.{self.name} is read when the trainer is built; assigning it later would have no "
                f"effect: {self.way_out}"
            )
        vars(trainer)[self.name] = value


class TrainerAttributes:
    """Public attributes of the trainer, under TRL's names; ``Setting.changes`` says when they act."""

    # The value of a setting; an assignment changes it.
    num_generations = SettingAttribute()
    num_generations_eval = SettingAttribute()
    num_iterations = SettingAttribute()
    max_completion_length = SettingAttribute()
    max_tool_calling_iterations = SettingAttribute(none=sys.maxsize)  # TRL's value, which scripts compare
    chat_template_kwargs = SettingAttribute(none=MappingProxyType({}))  # scripts pass it with **
    pad_to_multiple_of = SettingAttribute()
    shuffle_dataset = SettingAttribute()
    temperature = SettingAttribute()
    top_p = SettingAttribute()
    top_k = SettingAttribute()
    min_p = SettingAttribute()
    repetition_penalty = SettingAttribute()
    use_transformers_continuous_batching = SettingAttribute()
    use_vllm = SettingAttribute()
    vllm_mode = SettingAttribute()
    vllm_gpu_memory_utilization = SettingAttribute()
    vllm_tensor_parallel_size = SettingAttribute()
    vllm_importance_sampling_correction = SettingAttribute()
    vllm_importance_sampling_mode = SettingAttribute()
    vllm_importance_sampling_clip_max = SettingAttribute()
    vllm_importance_sampling_clip_min = SettingAttribute()
    epsilon_low = SettingAttribute("epsilon")
    epsilon_high = SettingAttribute()
    loss_type = SettingAttribute()
    importance_sampling_level = SettingAttribute()
    off_policy_mask_threshold = SettingAttribute()
    mask_truncated_completions = SettingAttribute()
    top_entropy_quantile = SettingAttribute()
    use_adaptive_entropy = SettingAttribute()
    scale_rewards = SettingAttribute()
    multi_objective_aggregation = SettingAttribute()
    log_completions = SettingAttribute()
    log_multimodal = SettingAttribute()
    log_unique_prompts = SettingAttribute()
    num_completions_to_print = SettingAttribute()
    # Set once, when the trainer is built.
    tools = BuiltAttribute("pass tools to the trainer")
    router_aux_loss_coef = BuiltAttribute("set GRPOConfig(router_aux_loss_coef=…)")
    aux_loss_enabled = BuiltAttribute("set GRPOConfig(router_aux_loss_coef=…)")
