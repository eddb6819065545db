"""The contract of generation backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from groupwise.records import Completion, SamplingOptions

#: Returns a fresh iterator over (checkpoint name, whole tensor) of the policy; may be called more than once.
WeightSource = Callable[[], Iterator[tuple[str, torch.Tensor]]]


class GenerationBackend(ABC):
    """Sampler of completions. Everything but ``generate`` and ``end_tokens`` has a no-op default.

    Attributes:
        version: optimizer step of the weights it samples from; None forces the next ``sync_weights``.
        context_length: maximum number of prompt and completion tokens; None: the model's own limit.
    """

    version: int | None = None
    context_length: int | None = None

    @property
    @abstractmethod
    def end_tokens(self) -> frozenset[int]:
        """Token ids that end a completion."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingOptions = SamplingOptions(),  # noqa: B008
    ) -> list[Completion]:
        """Sample one completion per prompt, in order; equal prompts give independent samples."""

    def prefetch(self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions, *, step: int) -> None:
        """Start generating the completions that ``generate`` will return at optimizer step ``step``."""

    def sync_weights(self, source: WeightSource, *, step: int) -> None:
        """Load the policy's weights of optimizer step ``step``, unless ``version`` is ``step`` already.

        Args:
            source: weights of the policy. Iterating gathers sharded parameters, which is a collective: every
                rank that iterates must iterate to the end.
        """

    def invalidate_weights(self) -> None:
        """Make the next ``sync_weights`` transfer the weights, whatever its step: they changed otherwise."""
        self.version = None

    def release(self) -> None:
        """Free memory that is not needed before the next ``sync_weights``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""

    def close(self) -> None:
        """Release processes, connections and memory."""
