"""The configuration with TRL's defaults."""

from __future__ import annotations

import dataclasses
import typing

from groupwise.compat.trl import TRL_DEFAULTS, TRL_SPELLINGS
from groupwise.config import grpo_config

Config = typing.TypeVar("Config", bound=type[grpo_config.GRPOConfig])


def _with_trl_defaults(config_class: Config) -> Config:
    """Class decorator: declare the fields of both tables again, with TRL's default."""
    hints = typing.get_type_hints(config_class)
    for name, default in {**TRL_DEFAULTS, **TRL_SPELLINGS}.items():
        metadata = config_class.__dataclass_fields__[name].metadata  # help text of the flag
        config_class.__annotations__[name] = hints[name]
        setattr(config_class, name, dataclasses.field(default=default, metadata=metadata))
    dataclasses.dataclass(repr=False)(config_class)  # changes the class in place
    return config_class


@_with_trl_defaults
class GRPOConfig(grpo_config.GRPOConfig):
    """Settings of :class:`groupwise.GRPOConfig` with the defaults of TRL 1.16."""
