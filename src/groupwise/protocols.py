"""The interfaces behind which implementations are exchanged. Nothing here is needed at run time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from groupwise.stages import Completion, Sampling


class GenerationBackend(Protocol):
    """Something that continues prompts.

    version: the optimizer step whose weights it samples from; None makes the next sync take place.
    """

    version: int | None

    @property
    def end_tokens(self) -> frozenset[int]:
        """Every token that ends a completion."""

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and completion that it takes; None: as many as the model does."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """One completion per prompt, in order; repeated prompts give independent samples."""

    def sync_weights(self, params: Iterator[tuple[str, torch.Tensor]], *, step: int) -> None:
        """Take over the policy's weights as of optimizer step ``step``, unless it has them already.

        Args:
            params: checkpoint names and whole tensors. Sharded ones are gathered on the way: where one
                process iterates, all must, to the end.
        """

    def release(self) -> None:
        """A rollout is over: give back what is not needed before the next ``sync_weights``."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on alike, as plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""

    def close(self) -> None:
        """Release what the backend holds."""


class RewardFunction(Protocol):
    """A reward callable: one float (or None) per completion; may be ``async``.

    Keyword arguments are ``prompts``, ``completions``, ``completion_ids``, every other dataset column,
    ``trainer_state``, ``log_extra(column, values)`` and ``log_metric(name, value)``.
    """

    def __call__(self, **kwargs: Any) -> Sequence[float | None]: ...


RolloutFunction = Callable[[list[Any], Any], dict[str, Any]]
