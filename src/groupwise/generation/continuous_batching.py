"""Generation with the continuous batching of transformers: a paged cache, and a scheduler that fills it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from groupwise.errors import BackendError, ConfigError
from groupwise.generation.decoding import requires_lockstep_forwards
from groupwise.generation.transformers_generate import TransformersBackend, generation_config
from groupwise.policy.attention import own_attention_closed
from groupwise.records import Completion, SamplingOptions

#: Of the memory that is free when a generation begins; the rest is for what else happens then.
_MEMORY = 0.5
_AS_CONFIGURED = SamplingOptions()


class ContinuousBatchingBackend(TransformersBackend):
    """Samples with ``model.generate_batch``: rows join and leave the running batch one by one.

    Args:
        model: returns the unwrapped policy.
        generation_config: sampling settings.
        batching: of the type ``ContinuousBatchingConfig``.
    """

    def __init__(
        self, model: Callable[[], PreTrainedModel], generation_config: GenerationConfig, batching: Any
    ) -> None:
        super().__init__(model, generation_config)
        self.batching = batching

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions = _AS_CONFIGURED
    ) -> list[Completion]:
        """Sample one completion per prompt.

        Raises:
            BackendError: transformers gave some up.
        """
        model: Any = self.model()
        if requires_lockstep_forwards(model):
            raise BackendError(
                "continuous batching runs another number of forwards on every rank, and the parameters are "
                "spread over ranks; set use_transformers_continuous_batching=False"
            )
        was_training = model.training
        try:
            with own_attention_closed(model):
                outputs = model.generate_batch(
                    [list(prompt) for prompt in prompts],
                    generation_config=self._config_for(sampling),
                    continuous_batching_config=dataclasses.replace(self.batching),
                    progress_bar=False,
                )
        finally:
            model.train(was_training)
        results = list(outputs.values())
        failed = [result.error for result in results if result.error is not None]
        if failed or len(results) < len(prompts):
            raise BackendError(
                f"continuous batching returned {len(results) - len(failed)} of {len(prompts)} completions"
                + (f"; the first failed with: {failed[0]}" if failed else "; see the errors logged above")
            )
        limits = sampling.max_tokens or [self.generation_config.max_new_tokens] * len(prompts)
        return [
            self._completion(result.generated_tokens[:limit])
            for result, limit in zip(results, limits, strict=True)
        ]


def check_settings(config: Any) -> None:
    """Refuse settings that ``ContinuousBatchingConfig`` does not have.

    Raises:
        ConfigError: with the nearest name.
    """
    batching_config(config.transformers_continuous_batching_config)


def batching_config(given: dict[str, Any] | None) -> Any:
    """The settings of transformers, with half of the memory for the cache unless they say otherwise."""
    try:
        from transformers import ContinuousBatchingConfig
    except ImportError as missing:
        raise ConfigError(
            "use_transformers_continuous_batching=True needs transformers>=5.8; upgrade it, or set "
            "use_transformers_continuous_batching=False"
        ) from missing
    names = [field.name for field in dataclasses.fields(ContinuousBatchingConfig)]
    for name in given or {}:
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1, cutoff=0)[0]
            raise ConfigError(
                f"transformers_continuous_batching_config has no setting {name!r}; nearest valid: {nearest!r}"
            )
    return ContinuousBatchingConfig(**{"max_memory_percent": _MEMORY, **(given or {})})


def make_backend(
    policy: Callable[[], PreTrainedModel], config: Any, processing_class: Any, never: Sequence[int] = ()
) -> ContinuousBatchingBackend:
    """What samples with the policy itself.

    Raises:
        ConfigError: the sampling settings need what continuous batching leaves out.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    sampler = generation_config(config, policy(), tokenizer, never)
    _check_sampling(policy(), sampler)
    batching = batching_config(config.transformers_continuous_batching_config)
    return ContinuousBatchingBackend(policy, sampler, batching)


@torch.no_grad()
def _check_sampling(model: Any, sampler: GenerationConfig) -> None:
    """transformers drops what it does not support, and says so once; the distribution would be another."""
    processors = model._get_logits_processor(sampler)
    dropped = [
        type(p).__name__ for p in processors if getattr(p, "supports_continuous_batching", None) is False
    ]
    if dropped:
        raise ConfigError(
            f"use_transformers_continuous_batching=True cannot apply {', '.join(dropped)}; drop the settings "
            "behind it (such as repetition_penalty or those in generation_kwargs), or set "
            "use_transformers_continuous_batching=False"
        )
