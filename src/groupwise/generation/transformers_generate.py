"""Generation with the policy's own ``generate``."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from groupwise.core.images import join_images
from groupwise.core.padding import length_mask, pad_sequences
from groupwise.cpu import cpu_generation
from groupwise.errors import BackendError
from groupwise.generation.decoding import (
    can_decode_groups,
    casts_kept,
    decode_groups,
    group_prompts,
    requires_lockstep_forwards,
)
from groupwise.records import Completion, SamplingOptions

logger = logging.getLogger(__name__)

_AS_CONFIGURED = SamplingOptions()


class TransformersBackend:
    """Samples with ``model.generate``: always the current weights, so there is nothing to synchronise.

    Where it can, the loop inside is ``decode_groups``, which reads a prompt once for all its completions and
    stops computing those that have ended.

    Args:
        model: returns the unwrapped policy; called at every generation because training may wrap it anew.
        generation_config: sampling settings; see :func:`generation_config`.
    """

    context_length: int | None = None

    def __init__(
        self,
        model: Callable[[], PreTrainedModel],
        generation_config: GenerationConfig,
        pad_to_multiple_of: int | None = None,
    ) -> None:
        self.model = model
        self.generation_config = generation_config
        self.pad_to_multiple_of = pad_to_multiple_of
        self.version: int | None = None

    @property
    def end_tokens(self) -> frozenset[int]:
        """Every token that ends a completion."""
        end = self.generation_config.eos_token_id
        return frozenset([end] if isinstance(end, int) else end or [])

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions = _AS_CONFIGURED
    ) -> list[Completion]:
        """Sample one completion per prompt.

        Args:
            prompts: B token lists, without padding.

        Returns:
            B completions, cut after their first end token; ``truncated`` where there was none.
        """
        model: Any = self.model()
        config = self._config_for(sampling)
        shared = sampling.images is None and can_decode_groups(model, config)
        distinct, copies = group_prompts(prompts) if shared else (prompts, [])
        pad_token = config.pad_token_id
        input_ids = pad_sequences(
            distinct, pad_token, left=True, multiple_of=self.pad_to_multiple_of, device=model.device
        )
        attention_mask = length_mask(
            [len(prompt) for prompt in distinct], input_ids.shape[1], left=True, device=model.device
        )
        _check_every_rank_sees(sampling, model)
        starts = [input_ids.shape[1] - len(prompt) for prompt in distinct]
        images = join_images(sampling.images or (), starts, input_ids.shape[1], model.device)
        loop = {"custom_generate": partial(decode_groups, copies=copies)} if shared else {}
        was_training = model.training
        model.eval()  # dropout off, and gradient checkpointing does not switch the cache off
        try:
            with (
                cpu_generation(model),
                nullcontext() if requires_lockstep_forwards(model) else casts_kept(model.device),
            ):
                sequences = model.generate(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    generation_config=config,
                    **images,
                    **loop,
                )
        finally:
            model.train(was_training)
        new_tokens = sequences[:, input_ids.shape[1] :].tolist()
        limits = sampling.max_tokens or [config.max_new_tokens] * len(prompts)
        return [self._completion(tokens[:limit]) for tokens, limit in zip(new_tokens, limits, strict=True)]

    def _config_for(self, sampling: SamplingOptions) -> GenerationConfig:
        """The settings of the run; the batch runs on until the row with the highest limit has ended."""
        if sampling.max_tokens is None and not sampling.overrides:
            return self.generation_config
        config = copy.deepcopy(self.generation_config)
        if sampling.max_tokens is not None:
            config.max_new_tokens = max(sampling.max_tokens)
        config.update(**sampling.overrides)
        if config.temperature == 0:
            config.update(do_sample=False, temperature=1.0)
        return config

    def _completion(self, tokens: list[int]) -> Completion:
        for position, token in enumerate(tokens):
            if token in self.end_tokens:
                return Completion(tokens[: position + 1])
        return Completion(tokens, truncated=True)

    def sync_weights(self, params: Iterator[tuple[str, torch.Tensor]], *, step: int) -> None:
        """Nothing to do: the policy itself generates."""

    def release(self) -> None:
        """Nothing to give back: the memory is the policy's."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep: seeds come from torch's generator."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take over."""

    def close(self) -> None:
        """Nothing to release."""


def _check_every_rank_sees(sampling: SamplingOptions, model: Any) -> None:
    """Where ranks share the parameters, all of them must run the vision part or none."""
    if not requires_lockstep_forwards(model):
        return
    if sampling.images is not None and not all(row.arrays for row in sampling.images):
        raise BackendError(
            "a prompt has no image, and the model's parameters are spread over ranks: those with images "
            "would wait for this one forever; keep rows with images only, or do not shard (ZeRO-2, DDP)"
        )


def check_settings(config: Any) -> None:
    """Nothing to refuse: the configuration's own rules cover it."""


def make_backend(
    policy: Callable[[], PreTrainedModel], config: Any, processing_class: Any, never: Sequence[int] = ()
) -> TransformersBackend:
    """What samples with the policy itself; tokens of ``never`` are not sampled."""
    if is_deepspeed_zero3_enabled() and config.ds3_gather_for_generation:
        logger.warning(
            "ds3_gather_for_generation=True has no effect: under ZeRO-3 generation gathers the weights layer "
            "by layer, in every forward; False says so without this warning, and use_vllm=True is faster"
        )
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    sampler = generation_config(config, policy(), tokenizer, never)
    return TransformersBackend(policy, sampler, config.pad_to_multiple_of)


def end_tokens(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """Every end token that the model or the tokenizer knows."""
    own = model.generation_config.eos_token_id if model.generation_config is not None else None
    tokens = {own} if isinstance(own, int) else set(own or [])
    if tokenizer.eos_token_id is not None:
        tokens.add(tokenizer.eos_token_id)
    return sorted(tokens)


def generation_config(
    config: Any, model: PreTrainedModel, tokenizer: Any, never: Sequence[int] = ()
) -> GenerationConfig:
    """The sampler's settings from a ``GRPOConfig``, with every end token the model and the tokenizer know.

    ``generation_kwargs`` of the configuration override the single fields.

    Args:
        never: tokens that are not sampled, whatever else the configuration suppresses.
    """
    settings: dict[str, Any] = {
        "max_new_tokens": config.max_completion_length,
        "do_sample": True,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k or 0,
        "min_p": config.min_p,
        "repetition_penalty": config.repetition_penalty,
        "cache_implementation": config.cache_implementation,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": end_tokens(model, tokenizer),
        "use_cache": True,
    }
    if config.cache_implementation is not None:
        # A fixed cache makes generate compile itself, anew for every number and length of prompts.
        settings["disable_compile"] = True
    settings.update(config.generation_kwargs or {})
    if never:
        settings["suppress_tokens"] = sorted({*never, *(settings.get("suppress_tokens") or ())})
    return GenerationConfig(**settings)
