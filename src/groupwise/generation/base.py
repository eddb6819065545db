"""Contract of generation backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from groupwise.policy.weight_iterator import PolicyWeights
from groupwise.records import Completion, SamplingOptions
from groupwise.records.fast_paths import FastPath

#: Settings of the run: no field of ``SamplingOptions`` is set.
RUN_SETTINGS = SamplingOptions()


class GenerationBackend(ABC):
    """Sampler of completions. All methods but ``generate`` have defaults, for a backend without own weights.

    Attributes:
        end_tokens: token ids that end a completion.
        version: optimizer step of the weights it samples from; None forces the next ``sync_weights``.
        context_length: maximum number of prompt and completion tokens; None: the model's own limit.
        generator: random numbers of the samples that this process draws; None: torch's global generator.
        supports_images: ``SamplingOptions.images`` is respected; prompts with images are refused otherwise.
    """

    end_tokens: frozenset[int]
    version: int | None = None
    context_length: int | None = None
    generator: torch.Generator | None = None
    supports_images: bool = False

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions = RUN_SETTINGS
    ) -> list[Completion]:
        """Sample one completion per prompt.

        Args:
            prompts: B token lists without padding; the rows of a group are adjacent.
            sampling: settings of this call. Calling its ``on_finished`` for prompts that are finished before
                the others is optional.

        Returns:
            B completions in the order of ``prompts``. Equal prompts give independent samples. A completion
            ends with its first end token, or has ``truncated=True``.

        Raises:
            BackendError: generation failed; a ``ConnectionError`` too if a server is unavailable.
        """

    def fast_paths(self, policy: Any) -> list[FastPath]:
        """Return the states of the backend's fast paths, for the line at the beginning of a run.

        Args:
            policy: below wrappers.
        """
        return [FastPath("decoding", type(self).__name__)]

    def reports_sampling_mask(self, generation_kwargs: Mapping[str, Any]) -> bool:
        """Return True if completions have ``sampling_mask`` with top_p, top_k or min_p.

        Otherwise the trainer's log-probs are of the full distribution, which biases the importance ratio.

        Args:
            generation_kwargs: sampler settings of a request, see ``SamplingOptions``.
        """
        return False

    @property
    def requires_all_ranks(self) -> bool:
        """True if ``generate`` contains collectives, so that all ranks must call it equally often."""
        return True

    def prefetch(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions, *, step: int
    ) -> Sequence[Future[Completion]] | None:
        """Start generating the completions that ``generate`` will return at optimizer step ``step``.

        Returns:
            B futures, one per prompt, with which the later turns of agents are sampled ahead, too, in calls
            from other threads; None: they wait for their step.
        """
        return None

    def sync_weights(self, source: PolicyWeights, *, step: int) -> None:
        """Load the policy's weights of optimizer step ``step``; a no-op if ``version == step``.

        Args:
            source: weights of the policy. A backend may keep it until the next call and read it again, for
                example for a restarted server.
            step: number of optimizer steps that led to these weights.
        """
        self.version = step

    def invalidate_weights(self) -> None:
        """Make the next ``sync_weights`` load the weights at any step, as after loading a checkpoint."""
        self.version = None

    def release(self) -> None:
        """Free memory that is not needed before the next ``sync_weights``."""

    def disconnect(self) -> None:
        """Close the connections and remove the files of ``sync_weights``, which opens them again.

        Called when ``train`` ends, also with an error.
        """

    def snapshot(self) -> Any:
        """Return the state that a checkpoint needs: completions, numbers, strings and containers of them."""

    def restore(self, snapshot: Any) -> None:
        """Return to the state of a snapshot, of this process or from a checkpoint."""

    def close(self) -> None:
        """Release processes, connections and memory. May be called more than once."""
