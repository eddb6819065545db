"""Another backend with some sampler settings replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from groupwise.generation.base import GenerationBackend
from groupwise.records import Completion, SamplingOptions


class Overriding:
    """Every call of ``backend`` goes through, with these settings in place of the run's.

    Args:
        settings: ``temperature`` (0 takes the most probable token), ``top_p``, ``top_k``, ``min_p``,
            ``repetition_penalty``.
    """

    def __init__(self, backend: GenerationBackend, settings: Mapping[str, Any]) -> None:
        self.backend = backend
        self.settings = settings

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions) -> list[Completion]:
        return self.backend.generate(prompts, replace(sampling, overrides=self.settings))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)
