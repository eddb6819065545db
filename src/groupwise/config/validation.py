"""Validation of a configuration: all violations in one error, a warning per setting without effect.

Constraints of a single setting are its `Setting` in ``grpo_config.py``, relations between settings are
functions in ``rules.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, cast

from groupwise.config.rules import CAUTIONS, RULES, Check
from groupwise.config.settings import Setting, default_of, violation
from groupwise.config.trl import is_trl_default
from groupwise.errors import ConfigError, warn_once

if TYPE_CHECKING:
    from groupwise.config.grpo_config import GRPOConfig

logger = logging.getLogger(__name__)


def check(config: GRPOConfig) -> None:
    """Raise one error for all violations; warn, once each, about settings without effect and cautions.

    Raises:
        ConfigError: one line per violation.
    """
    _raise_for(violations(config), type(config).__name__)
    for message in warnings_of(config):
        warn_once(logger, message)


def check_changes(config: GRPOConfig, changed: Collection[str]) -> None:
    """Raise one error for all violations after some settings changed; warn about those without effect.

    A setting that requires another one is not checked again when the other one changes: β may go to 0.

    Raises:
        ConfigError: one line per violation.
    """
    found = {
        name: messages
        for name, messages in violations(config).items()
        if name in changed or name not in config.SETTINGS
    }
    _raise_for(found, f"{', '.join(sorted(changed))} changed during the run")
    for name in sorted(changed):
        unless = config.SETTINGS[name].no_effect_unless
        if unless is not None and not unless.holds(config):
            warn_once(logger, f"{name} was changed, but has no effect unless {unless.text}")


def _raise_for(violations: Mapping[str, list[str]], subject: str) -> None:
    found = [message for messages in violations.values() for message in messages]
    if found:
        lines = "".join(f"\n  - {message}" for message in found)
        raise ConfigError(f"{subject}: {len(found)} invalid setting(s){lines}")


def violations(config: GRPOConfig) -> dict[str, list[str]]:
    """Return the messages of all violations by the name of the setting or of the rule."""
    found = {}
    for item in dataclasses.fields(config):
        setting = config.SETTINGS.get(item.name, Setting())
        message = setting.violation(item.name, getattr(config, item.name), default_of(config, item.name))
        if message is not None:
            found[item.name] = [message]
    checks: dict[str, Check] = {
        name: functools.partial(_requirement, name, setting)
        for name, setting in config.SETTINGS.items()
        if setting.requires
    }
    valid = cast("GRPOConfig", _ValidSettings(config, found.keys()))
    checks |= {rule.name: rule.check for rule in RULES}
    for name, relation in checks.items():
        try:
            messages = list(relation(valid))
        except _InvalidSettingError:
            continue
        if messages:
            found[name] = messages
    return found


def warnings_of(config: GRPOConfig) -> list[str]:
    """Return the messages about a valid configuration: settings without effect, and cautions.

    A setting has no effect if its condition does not hold; its default, and TRL's, are not mentioned.
    """
    messages = [message for caution in CAUTIONS for message in caution.check(config)]
    for name, setting in config.SETTINGS.items():
        value, unless = getattr(config, name), setting.no_effect_unless
        if value == default_of(config, name) or is_trl_default(name, value):
            continue
        if setting.ignored:
            messages.append(f"{name}={value!r} is ignored: {setting.ignored}")
        elif unless is not None and not unless.holds(config):
            messages.append(f"{name}={value!r} has no effect unless {unless.text}")
    return messages


class _InvalidSettingError(Exception):
    """A rule read a setting that is invalid by itself."""


class _ValidSettings:
    """View of a configuration for rules: reading a setting that is reported already ends the rule."""

    def __init__(self, config: GRPOConfig, invalid: Collection[str]) -> None:
        self._config, self._invalid = config, frozenset(invalid)

    def __getattr__(self, name: str) -> object:
        if name in self._invalid:
            raise _InvalidSettingError(name)
        return getattr(self._config, name)


def _requirement(name: str, setting: Setting, config: GRPOConfig) -> Iterator[str]:
    value, default, condition = getattr(config, name), default_of(config, name), setting.requires
    if condition is not None and value != default and not condition.holds(config):
        yield violation(f"{name}={value!r} requires {condition.text}", condition.text, f"{name}={default!r}")
