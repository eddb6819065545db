"""Settings of the current optimizer step, which may change during a run and when a run resumes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments

from groupwise.config.resolution import DerivedInt, resolve_defaults
from groupwise.config.sampling import SAMPLING_FIELDS, sampler_settings
from groupwise.config.settings import OPTIMIZER_STATE, PROMPT_ORDER, SCHEDULE
from groupwise.config.validation import check_changes
from groupwise.errors import ConfigError, warn_once

if TYPE_CHECKING:
    from groupwise.config.grpo_config import GRPOConfig

logger = logging.getLogger(__name__)


class StepSettings:
    """Settings of a run, with the changes that were made after the trainer was built.

    A change is an assignment to an attribute of the trainer (``trainer.beta = 0.1``) or to a field of its
    configuration (``trainer.args.beta = 0.1``); the later one counts. ``Setting.changes`` says when it takes
    effect. The configuration itself is never changed here.

    Attributes:
        current: settings of the current step, a copy of ``args`` with the changes in effect.
    """

    def __init__(self, args: GRPOConfig) -> None:
        self.args = args
        self._read = _own_fields(args)  # values of ``args`` when they were read last
        self._read_by_run = _run_fields(args)
        self.current = _copy(args, self._read)
        self._assigned: dict[str, Any] = {}

    def value(self, name: str) -> Any:
        """Return the value that was set last, which may take effect at the next step."""
        given = getattr(self.args, name)
        if self.args.SETTINGS[name].changes is None:
            return getattr(self.current, name)
        return given if given != self._read[name] else self._assigned.get(name, given)

    def assign(self, name: str, value: Any, attribute: str) -> None:
        """Set a setting from the next step on; the arguments and errors are those of :meth:`checked`."""
        self._assigned[name] = self.checked(name, value, attribute)
        self._read[name] = _plain(getattr(self.args, name))

    def checked(self, name: str, value: Any, attribute: str) -> Any:
        """Return a value that may be assigned; scalars of NumPy and torch become numbers.

        Args:
            name: field of the configuration.
            attribute: name that the user assigned to, for messages.

        Raises:
            ConfigError: the value is invalid, or the setting cannot change during a run.
        """
        setting = self.args.SETTINGS[name]
        if hasattr(value, "item"):
            value = value.item()
        if name == "top_k" and value == -1:
            value = 0  # off, as in a configuration
        if setting.changes is None:
            if value != getattr(self.current, name):
                raise ConfigError(
                    f"trainer.{attribute}={value!r}: {name} is read when the trainer is built and stays "
                    f"{getattr(self.current, name)!r}; build a trainer with GRPOConfig({name}={value!r}) and "
                    "continue with train(resume_from_checkpoint=…)"
                )
        elif message := setting.violation(f"trainer.{attribute}", value, getattr(self.args, name)):
            raise ConfigError(message)
        return value

    def hold(self, sampler: Mapping[str, Any]) -> GRPOConfig:
        """Return the settings with those that the generation batch of a checkpoint was sampled with.

        They stay until the next generation begins; a warning names those that differ from the configuration.

        Args:
            sampler: saved :func:`~groupwise.config.sampling.sampler_settings`.
        """
        now = sampler_settings(self.current)
        changed = {name: value for name, value in sampler.items() if value != now[name]}
        if changed:
            self.current = _copy(self.current, changed)
            logger.warning(
                "resumed with %s: the generation batch of the checkpoint was sampled and is finished with %s",
                ", ".join(f"{name}={now[name]}" for name in changed),
                ", ".join(f"{name}={value}" for name, value in changed.items()),
            )
        return self.current

    def begin_step(self, *, new_generation: bool, new_run: bool = False) -> GRPOConfig:
        """Return the settings of the next step: changes take effect.

        Args:
            new_generation: the step begins with a new generation; settings of the sampler then change too.
            new_run: the step is the first one of a run, or outside a run.

        Raises:
            ConfigError: a changed setting is invalid or contradicts another one.
        """
        for name, read in self._read.items():
            given = getattr(self.args, name)
            if given != read:
                self._read[name] = _plain(given)
                self._assigned.pop(name, None)  # the configuration was changed last
                if self.args.SETTINGS[name].changes is None:
                    warn_once(
                        logger,
                        "args.%s=%s has no effect: it is read when the trainer is built, and the run "
                        "continues with %s",
                        *(name, repr(given), repr(getattr(self.current, name))),
                    )
        for name, given in _run_fields(self.args).items():
            if given != self._read_by_run[name] and not new_run:
                logger.warning("args.%s=%r has no effect on a run that has started", name, given)
            self._read_by_run[name] = given
        held = [name for name in self._read if self.args.SETTINGS[name].changes == "generation"]
        values = {name: self.value(name) for name in self._read}
        if not new_generation:
            values |= {name: getattr(self.current, name) for name in held}
        chosen = _copy(self.args, values)
        resolve_defaults(chosen)
        changed = {name for name in self._read if getattr(chosen, name) != getattr(self.current, name)}
        if changed:
            # Sampler arguments that have a field were copied to it when the configuration was built.
            kwargs: dict[str, Any] = chosen.generation_kwargs or {}  # type: ignore[assignment]
            others = {key: value for key, value in kwargs.items() if SAMPLING_FIELDS.get(key) not in changed}
            chosen.generation_kwargs = others or None
            check_changes(chosen, changed)
        self.current = chosen
        return chosen


def _own_fields(config: GRPOConfig) -> dict[str, Any]:
    """Return the settings that the trainer reads; other fields of ``TrainingArguments`` are ``Trainer``'s."""
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    names = [
        name for name, setting in config.SETTINGS.items() if not (name in inherited or setting.renamed_to)
    ]
    return {name: _plain(getattr(config, name)) for name in [*names, "per_device_train_batch_size"]}


