"""Changes of the configuration between two optimizer steps, and since the checkpoint of a resumed run.

A script or callback changes a field of ``trainer.args``, or the attribute of the trainer that writes through
to it (:class:`TrainerAttributes`). Every step compares the configuration with a snapshot of the step before.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from collections.abc import Collection, Mapping, Sized
from types import MappingProxyType
from typing import Any, cast

from transformers import TrainingArguments

from groupwise.config.grpo_config import DerivedInt, GRPOConfig, resolve_defaults
from groupwise.config.settings import OPTIMIZER_STATE, PROMPT_ORDER, SCHEDULE
from groupwise.config.validation import check_changes
from groupwise.errors import ConfigError, shortened, warn_once

logger = logging.getLogger(__name__)

_INHERITED = {field.name for field in dataclasses.fields(TrainingArguments)}

#: Values of the settings that the trainer reads, and of those that ``Trainer`` reads when a run starts.
Snapshot = dict[str, Any]


def take_snapshot(config: GRPOConfig) -> Snapshot:
    """Return the values to compare the configuration of the next step with.

    Containers are copied, so that a change in place is seen. Other fields of ``TrainingArguments`` are
    ``Trainer``'s, which may change them.
    """
    names = [
        name
        for name, setting in config.SETTINGS.items()
        if setting.changes == "run" or not (name in _INHERITED or setting.renamed_to)
    ]
    values = {name: getattr(config, name) for name in [*names, "per_device_train_batch_size"]}
    return {name: value.copy() if isinstance(value, dict | list) else value for name, value in values.items()}


def check_step(config: GRPOConfig, before: Snapshot, *, new_run: bool) -> set[str]:
    """Validate what changed since the step before. Returns the names of the settings whose changes act.

    A setting that is read when the trainer is built gets its value back, with a warning: the configuration
    describes the run.

    Args:
        new_run: the step is the first one of a run, or outside a run.

    Raises:
        ConfigError: a changed setting is invalid or contradicts another one.
    """
    resolve_defaults(config)
    changed = {name for name, value in before.items() if getattr(config, name) != value}
    for name in sorted(changed):
        given, changes = getattr(config, name), config.SETTINGS[name].changes
        if changes == "run" and not new_run:
            logger.warning("args.%s=%r has no effect on a run that has started", name, given)
        elif changes is None:
            warn_once(
                logger,
                "args.%s=%s has no effect: it is read when the trainer is built, and the run continues "
                "with %s",
                *(name, repr(given), repr(before[name])),
            )
            setattr(config, name, before[name])
    acts = {name for name in changed if config.SETTINGS[name].changes in ("step", "generation")}
    if acts:
        check_changes(config, acts)
    return acts


def checked(config: GRPOConfig, name: str, value: Any, attribute: str) -> Any:
    """Return a value that may be assigned to a field; scalars of NumPy and torch become numbers.

    Args:
        attribute: attribute of the trainer that the user assigned to, for messages.

    Raises:
        ConfigError: the value is invalid, or the setting cannot change during a run.
    """
    setting, present = config.SETTINGS[name], getattr(config, name)
    if hasattr(value, "item"):
        value = value.item()
    if name == "top_k" and value == -1:
        value = 0  # off, as in a configuration
    if setting.changes is None:
        if value != present:
            raise ConfigError(
                f"trainer.{attribute}={shortened(value)}: {name} is read when the trainer is built and stays "
                f"{present!r}; build a trainer with GRPOConfig({name}={shortened(value)}) and continue with "
                "train(resume_from_checkpoint=…)"
            )
    elif message := setting.violation(f"trainer.{attribute}", value, present):
        raise ConfigError(message)
    return value


#: Schedules whose arguments are in their saved state; the others are functions of the step.
_STATEFUL_SCHEDULES = ("reduce_lr_on_plateau", "greedy")


def resume_settings(config: GRPOConfig, train_dataset: object) -> dict[str, Any]:
    """Return the settings that a checkpoint keeps to name changes on resume, and the number of rows."""
    names = [name for name, setting in config.SETTINGS.items() if setting.on_resume]
    values = {name: getattr(config, name) for name in [*names, "entropy_coef", "gradient_accumulation_steps"]}
    if config.max_steps > 0:
        values["num_train_epochs"] = None  # not read
    values["rows of train_dataset"] = len(train_dataset) if isinstance(train_dataset, Sized) else None
    plain = {name: getattr(value, "value", value) for name, value in values.items()}  # enums as their text
    return {name: int(value) if isinstance(value, DerivedInt) else value for name, value in plain.items()}


def fit_processes(config: GRPOConfig, before: Snapshot, state: dict[str, Any], directory: str) -> None:
    """Keep the global batch of a checkpoint of another number of processes: fewer ones accumulate more.

    Args:
        before: snapshot of ``config``; changed alike.
        state: state of a rank in the checkpoint; its settings become the present ones.

    Raises:
        ConfigError: these processes cannot form the batch; the message names the numbers that can.
    """
    saved, written_by, now = state["settings"], state["world_size"], config.world_size
    size, each = saved["generation_batch_size"], config.per_device_train_batch_size
    of_step = size // saved["steps_per_generation"] * saved["gradient_accumulation_steps"]
    unit = math.gcd(size, of_step)
    if unit % (each * now):
        numbers = [str(n) for n in range(1, unit // each + 1) if unit % (each * n) == 0]
        batch = f"a divisor of {unit // now}" if unit % now == 0 else ""
        ways = [f"start {' or '.join(numbers)} processes"] * bool(numbers)
        ways += [f"set per_device_train_batch_size to {batch}"] * bool(batch)
        raise ConfigError(
            f"checkpoint {directory!r} was written by {written_by} processes, and {now} with "
            f"per_device_train_batch_size={each} cannot form its {of_step} completions of an optimizer step, "
            f"generated {size} at a time; {', or '.join(ways)}"
        )
    accumulation, steps = of_step // (each * now), DerivedInt(size // (each * now))
    names = ("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
    for values in (vars(config), before, saved):
        values.update(zip(names, (accumulation, steps, size), strict=True))
    check_changes(config, set(names) & config.SETTINGS.keys())
    logger.warning(
        "resumed on %d processes, the checkpoint is of %d: gradient_accumulation_steps=%d keeps the %d "
        "completions of an optimizer step",
        *(now, written_by, accumulation, of_step),
    )
    # Prompts of a round of dynamic sampling come in multiples of this: its completions divide over processes.
    units = [number // math.gcd(number, config.num_generations) for number in (written_by, now)]
    if config.dynamic_sampling and units[0] != units[1]:
        logger.warning(
            "dynamic_sampling with num_generations=%d samples a multiple of %d prompts a round on %d "
            "processes, and of %d on %d: steps may have other prompts than without the change",
            *(config.num_generations, units[0], written_by, units[1], now),
        )


def warn_of_changes_on_resume(
    saved: Mapping[str, Any], config: GRPOConfig, train_dataset: object, applied: Collection[str] = ()
) -> None:
    """Log a warning per consequence of changes since ``saved``, the settings of a checkpoint.

    Args:
        applied: settings that a callback applies to the restored state.
    """
    now = resume_settings(config, train_dataset)
    changes: dict[str, list[str]] = {}
    for name in [name for name, value in saved.items() if now.get(name) != value and name not in applied]:
        setting = config.SETTINGS.get(name)
        consequence = setting.on_resume if setting else PROMPT_ORDER
        if consequence == SCHEDULE and now["lr_scheduler_type"] in _STATEFUL_SCHEDULES:
            consequence = OPTIMIZER_STATE if name == "lr_scheduler_kwargs" else ""
        changes.setdefault(consequence, []).append(f"{name}={now.get(name)} (was {saved[name]})")
    for consequence, changed in changes.items():
        if consequence:
            logger.warning("resumed with %s, %s", ", ".join(changed), consequence)


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
        self.name, self.none = name, none

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
    beta = SettingAttribute()  # weight of the KL to the reference model
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
