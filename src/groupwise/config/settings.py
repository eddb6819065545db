"""Metadata of configuration fields, read by validation, ``--help``, docs, doctor and model card."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from groupwise.errors import nearest_name

if TYPE_CHECKING:
    from groupwise.config.grpo_config import GRPOConfig

Config = TypeVar("Config", bound=type)


@dataclass(frozen=True)
class Condition:
    """Requirement on other settings.

    text: completes "has no effect unless" and "requires", for example "beta > 0".
    holds: returns True if a configuration meets the requirement.
    """

    text: str
    holds: Callable[[GRPOConfig], bool]


#: Consequences of changes on resume; ``on_resume`` of several settings.
PROMPT_ORDER: Final = (
    "which changes the order of prompts: some prompts of this epoch may be repeated or skipped; the "
    "generation batch of the checkpoint is finished first"
)
OPTIMIZER_STATE: Final = (
    "which has no effect: optimizer and schedule continue with their state and the values of the checkpoint; "
    "for other values, start a new run with the checkpoint as its model"
)
SCHEDULE: Final = (
    "which changes the learning rates from the second step on: they follow the changed schedule with the "
    "initial learning rate of the checkpoint; the first step has the learning rate that was saved"
)
TRAINER_STATE: Final = "which has no effect: the value in trainer_state.json of the checkpoint acts"


@dataclass(frozen=True)
class Setting:
    """Constraints and documentation of one field.

    >>> temperature: Annotated[float, Setting("Sampling temperature.", gt=0, example=0.0)] = 1.0

    help: meaning, in whole sentences.
    ge, gt, le: bounds; None is valid if the type of the field includes it.
    choices: valid strings. A registry is read at each validation: names that are registered later are valid.
    example: a value that violates the bounds, the choices or ``requires``; the tests build a configuration
        with it.
    no_effect_unless: the value is ignored otherwise; building the configuration logs a warning.
    requires: a value other than the default is an error otherwise.
    unsupported: reason why a value other than the default is an error.
    ignored: reason why the value is never used; it is replaced by the default, with a warning.
    renamed_to: present name of a field that is an old name.
    card: listed in the model card always, or if it differs from the default. Fields that can hold addresses,
        paths, credentials or free text are never listed.
    changes: when a change takes effect: at the next optimizer step, at the first step that begins with a new
        generation, or with the next run; None: the setting is read when the trainer is built.
    on_resume: consequence of a value that differs from that of the checkpoint; the resumed run warns with it.
    optional_value: the flag alone means True; ``HfArgumentParser`` does this only if the default is a bool.
    types: accepted types; filled in from the annotation, empty if the type is not checked.
    """

    help: str = ""
    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf
    choices: Collection[str] = ()
    example: object = None
    no_effect_unless: Condition | None = None
    requires: Condition | None = None
    unsupported: str | None = None
    ignored: str | None = None
    renamed_to: str | None = None
    card: Literal["always", "if_changed"] | None = None
    changes: Literal["step", "generation", "run"] | None = None
    on_resume: str = ""
    optional_value: bool = False
    types: frozenset[type] = frozenset()

    @property
    def allowed(self) -> str:
        """Choices and bounds in words; empty if every value of the type is valid."""
        lower = f"> {self.gt}" if self.gt > -math.inf else f">= {self.ge}" if self.ge > -math.inf else ""
        upper = f"<= {self.le}" if self.le < math.inf else ""
        return ", ".join(filter(None, (*self.choices, " and ".join(filter(None, (lower, upper))))))

    @property
    def description(self) -> str:
        """Meaning and conditions, as in the documentation."""
        parts = [f"Old name of {self.renamed_to}." if self.renamed_to else self.help]
        parts += [f"No effect unless {self.no_effect_unless.text}."] if self.no_effect_unless else []
        parts += [f"Requires {self.requires.text}."] if self.requires else []
        parts += [
            f"{reason[0].upper()}{reason[1:]}." for reason in (self.unsupported, self.ignored) if reason
        ]
        return " ".join(parts)

    def violation(self, name: str, value: object, default: object) -> str | None:
        """Return a message if ``value`` is invalid by itself: its type, not finite, out of range, unknown."""
        hint = f"{default!r} (the default)"
        if self.unsupported and value != default:
            return violation(
                f"{name}={value!r} is not supported: {self.unsupported}", repr(default), f"{name}={default!r}"
            )
        if self.types and not has_type(value, self.types):
            return violation(
                f"{name}={value!r} is of type {type(value).__name__}", type_names(self.types), hint
            )
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            return violation(f"{name}={value} is not finite", "finite numbers", hint)
        if self.choices and isinstance(value, str) and value not in self.choices:
            nearest = repr(nearest_name(value, self.choices))
            return violation(f"{name}={value!r} is unknown", self.allowed, nearest)
        if isinstance(value, int | float) and (value < self.ge or value <= self.gt or value > self.le):
            return violation(f"{name}={value} is out of range", self.allowed, self._nearest_number(value))
        return None

    def _nearest_number(self, value: float) -> str:
        if value > self.le:
            return str(self.le)
        return str(self.ge) if self.ge > -math.inf else f"any value above {self.gt}"


def violation(given: str, allowed: str, nearest: str) -> str:
    """Return the message of a violated constraint."""
    return f"{given}; allowed: {allowed}; nearest valid: {nearest}"


def type_names(kinds: frozenset[type]) -> str:
    """Return the types in words: "None or int"."""
    return " or ".join(sorted("None" if kind is type(None) else kind.__name__ for kind in kinds))


def has_type(value: object, kinds: frozenset[type]) -> bool:
    """Return True if ``value`` is of one of the types; an int is a valid float, a bool is no number."""
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, str) and dict in kinds:
        return False  # JSON text is parsed before validation; what is still text is invalid JSON
    return isinstance(value, tuple(kinds)) or (isinstance(value, int) and float in kinds)


def types_of(hint: object) -> frozenset[type]:
    """Return the types that an annotation accepts: ``list[int] | None`` accepts list and None."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = typing.cast("tuple[type, ...]", typing.get_args(hint) if union else (hint,))
    return frozenset(typing.get_origin(kind) or kind for kind in members)