def _run_fields(config: GRPOConfig) -> dict[str, Any]:
    """Return the settings that ``Trainer`` reads when a run starts."""
    return {
        name: getattr(config, name) for name, setting in config.SETTINGS.items() if setting.changes == "run"
    }


def _plain(value: Any) -> Any:
    """Return a copy of a container, so that a change in place is seen."""
    return value.copy() if isinstance(value, dict | list) else value


def _copy(config: GRPOConfig, values: dict[str, Any]) -> GRPOConfig:
    """Return a copy with other values; ``copy.copy`` would mask tokens."""
    made: GRPOConfig = object.__new__(type(config))
    vars(made).update(vars(config))
    vars(made).update({name: _plain(value) for name, value in values.items()})
    return made


#: Schedules whose arguments are in their saved state; the others are functions of the step.
_STATEFUL_SCHEDULES = ("reduce_lr_on_plateau", "greedy")


def resume_settings(config: GRPOConfig, train_dataset: object) -> dict[str, Any]:
    """Return the settings that a checkpoint keeps to name changes on resume, and the number of rows."""
    names = [name for name, setting in config.SETTINGS.items() if setting.on_resume]
    values = {name: getattr(config, name) for name in [*names, "entropy_coef"]}
    if config.max_steps > 0:
        values["num_train_epochs"] = None  # not read
    values["rows of train_dataset"] = len(train_dataset) if isinstance(train_dataset, Sized) else None
    plain = {name: getattr(value, "value", value) for name, value in values.items()}  # enums as their text
    return {name: int(value) if isinstance(value, DerivedInt) else value for name, value in plain.items()}


def warn_of_changes_on_resume(saved: Mapping[str, Any], config: GRPOConfig, train_dataset: object) -> None:
    """Log a warning per consequence of changes since ``saved``, the settings of a checkpoint."""
    now = resume_settings(config, train_dataset)
    changes: dict[str, list[str]] = {}
    for name in [name for name, value in saved.items() if now.get(name) != value]:
        setting = config.SETTINGS.get(name)
        consequence = setting.on_resume if setting else PROMPT_ORDER
        if consequence == SCHEDULE and now["lr_scheduler_type"] in _STATEFUL_SCHEDULES:
            consequence = OPTIMIZER_STATE if name == "lr_scheduler_kwargs" else ""
        changes.setdefault(consequence, []).append(f"{name}={now.get(name)} (was {saved[name]})")
    for consequence, changed in changes.items():
        if consequence:
            logger.warning("resumed with %s, %s", ", ".join(changed), consequence)
