"""Generation with the continuous batching of transformers: a paged key-value cache and a scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from groupwise.compat.transformers import logits_processors
from groupwise.config.grpo_config import GRPOConfig
from groupwise.distributed import requires_lockstep_forwards
from groupwise.errors import BackendError, ConfigError
from groupwise.generation import transformers_backend
from groupwise.generation.base import RUN_SETTINGS, BackendEntry, ProcessingClass, check_names, json_dict
from groupwise.generation.transformers_backend import (
    TransformersBackend,
    autocast_of_training,
    generation_config,
)
from groupwise.policy.attention import without_attention_hook
from groupwise.policy.introspection import (
    CausalLM,
    evaluation_mode,
    has_prompt_learning,
    without_router_logits,
)
from groupwise.random_state import seeded_from
from groupwise.records import Completion, SamplingOptions
from groupwise.records.fast_paths import FastPath
from groupwise.tokenization.text import text_tokenizer

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig

#: Share of the memory that is free when generation starts; training needs the rest.
_MEMORY = 0.5


class ContinuousBatchingBackend(TransformersBackend):
    """Samples with ``model.generate_batch``: rows join and leave the running batch one by one.

    Args:
        model, generation_config, config: see :class:`TransformersBackend`.
        batching: settings of cache and scheduler.
    """

    supports_images = False

    def __init__(
        self,
        model: Callable[[], PreTrainedModel],
        generation_config: GenerationConfig,
        config: GRPOConfig,
        batching: ContinuousBatchingConfig,
    ) -> None:
        super().__init__(model, generation_config, config)
        self.batching = batching

    def fast_paths(self, policy: Any) -> list[FastPath]:
        """See :meth:`GenerationBackend.fast_paths`."""
        return [FastPath("decoding", "continuous batching", "use_transformers_continuous_batching=True")]

    def reports_sampling_mask(self, generation_kwargs: Mapping[str, Any]) -> bool:
        """Return False: the scheduler applies logits processors to rows of several requests."""
        return False

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions = RUN_SETTINGS
    ) -> list[Completion]:
        model: CausalLM = self.model()
        if requires_lockstep_forwards(model):
            raise BackendError(
                "continuous batching runs a different number of forwards on each rank, which dead-locks with "
                "sharded parameters (ZeRO-3, FSDP); set use_transformers_continuous_batching=False"
            )
        config = self.config_of(sampling)
        draws = nullcontext() if self.generator is None else seeded_from(self.generator)
        with (
            evaluation_mode(model),
            without_attention_hook(model),
            without_router_logits(model),
            autocast_of_training(model),
            draws,
        ):
            outputs = model.generate_batch(
                [list(prompt) for prompt in prompts],
                generation_config=config,
                continuous_batching_config=dataclasses.replace(self.batching),
                progress_bar=False,
            )
        results = list(outputs.values())
        failed = [result.error for result in results if result.error is not None]
        if failed or len(results) < len(prompts):
            raise BackendError(
                f"continuous batching returned {len(results) - len(failed)} of {len(prompts)} completions"
                + (f"; the first failed with: {failed[0]}" if failed else "; see the errors logged above")
            )
        limits = sampling.max_tokens or [config.max_new_tokens] * len(prompts)
        return [
            self.completion(result.generated_tokens[:limit])
            for result, limit in zip(results, limits, strict=True)
        ]


def check_config(config: GRPOConfig) -> None:
    """Raise ConfigError for settings that sampler, cache or scheduler do not have."""
    transformers_backend.check_config(config)
    batching_config(json_dict(config.transformers_continuous_batching_config))


def batching_config(given: dict[str, Any]) -> ContinuousBatchingConfig:
    """Return the settings of cache and scheduler; by default the cache takes half of the free memory.

    Raises:
        ConfigError: transformers is too old, or a setting is unknown; the message names the nearest one.
    """
    try:
        from transformers import ContinuousBatchingConfig
    except ImportError as missing:
        raise ConfigError(
            "use_transformers_continuous_batching=True needs transformers>=5.8; upgrade it, or set "
            "use_transformers_continuous_batching=False"
        ) from missing
    names = [field.name for field in dataclasses.fields(ContinuousBatchingConfig)]
    check_names("transformers_continuous_batching_config", given, names, "transformers")
    return ContinuousBatchingConfig(**{"max_memory_percent": _MEMORY, **given})


def make_backend(
    policy: Callable[[], PreTrainedModel],
    config: GRPOConfig,
    processing_class: ProcessingClass,
    suppress_tokens: Sequence[int] = (),
) -> ContinuousBatchingBackend:
    """Construct the backend; see :class:`groupwise.generation.base.BackendFactory`.

    Raises:
        ConfigError: continuous batching does not support a sampling setting or the policy's adapter.
    """
    if has_prompt_learning(policy()):
        raise ConfigError(
            "use_transformers_continuous_batching=True would sample without the virtual tokens of the "
            "policy's adapter; set use_transformers_continuous_batching=False, or use LoRA"
        )
    transformers_backend.check_allocated_cache(config, policy(), "use_transformers_continuous_batching=True")
    transformers_backend.warn_about_run_settings(config)
    sampler = generation_config(config, policy(), text_tokenizer(processing_class), suppress_tokens)
    batching = batching_config(json_dict(config.transformers_continuous_batching_config))
    backend = ContinuousBatchingBackend(policy, sampler, config, batching)
    model: CausalLM = policy()
    with torch.no_grad():
        processors = logits_processors(model, backend.config_of(RUN_SETTINGS))
    # transformers would drop these with a warning.
    dropped = [
        type(p).__name__ for p in processors if getattr(p, "supports_continuous_batching", None) is False
    ]
    if dropped:
        raise ConfigError(
            f"use_transformers_continuous_batching=True does not support {', '.join(dropped)}; remove the "
            "settings behind it (such as repetition_penalty or those in generation_kwargs), or set "
            "use_transformers_continuous_batching=False"
        )
    return backend


ENTRY = BackendEntry(make_backend, check_config)