def default_of(config: GRPOConfig, name: str) -> object:
    """Return the default of a field in the class of ``config``; subclasses may change it."""
    field = config.__dataclass_fields__[name]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def card_settings(config: GRPOConfig) -> dict[str, object]:
    """Return the settings of the model card: those of the method, and others that differ from the default."""
    shown = {}
    for name, setting in config.SETTINGS.items():
        value, default = (
            getattr(item, "value", item)  # enums of TrainingArguments
            for item in (getattr(config, name), default_of(config, name))
        )
        changed = (value or None) != (default or None)  # None and 0 both mean off, for example of top_k
        of_objective = name.startswith(f"{config.loss_type}_")
        if value is not None and setting.card and (setting.card == "always" or of_objective or changed):
            shown[name] = value
    return shown


def with_settings(inherited: Mapping[str, Setting]) -> Callable[[Config], Config]:
    """Class decorator: collect the `Setting` of each field in ``SETTINGS``, and give flags their help.

    ``HfArgumentParser`` passes the metadata of a dataclass field to argparse and ignores ``Annotated``, so
    the help text of a flag is stored there.

    Args:
        inherited: settings of fields that a base class declares; others are skipped.
    """

    def decorate(config_class: Config) -> Config:
        hints = typing.get_type_hints(config_class, include_extras=True)
        settings: dict[str, Setting] = {}
        for name in config_class.__annotations__:
            for setting in typing.get_args(hints[name])[1:]:
                settings[name] = dataclasses.replace(setting, types=types_of(hints[name]))
                allowed = f" Allowed: {setting.allowed}." if setting.allowed else ""
                flag = {"nargs": "?", "const": True} if setting.optional_value else {}
                text = f"{setting.description}{allowed}".replace("%", "%%")  # argparse expands %
                default = getattr(config_class, name)
                field: object = dataclasses.field(default=default, metadata={"help": text, **flag})
                setattr(config_class, name, field)
        for name, setting in inherited.items():
            if name not in hints:
                continue
            kinds = types_of(hints[name]) if setting.allowed else frozenset()
            settings[name] = dataclasses.replace(setting, types=kinds)
        config_class.SETTINGS = settings  # type: ignore[attr-defined]
        return config_class

    return decorate
