"""A generation backend without a model: random tokens, or the prompt's last token when greedy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from groupwise.generation.base import RUN_SETTINGS, GenerationBackend
from groupwise.records import Completion, SamplingOptions


class EchoBackend(GenerationBackend):
    """Samples three tokens from 4 to 31 and the end token; greedy ones repeat the last prompt token."""

    end_tokens = frozenset([1])

    def __init__(self, max_tokens: int = 6, seed: int = 0) -> None:
        self.max_tokens, self.random = max_tokens, random.Random(seed)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions = RUN_SETTINGS
    ) -> list[Completion]:
        limits = sampling.max_tokens or [self.max_tokens] * len(prompts)
        greedy = sampling.generation_kwargs.get("temperature") == 0
        return [self._complete(prompt, limit, greedy) for prompt, limit in zip(prompts, limits, strict=True)]

    def _complete(self, prompt: Sequence[int], limit: int, greedy: bool) -> Completion:
        tokens = [prompt[-1] if greedy else self.random.randrange(4, 32) for _ in range(3)] + [1]
        return Completion(tokens[:limit], truncated=limit < len(tokens))

    def snapshot(self) -> tuple[Any, ...]:
        return self.random.getstate()

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        self.random.setstate(snapshot)
