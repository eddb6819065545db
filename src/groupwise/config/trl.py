"""Defaults of TRL's GRPOConfig where they differ from those of groupwise."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

#: Version of TRL that the defaults are those of.
TRL_VERSION = "1.16.0"

#: TRL's default by field, for every field that both configurations have with different defaults.
TRL_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "max_completion_length": 512,
        "pad_to_multiple_of": "auto",
        "top_k": 0,
        "use_bias_correction_kl": True,
        "use_transformers_paged": False,
    }
)


def is_trl_default(name: str, value: object) -> bool:
    """Return True if TRL's default of this field differs from ours and equals ``value``."""
    return name in TRL_DEFAULTS and value == TRL_DEFAULTS[name]
