"""Sampling of groups: every prompt is read once, and rows that have ended leave the batch.

``decode_groups`` stands in for the loop of ``model.generate`` (its ``custom_generate``), which prepares the
cache, the logits processors and the stopping criteria as always. The distribution of completions is the same.

Axes: R rows (completions being decoded), S positions, V vocabulary, N blocks of it, W tokens of a block,
H query and K key-value heads, D head size.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from groupwise.errors import BackendError
from groupwise.generation.growing_cache import continue_rows
from groupwise.policy.attention import install_attention_hook

#: Settings that generate's preparation turns into processors and criteria which look at each row alone.
HONOURED = frozenset(
    {
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "do_sample"),
        *("temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias"),
        *("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
        *("exponential_decay_length_penalty", "renormalize_logits", "remove_invalid_values"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "transformers_version", "_from_model_config"),
    }
)

#: Values of other settings that change nothing; None and False never do, apart from ``use_cache``.
NEUTRAL = {"use_cache": True, "cache_implementation": "dynamic", "num_beams": 1, "num_return_sequences": 1}

#: Layers of a cache that hold nothing but keys and values, one row of them for each row of the batch.
SELECTABLE = (DynamicLayer, DynamicSlidingWindowLayer)

#: Rows that have ended stay until they are this part of the batch, because removing them copies the others.
ENDED_PART = 0.25


def group_prompts(prompts: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], list[int]]:
    """Neighbouring equal prompts as one, and how many there were of each."""
    groups = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
    return [prompt for prompt, _ in groups], [copies for _, copies in groups]


def requires_lockstep_forwards(model: Any) -> bool:
    """Whether ranks share the parameters, so that all of them must make the same number of forwards."""
    return is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)


def can_decode_groups(model: Any, config: GenerationConfig) -> bool:
    """Whether ``decode_groups`` does what ``model.generate`` would do; False where that is not certain.

    It takes transformers' own loop and cache, a text model of nothing but attention layers, settings that act
    on each row alone, no prompt tuning, and ranks that need not run the same number of forwards.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    adapters = getattr(model, "peft_config", {}).values()
    return (
        _has_the_usual_loop(base)
        and not any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters)
        and not base.config.is_encoder_decoder
        and base.config.get_text_config(decoder=True) is base.config  # others keep positions of their own
        and not base._is_stateful
        and base._supports_default_dynamic_cache()
        and "past_key_values" in inspect.signature(base.forward).parameters
        and all(type(layer) in SELECTABLE for layer in DynamicCache(config=base.config).layers)
        and _acts_on_rows_alone(config, base.generation_config)
        and not requires_lockstep_forwards(base)
    )


def _has_the_usual_loop(model: Any) -> bool:
    """Neither the class nor the instance has a ``generate`` or a sampling loop of its own."""
    return all(
        getattr(getattr(model, name, None), "__func__", None) is getattr(GenerationMixin, name)
        for name in ("generate", "_sample")
    )


def _acts_on_rows_alone(config: GenerationConfig, defaults: GenerationConfig) -> bool:
    """Whether no row matters to another, where ``defaults`` are the model's own for what is left open."""
    return all(
        name in HONOURED or value == NEUTRAL.get(name) or (value is False and name != "use_cache")
        for name, value in {**defaults.to_diff_dict(), **config.to_diff_dict()}.items()
    )


