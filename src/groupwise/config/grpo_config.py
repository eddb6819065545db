"""The configuration of a GRPO run: its fields are resolved and validated when it is built."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

from groupwise.config import resolution
from groupwise.config.fields import GRPOFields
from groupwise.config.redact import masked
from groupwise.config.validation import check


@dataclass(repr=False)
class GRPOConfig(GRPOFields):
    """Settings of :class:`groupwise.GRPOTrainer`: those of ``TrainingArguments`` and those of GRPO.

    Parse it with ``HfArgumentParser`` from flags, YAML or dicts; dict and list fields also accept JSON text.
    Building a configuration resolves settings that are left open, then validates all of them at once.
    ``dataclasses.replace``, and a configuration built from ``to_dict()``, derive ``epsilon_high``,
    ``num_generations_eval``, ``steps_per_generation`` and ``generation_batch_size`` again if they were
    open; a resolved ``bf16`` is kept.

    Raises:
        ConfigError: one line per violated constraint.
    """

    def __post_init__(self) -> None:
        resolution.reopen_derived(self)
        resolution.parse_strings(self)
        resolution.move_old_names(self)
        resolution.resolve_precision(self)
        resolution.resolve_trackers(self)
        # Newer transformers renamed the field, and warn about the old name even for our default.
        if getattr(self, "activation_checkpointing", True) is None:
            self.activation_checkpointing = self.gradient_checkpointing
        super().__post_init__()
        # Trainer reads it at every save; rewards, tools and scripts may change the working directory.
        self.output_dir = os.path.abspath(str(self.output_dir))
        resolution.resolve_sampling(self)
        resolution.resolve_defaults(self)
        resolution.resolve_batch_sizes(self)
        check(self)
        resolution.reset_ignored(self)
        resolution.resolve_liger(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict; ``TrainingArguments`` rewrites nested dicts, so this reads a copy."""
        return super(GRPOConfig, copy.copy(self)).to_dict()

    def __repr__(self) -> str:
        """Return the fields without tokens, also those within dicts."""
        return super(GRPOConfig, copy.copy(self)).__repr__()  # __getstate__ makes the copy

    __str__ = __repr__

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle or copy, without tokens: ``training_args.bin`` is pushed to the Hub."""
        return masked(vars(self))
