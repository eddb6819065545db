"""Base class of the colocated engine and of vLLM servers: requests, seeds, limits, order of a weight sync."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import sampler_settings
from groupwise.errors import BackendError
from groupwise.generation.base import RUN_SETTINGS, GenerationBackend
from groupwise.generation.vllm.sampling import (
    DEFAULT_MAX_LOGPROBS,
    Request,
    group_requests,
    num_logprobs,
    sampling_fields,
)
from groupwise.policy.weight_iterator import PolicyWeights
from groupwise.records import Completion, SamplingOptions


class VLLMBackend(GenerationBackend):
    """Base class of backends that sample with vLLM. Subclasses implement ``complete`` and ``load_weights``.

    Args:
        config: seed, rank and length limit of the run, and the sampler settings that a request leaves out.
        end_tokens: token ids that end a completion.
        suppress_tokens: token ids that are not sampled.

    Attributes:
        sampling: fields of ``SamplingParams`` that are the same for all requests of the run.
        max_logprobs: most tokens per position whose log-probs vLLM reports; None: it reports sampling masks.
        context_limit: name of the limit ``context_length`` and the way out, for an error message.
    """

    max_logprobs: int | None = DEFAULT_MAX_LOGPROBS
    context_limit = "the server's --max-model-len {}; raise that"

    def __init__(
        self, config: GRPOConfig, end_tokens: frozenset[int], suppress_tokens: Sequence[int] = ()
    ) -> None:
        self.config, self.end_tokens = config, end_tokens
        self.sampling = sampling_fields(config, end_tokens, suppress_tokens)
        self._num_samples: dict[int, int] = {}  # by prompt, at step _num_samples_step
        self._num_samples_step: int | None = None
        self.weight_digests: dict[int, str] = {}  # of all tensors, by step

    @abstractmethod
    def complete(self, requests: list[Request], sampling: SamplingOptions) -> list[list[Completion]]:
        """Return the samples of each request."""

    @abstractmethod
    def load_weights(self, source: PolicyWeights, step: int) -> str | None:
        """Load the weights of optimizer step ``step``; returns their digest if they were compared."""

    def reports_sampling_mask(self, generation_kwargs: Mapping[str, Any]) -> bool:
        """Return True if vLLM reports masks, or log-probs of all top_k tokens: at most ``max_logprobs``."""
        limit = self.max_logprobs
        return limit is None or 0 < num_logprobs(self.shared_params(generation_kwargs)) <= limit

    def shared_params(self, generation_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of ``SamplingParams`` that all requests of a ``generate`` call share."""
        return {**self.sampling, **vars(sampler_settings(self.config)), **generation_kwargs}

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions = RUN_SETTINGS
    ) -> list[Completion]:
        """Sample one completion per prompt; adjacent equal prompts are the samples of one request.

        Raises:
            BackendError: vLLM has no weights, refuses a request, or a prompt leaves no room for a completion;
                also a ConnectionError if a server does not respond within ``vllm_server_timeout``. All ranks
                raise if one does.
        """
        if self.version is None:
            raise BackendError("vLLM has no weights of the policy; call sync_weights before generate")
        num_samples = dict(self._num_samples)
        requests = self.make_requests(prompts, sampling, self.version, num_samples)
        samples = self.complete(requests, sampling)
        self._num_samples = num_samples  # only now: a failed call is repeated with the same seeds
        completions = []
        for completion in chain.from_iterable(samples):  # with the digests of its weights, if all are known
            digests = [self.weight_digests.get(one, "") for one in dict.fromkeys(completion.versions or ())]
            known = bool(digests) and all(digests)
            completions.append(replace(completion, weight_digest="+".join(digests)) if known else completion)
        return completions

    def make_requests(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingOptions,
        step: int,
        num_samples: dict[int, int],
    ) -> list[Request]:
        """Return the requests of a ``generate`` call, in the order of its rows and within vLLM's context.

        Args:
            num_samples: see :func:`group_requests`.
        """
        limits = list(sampling.max_tokens or [self.config.max_completion_length] * len(prompts))
        if self.context_length is not None:
            room = [self.context_length - len(prompt) for prompt in prompts]
            limits = [min(pair) for pair in zip(limits, room, strict=True)]
            if min(room, default=1) < 1:
                raise BackendError(
                    f"a prompt of {max(map(len, prompts))} tokens leaves no room for a completion within "
                    f"{self.context_limit.format(self.context_length)}, or set max_prompt_length"
                )
        seed, run = self.config.seed, vars(sampler_settings(self.config))
        other = sorted(item for item in sampling.generation_kwargs.items() if item not in run.items())
        if other:  # requests with different settings must not share a key
            seed ^= zlib.crc32(repr(other).encode())
        rank = self.config.process_index
        return group_requests(prompts, limits, seed, step, rank, num_samples, sampling.images)

    def sync_weights(self, source: PolicyWeights, *, step: int) -> None:
        """Load the weights of optimizer step ``step``; a no-op if vLLM has them."""
        if self.version == step:
            return
        self.version = None  # a failed load leaves no usable weights
        if self._num_samples_step != step:
            self._num_samples, self._num_samples_step = {}, step
        self.record_digest(step, self.load_weights(source, step))
        self.version = step

    def record_digest(self, step: int, digest: str | None) -> None:
        """Keep the digest of the weights of ``step``, and of the steps before it that may still sample."""
        known = {**self.weight_digests, step: digest or ""}
        self.weight_digests = dict(sorted(known.items())[-2 - self.config.rollout_staleness :])

    def snapshot(self) -> dict[str, Any]:
        """Return what continues the sequence of seeds, samples per prompt in this step, and the digests."""
        return {
            "num_samples": (self._num_samples_step, dict(self._num_samples)),
            "weight_digests": dict(self.weight_digests),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Return to the state of a snapshot."""
        step, num_samples = snapshot["num_samples"]
        self._num_samples_step, self._num_samples = step, dict(num_samples)
        self.weight_digests = dict(snapshot["weight_digests"])