def casts_kept(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which autocast casts each trained weight once, instead of once in every forward.

    A forward that enters autocast itself forgets its casts at the end only if it was the outermost context.
    """
    if torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def decode_groups(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    *,
    copies: Sequence[int],
    **model_kwargs: Any,
) -> torch.Tensor:
    """Continue every prompt as often as asked; all arguments but ``copies`` are those of generate's own loop.

    Args:
        input_ids: the distinct prompts, padded on the left.
        copies: the number of completions of each prompt.

    Returns:
        Prompts and completions, padded on the right: (sum of copies, longest).
    """
    rows = torch.arange(len(copies), device=input_ids.device)
    rows_R = rows.repeat_interleave(torch.tensor(copies, device=input_ids.device))
    limit, pad = generation_config.max_length, generation_config.pad_token_id
    sequences = input_ids.new_full((len(rows_R), limit), pad)
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    batch = _Rows(model, input_ids, outputs, model_kwargs, logits_processor)
    continue_rows(batch.cache, rows_R, limit)
    batch.select(rows_R)
    place_R = torch.arange(len(rows_R), device=input_ids.device)
    running_R = torch.ones_like(place_R, dtype=torch.bool)
    with model._optimize_model_for_decode():
        while True:
            next_R = choose(logits_processor(batch.tokens_RS, batch.logits_RV), generation_config.do_sample)
            batch.append(next_R.where(running_R, pad))
            running_R &= ~stopping_criteria(batch.tokens_RS, None)
            running = int(running_R.sum())
            if running <= (1 - ENDED_PART) * len(running_R):
                sequences[place_R, : batch.tokens_RS.shape[1]] = batch.tokens_RS
                if not running:
                    return sequences[:, : batch.tokens_RS.shape[1]]
                kept_R = running_R.nonzero().squeeze(1)
                batch.cache.batch_select_indices(kept_R)
                batch.select(kept_R)
                place_R, running_R = place_R[kept_R], running_R[kept_R]
            batch.forward()


def choose(scores_RV: torch.Tensor, do_sample: bool) -> torch.Tensor:
    """The next token of every row, as generate draws it: (R,)."""
    if not do_sample:
        return scores_RV.argmax(-1)
    probabilities_RV = scores_RV.softmax(-1)
    if scores_RV.device.type == "cpu":
        return _invert_by_blocks(probabilities_RV)
    return torch.multinomial(probabilities_RV, num_samples=1).squeeze(1)


def _invert_by_blocks(probabilities_RV: torch.Tensor) -> torch.Tensor:
    """A draw from each row: first a block of the vocabulary, then a token of the block: (R,).

    ``multinomial`` makes a random number for every token of the vocabulary, on a CPU one after the other: a
    quarter of the time of a step. Cumulative sums of whole rows in float64 are several times the logits.

    Raises:
        BackendError: a row has no distribution.
    """
    size = math.gcd(probabilities_RV.shape[1], 256)
    blocks_RNW = probabilities_RV.unflatten(1, (-1, size))
    sums_RN = blocks_RNW.sum(-1)
    if sums_RN.isnan().any():
        raise BackendError(
            "the policy's logits are NaN or infinite: no token can be drawn; look at its weights"
        )
    block_R = _invert(sums_RN)
    rows_R = torch.arange(len(block_R), device=block_R.device)
    return block_R * size + _invert(blocks_RNW[rows_R, block_R])


def _invert(weights_RN: torch.Tensor) -> torch.Tensor:
    """A draw from each row by inverting its distribution function, with one random number for the row: (R,).

    Sums are float64; what has no weight is never the first to exceed a number.
    """
    sums_RN = weights_RN.cumsum(-1, dtype=torch.float64)
    total_R1 = sums_RN[:, -1:]
    numbers_R1 = torch.rand_like(total_R1) * total_R1
    below_R1 = torch.nextafter(total_R1, torch.zeros_like(total_R1))
    return torch.searchsorted(sums_RN, torch.minimum(numbers_R1, below_R1), right=True).squeeze(1)


class _Rows:
    """The rows that are being decoded: their tokens, next logits, cache and further inputs of the model."""

    def __init__(
        self, model: Any, tokens: torch.Tensor, outputs: Any, model_kwargs: dict[str, Any], processors: Any
    ) -> None:
        self.model, self.tokens_RS, self.processors = model, tokens, processors
        # A sliding layer holds fewer positions than the mask that all layers would share.
        sliding = any(layer.is_sliding for layer in outputs.past_key_values.layers)
        self.supports_packing = (
            not sliding and _takes_any_keyword(model.forward) and install_attention_hook(model)
        )
        prepare = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
        # Where there is no such argument, the cache position tells how many tokens are new.
        self.step_kwargs = {"next_sequence_length": 1} if "next_sequence_length" in prepare else {}
        self.kwargs = model_kwargs
        self.logits_RV: torch.Tensor
        self._take(outputs)

    @property
    def cache(self) -> DynamicCache:
        """Keys and values of every position but the newest."""
        return self.kwargs["past_key_values"]

    def select(self, rows_R: torch.Tensor) -> None:
        """Let the given rows, named as often as wanted, be the batch; the cache is left alone."""
        self.tokens_RS, self.logits_RV = self.tokens_RS[rows_R], self.logits_RV[rows_R]
        for name, value in self.kwargs.items():
            if isinstance(value, torch.Tensor) and value.ndim > 1:  # one dimension is common to all rows
                self.kwargs[name] = value[rows_R]
        for processor in self.processors:  # the padding that the repetition penalty leaves out
            lengths = getattr(processor, "prompt_ignore_length", None)
            if isinstance(lengths, torch.Tensor):
                processor.prompt_ignore_length = lengths[rows_R.to(lengths.device)]

    def append(self, tokens_R: torch.Tensor) -> None:
        self.tokens_RS = torch.cat([self.tokens_RS, tokens_R[:, None]], dim=1)

    def forward(self) -> None:
        """The logits after the newest token."""
        inputs = self.model.prepare_inputs_for_generation(self.tokens_RS, **self.step_kwargs, **self.kwargs)
        if self.supports_packing:
            mask_RS = inputs.get("attention_mask")  # generate leaves it out where nothing is padded
            attend = OneQueryAttention(None if mask_RS is None else mask_RS[:, None, None, :].bool())
            inputs.update(attention_mask=attend.mask, attend=attend)
        self._take(self.model(**inputs, return_dict=True))

    def _take(self, outputs: Any) -> None:
        self.kwargs = self.model._update_model_kwargs_for_generation(outputs, self.kwargs)
        # A view would hold on to the logits of the whole prompt where the model computes them all.
        whole = outputs.logits.shape[1] > 1
        self.logits_RV = outputs.logits[:, -1].to(self.tokens_RS.device, torch.float32, copy=whole)


def _takes_any_keyword(function: Any) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


class OneQueryAttention:
    """Attention of one query for each row to the positions where ``mask`` (R, 1, 1, S) is true; None is all.

    The H / K query heads of a key-value head become queries of it, so that its keys are not copied for each.
    A window counts back from the last position, which is the query's own.
    """

    def __init__(self, mask: torch.Tensor | None) -> None:
        self.mask = mask

    def __call__(
        self,
        query_RH1D: torch.Tensor,
        key_RKSD: torch.Tensor,
        value_RKSD: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        rows, heads, _, size = query_RH1D.shape
        seen = slice(-window if window else None, None)
        out = scaled_dot_product_attention(
            query_RH1D.reshape(rows, key_RKSD.shape[1], -1, size),
            key_RKSD[:, :, seen],
            value_RKSD[:, :, seen],
            attn_mask=None if self.mask is None else self.mask[..., seen],
            scale=scale,
        )
        return out.reshape(rows, 1, heads, -1)
