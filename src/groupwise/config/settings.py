"""Metadata of configuration fields, read by validation, ``--help``, docs, doctor and model card.

A `Setting` has the constraints of one field, a `Condition` what it requires of other fields.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Literal, TypeVar

from groupwise.config.redact import masked
from groupwise.errors import ConfigError, nearest_name, shortened

Config = TypeVar("Config", bound=type)

#: Least similarity (0 to 1) of a name that is suggested for an unknown one: one character of seven differs.
_NEAR = 0.85


@dataclass(frozen=True)
class Condition:
    """Requirement on other settings.

    text: completes "has no effect unless" and "requires", for example "beta > 0".
    holds: returns True if a configuration meets the requirement.
    reason: why a setting requires it.
    reads: settings whose values the message of a violation shows.
    nearest: way out, a format string over the configuration ``c``; empty: the default of the setting that
        requires it.
    lasts: also checked when another setting changes during a run; β, for example, may go to 0.
    """

    text: str
    holds: Callable[[Any], bool]
    reason: str = ""
    reads: tuple[str, ...] = ()
    nearest: str = ""
    lasts: bool = False

    def violations(self, name: str, default: object, config: Any) -> Iterator[str]:
        """Yield a message if the value of ``name`` is not the default and the requirement is not met."""
        value = getattr(config, name)
        if value == default or self.holds(config):
            return
        shown = ", ".join(f"{other}={getattr(config, other)!r}" for other in self.reads)
        given = f"{name}={shortened(masked(value, name))}" + (f" with {shown}" if shown else "")
        why = f": {self.reason}" if self.reason else f" requires {self.text}"
        nearest = self.nearest.format(c=config) or f"{name}={default!r}"
        yield violation(f"{given}{why}", self.text, nearest)


def on(name: str) -> Condition:
    """Return the condition that the switch ``name`` is on."""
    return Condition(f"{name}=True", attrgetter(name))


#: Consequences of changes on resume; ``on_resume`` of several settings.
PROMPT_ORDER: Final = (
    "which changes the order of prompts: some prompts of this epoch may be repeated or skipped; the "
    "generation batch of the checkpoint is finished first"
)
SAMPLER: Final = "which acts from the next generation on; that of the checkpoint is finished first"
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

    >>> temperature: Annotated[float, Setting("Sampling temperature.", gt=0)] = 1.0

    help: meaning, in whole sentences.
    ge, gt, le, lt: bounds; None is valid if the type of the field includes it.
    choices: valid strings. A registry is read at each validation: names that are registered later are valid.
    no_effect_unless: the value is ignored otherwise; building the configuration logs a warning.
    requires: a value other than the default is an error if one of these is not met.
    unsupported: reason why a value other than the default is an error.
    ignored: reason why the value is never used; it is replaced by the default, with a warning.
    renamed_to: present name of a field that is an old name.
    card: listed in the model card always, or if it differs from the default. Fields that can hold addresses,
        paths, credentials or free text are never listed.
    changes: when a change takes effect: at the next optimizer step, at the first step that begins with a new
        generation, or with the next run; None: the setting is read when the trainer is built.
    on_resume: consequence of a value that differs from that of the checkpoint; the resumed run warns with it.
    types, items: accepted types of the value and of its elements; filled in from the annotation, empty if
        they are not checked.
    default: the default that the class of the setting declares; filled in.
    """

    help: str = ""
    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf
    lt: float = math.inf
    choices: Collection[str] = ()
    no_effect_unless: Condition | None = None
    requires: tuple[Condition, ...] = ()
    unsupported: str | None = None
    ignored: str | None = None
    renamed_to: str | None = None
    card: Literal["always", "if_changed"] | None = None
    changes: Literal["step", "generation", "run"] | None = None
    on_resume: str = ""
    types: frozenset[type] = frozenset()
    items: frozenset[type] = frozenset()
    default: object = None

    @property
    def allowed(self) -> str:
        """Choices and bounds in words; empty if every value of the type is valid."""
        lower = f"> {self.gt}" if self.gt > -math.inf else f">= {self.ge}" if self.ge > -math.inf else ""
        upper = f"< {self.lt}" if self.lt < math.inf else f"<= {self.le}" if self.le < math.inf else ""
        return ", ".join(filter(None, (*self.choices, " and ".join(filter(None, (lower, upper))))))

    @property
    def description(self) -> str:
        """Meaning and conditions, as in the documentation."""
        unless, requires = self.no_effect_unless, [condition.text for condition in self.requires]
        parts = [
            f"Old name of {self.renamed_to}." if self.renamed_to else self.help,
            f"No effect unless {unless.text}." if unless else "",
            f"Requires {'; '.join(requires)}." if requires else "",
            f"Not supported: {self.unsupported}." if self.unsupported else "",
            f"No effect: {self.ignored}." if self.ignored else "",
        ]
        return " ".join(filter(None, parts))

    @property
    def flag(self) -> dict[str, object]:
        """Arguments for argparse, as ``HfArgumentParser`` reads them from the metadata of a field."""
        text = f"{self.description} Allowed: {self.allowed}." if self.allowed else self.description
        # The flag alone means True; for HfArgumentParser only if the default is a bool.
        optional = {"nargs": "?", "const": True} if bool in self.types and self.default is None else {}
        return {"help": text.replace("%", "%%"), **optional}  # argparse expands %

    def violation(self, name: str, value: object, default: object) -> str | None:
        """Return a message if ``value`` is invalid by itself: its type, not finite, out of range, unknown."""
        given, kinds, items = f"{name}={shortened(value)}", type_names(self.types), type_names(self.items)
        missing, values = default is dataclasses.MISSING, value if isinstance(value, list) else [value]
        hint = f"a value of {kinds}" if missing else f"{default!r} (the default)"
        if self.unsupported and value != default:
            reason = f"{given} is not supported: {self.unsupported}"
            return violation(reason, repr(default), f"{name}={default!r}")
        if self.types and not has_type(value, self.types):
            return violation(f"{given} is of type {type(value).__name__}", kinds, hint)
        if value is values and items and not (values and all(has_type(v, self.items) for v in values)):
            return violation(f"{given} is no list of {items}", f"one {items} or several", hint)
        if any(isinstance(item, float) and not math.isfinite(item) for item in values):
            return violation(f"{given} is not finite", "finite numbers", hint)
        unknown = [item for item in values if isinstance(item, str) and item not in (self.choices or (item,))]
        if unknown:
            nearest = repr(nearest_name(unknown[0], self.choices))
            return violation(f"{given} is unknown", self.allowed, nearest)
        for number in (item for item in values if isinstance(item, int | float)):
            if not (self.ge <= number <= self.le and self.gt < number < self.lt):
                lowest = str(self.ge) if self.ge > -math.inf else f"any value above {self.gt}"
                highest = str(self.le) if self.le < math.inf else f"any value below {self.lt}"
                nearest = highest if number > self.le or number >= self.lt else lowest
                return violation(f"{given} is out of range", self.allowed, nearest)
        return None


def violation(given: str, allowed: str, nearest: str) -> str:
    """Return the message of a violated constraint."""
    return f"{given}; allowed: {allowed}; nearest valid: {nearest}"


def refuse_unknown(
    given: Mapping[str, tuple[str, str]], options: Collection[str], what: str = "settings"
) -> None:
    """Refuse names that are not settings, or arguments, all in one message.

    Args:
        given: name, and the way out where it is known, by how the message shows the name.
        options: names that others are compared with.

    Raises:
        ConfigError: one line for each name, with its way out or the nearest option.
    """
    lines = []
    for shown, (name, reason) in given.items():
        nearest = nearest_name(name, options, cutoff=_NEAR)
        hint = '; names of other versions and libraries: "Coming from TRL" in the documentation'
        if nearest:
            hint = f"; nearest: {'--' * shown.startswith('flag') + nearest!r}"
        lines.append(f"{shown}: {reason}" if reason else f"unknown {shown}{hint}")
    if lines:
        raise ConfigError("\n  - ".join([f"{len(lines)} name(s) that are no {what}:", *lines]))


def check_value(name: str, value: object, kind: type, **bounds: Any) -> None:
    """Raise ConfigError unless an argument is valid as a setting of this type with the ``bounds`` of one."""
    if message := Setting(types=frozenset({kind}), **bounds).violation(name, value, dataclasses.MISSING):
        raise ConfigError(message)


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
    return frozenset(typing.get_origin(kind) or kind for kind in _members(hint))


def _members(hint: object) -> tuple[type, ...]:
    """Return the members of a union, or a single type, without metadata."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (typing.cast(type, hint),)


def default_of(config: Any, name: str) -> object:
    """Return the default of a field in the class of ``config``; subclasses may change it."""
    field = config.__dataclass_fields__[name]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def field_violations(config: Any) -> dict[str, list[str]]:
    """Return a message for each field of a dataclass with ``SETTINGS`` whose value is invalid by itself."""
    found = {}
    for field in dataclasses.fields(config):
        setting = config.SETTINGS.get(field.name, Setting())
        message = setting.violation(field.name, getattr(config, field.name), default_of(config, field.name))
        if message is not None:
            found[field.name] = [message]
    return found


def raise_for(violations: Mapping[str, list[str]], subject: str) -> None:
    """Raise one error for all violations.

    Raises:
        ConfigError: there is one; its message begins with ``subject``.
    """
    found = [message for messages in violations.values() for message in messages]
    if found:
        lines = "".join(f"\n  - {message}" for message in found)
        raise ConfigError(f"{subject}: {len(found)} invalid setting(s){lines}")


def card_settings(config: Any) -> dict[str, object]:
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

    Args:
        inherited: settings of fields that a base class declares; others are skipped.
    """

    def decorate(config_class: Config) -> Config:
        hints = typing.get_type_hints(config_class, include_extras=True)
        settings: dict[str, Setting] = {}
        for name in config_class.__annotations__:
            for setting in typing.get_args(hints[name])[1:]:  # of Annotated[types, Setting(…)]
                lists = [kind for kind in _members(hints[name]) if typing.get_origin(kind) is list]
                full = settings[name] = dataclasses.replace(
                    setting,
                    types=types_of(hints[name]),
                    items=frozenset(item for kind in lists for item in typing.get_args(kind)),
                    default=getattr(config_class, name, dataclasses.MISSING),
                )
                field: object = dataclasses.field(default=full.default, metadata=full.flag)
                setattr(config_class, name, field)
        for name, setting in inherited.items():
            if name in hints:
                kinds = types_of(hints[name]) if setting.allowed else frozenset()
                default = default_of(config_class, name)
                settings[name] = dataclasses.replace(setting, types=kinds, default=default)
        config_class.SETTINGS = settings  # type: ignore[attr-defined]
        return config_class

    return decorate
