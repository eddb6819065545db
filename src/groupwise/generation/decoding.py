"""Decoding by groups: each prompt is processed once per group, and finished rows leave the batch.

``decode_groups`` replaces the loop of ``model.generate`` (``custom_generate``), which still prepares the
cache, the logits processors and the stopping criteria. Completions have the same distribution.

Axes: R rows (completions being decoded), S positions, V vocabulary, H query heads, K key-value heads,
D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from groupwise.compat.transformers import (
    cache_argument,
    optimize_for_decode,
    prefill,
    select_cache_rows,
    update_model_kwargs,
)
from groupwise.cpu import float32_attention
from groupwise.cpu.multinomial import INVALID_LOGITS, NO_TOKEN, RowStreams, multinomial, unchecked_multinomial
from groupwise.errors import BackendError
from groupwise.generation.growing_cache import continue_rows
from groupwise.generation.truncation import SamplingMaskRecorder
from groupwise.policy.attention import install_attention_hook
from groupwise.policy.introspection import CausalLM, experts_of, without_adapter
from groupwise.policy.logprob_mismatch import LogpRecorder, WrongLogpsError
from groupwise.records.images import ImageInputs

if TYPE_CHECKING:
    from groupwise.policy.experts import SampledRouting


def group_prompts(
    prompts: Sequence[Sequence[int]], images: Sequence[ImageInputs] = ()
) -> tuple[list[int], list[int]]:
    """Merge adjacent equal prompts with equal images; returns the row of the first and the number of each."""
    first: list[int] = []
    for row, prompt in enumerate(prompts):
        same = row and prompt == prompts[row - 1]
        if not (same and (not images or images[row].has_same_arrays(images[row - 1]))):
            first.append(row)
    return first, [end - start for start, end in pairwise([*first, len(prompts)])]


class RowSampler:
    """Choice of the next token of every row being decoded, and of the rows that stay in the batch.

    Args:
        processors, criteria, config: those of ``generate``.
        recorder: records the tokens that truncated sampling keeps; None: nothing is truncated.
        generator: random numbers of the samples, of each row or of all; None: torch's global generator.
        logps: records the log-probs of sampled tokens; None: they are not needed.
        routing: records the experts of every token; None: they are not needed.
    """

    #: Finished rows are removed once they are this share of the batch: removal copies the cache of the rest.
    finished_share = 0.25

    def __init__(
        self,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        recorder: SamplingMaskRecorder | None = None,
        generator: torch.Generator | RowStreams | None = None,
        logps: LogpRecorder | None = None,
        routing: SampledRouting | None = None,
    ) -> None:
        self.processors, self.criteria, self.recorder = processors, criteria, recorder
        self.generator, self.logps, self.routing = generator, logps, routing
        self.do_sample, self.pad = config.do_sample, config.pad_token_id
        self.index_R: torch.Tensor  # completion of each row in the batch
        self.running_R: torch.Tensor
        self.invalid_R: torch.Tensor  # running rows without a token

    def begin(self, rows_R: torch.Tensor) -> None:
        """Prepare for rows that continue the prompts ``rows_R``."""
        self.index_R = torch.arange(len(rows_R), device=rows_R.device)
        self.running_R = torch.ones_like(self.index_R, dtype=torch.bool)
        self._select(rows_R)
        if self.routing is not None:  # of the prompts, which have just been computed
            self.routing.begin(rows_R)

    def sample(self, tokens_RS: torch.Tensor, logits_RV: torch.Tensor) -> torch.Tensor:
        """Sample the next token of each row, padding for finished ones: (R,)."""
        if self.routing is not None:
            self.routing.record(self.index_R)
        scores_RV = self.processors(tokens_RS, logits_RV)  # type: ignore[arg-type]
        if self.recorder is not None:
            self.recorder.record(scores_RV, self.index_R)
        tokens_R = sample_tokens(scores_RV, self.do_sample, self.generator, self.index_R)
        self.invalid_R = self.running_R & (tokens_R == NO_TOKEN)
        tokens_R = tokens_R.where(self.running_R & ~self.invalid_R, self.pad)
        if self.logps is not None:
            self.logps.record(logits_RV, tokens_R, self.index_R)
        return tokens_R

    def rows_to_keep(self, tokens_RS: torch.Tensor) -> torch.Tensor | None:
        """Return the rows that stay in the batch, none if all have finished; None: all stay for now.

        Raises:
            BackendError: the scores of a row were NaN or infinite.
        """
        self.running_R &= ~self.criteria(tokens_RS, None)
        num_running = self._read(self.running_R.sum().where(~self.invalid_R.any(), NO_TOKEN))
        if num_running == NO_TOKEN:
            raise BackendError(INVALID_LOGITS)
        if num_running > (1 - self.finished_share) * len(self.running_R):
            return None
        kept_R = self.running_R.nonzero().squeeze(1)
        self.index_R, self.running_R = self.index_R[kept_R], self.running_R[kept_R]
        self._select(kept_R)
        return kept_R

    def _read(self, number: torch.Tensor) -> int:
        """Return the number of running rows, or ``NO_TOKEN``. Waits for the device, once per token."""
        return int(number)

    def _select(self, rows_R: torch.Tensor) -> None:
        for processor in self.processors:  # prompt padding that the repetition penalty ignores
            lengths = getattr(processor, "prompt_ignore_length", None)
            if isinstance(lengths, torch.Tensor):
                processor.prompt_ignore_length = lengths[rows_R.to(lengths.device)]


def decode_groups(
    model: CausalLM,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    copies: Sequence[int],
    image_arrays: Collection[str] = (),
    make_sampler: Callable[..., RowSampler] = RowSampler,
    make_rows: Callable[..., DecodingRows] | None = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Sample ``copies[i]`` completions of prompt i.

    The other arguments are those of the decoding loop of transformers.

    Args:
        input_ids: P distinct prompts, padded on the left: (P, L).
        copies: number of completions per prompt, P.
        image_arrays: names of the arguments that have images, not one row per prompt.
        make_sampler: called with the processors, the criteria and the generation config.
        make_rows: called with the arguments of :class:`DecodingRows`, which None stands for.

    Returns:
        prompts and completions, padded on the right: (sum of copies, longest).
    """
    sampler = make_sampler(logits_processor, stopping_criteria, generation_config)
    rows = torch.arange(len(copies), device=input_ids.device)
    rows_R = rows.repeat_interleave(torch.tensor(copies, device=input_ids.device))  # prompt of each row
    limit, pad = generation_config.max_length, generation_config.pad_token_id
    sequences = input_ids.new_full((len(rows_R), limit), pad)  # filled as rows leave the batch
    outputs = prefill(model, input_ids, generation_config, model_kwargs)  # one forward of P prompts
    model_kwargs = {name: value for name, value in model_kwargs.items() if name not in image_arrays}
    batch = (make_rows or DecodingRows)(model, input_ids, outputs, model_kwargs)
    continue_rows(batch.cache, rows_R, limit)  # P rows of keys and values become R
    batch.select(rows_R)
    sampler.begin(rows_R)
    output_index_R = torch.arange(len(rows_R), device=input_ids.device)  # row of sequences
    num_experts, top_k = experts_of(model) or (1, 0)
    # Experts decode by `batched_mm` on a GPU, which copies the weights of K experts for every row: above E
    # copies that is more than all experts, which the grouped products of training read in place.
    few = len(rows_R) * top_k <= num_experts
    with optimize_for_decode(model) if few else nullcontext():
        while True:
            batch.append(sampler.sample(batch.tokens_RS, batch.logits_RV))
            kept_R = sampler.rows_to_keep(batch.tokens_RS)
            if kept_R is not None:
                length = min(batch.tokens_RS.shape[1], limit)  # a sampler may learn late that all have ended
                sequences[output_index_R, :length] = batch.tokens_RS[:, :length]
                if not len(kept_R):
                    return sequences[:, :length]
                batch.keep(kept_R)
                output_index_R = output_index_R[kept_R]
            batch.forward()


def sample_tokens(
    scores_RV: torch.Tensor,
    do_sample: bool,
    generator: torch.Generator | RowStreams | None = None,
    index_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample the next token of each row from softmax(scores), or take the most probable one: (R,).

    On a device other than the CPU invalid scores give ``NO_TOKEN``, without waiting for the device.

    Raises:
        BackendError: scores on a CPU are NaN or infinite.
    """
    if not do_sample:
        return scores_RV.argmax(-1)
    probabilities_RV = scores_RV.softmax(-1)
    if isinstance(generator, RowStreams):
        return generator.sample(probabilities_RV, index_R)
    if scores_RV.device.type == "cpu":
        return multinomial(probabilities_RV, generator)
    return unchecked_multinomial(probabilities_RV, generator)


class DecodingRows:
    """Rows being decoded: tokens (R, S), next logits (R, V), key-value cache and other model inputs."""

    def __init__(
        self,
        model: CausalLM,
        tokens: torch.Tensor,
        outputs: Any,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.model, self.tokens_RS = model, tokens
        self.cache_name = cache_argument(without_adapter(model)) or ""
        # A sliding layer holds fewer positions than the attention mask shared by all layers.
        sliding = any(getattr(layer, "is_sliding", False) for layer in outputs[self.cache_name].layers)
        parameters = inspect.signature(model.forward).parameters.values()
        takes_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.supports_packing = not sliding and takes_kwargs and install_attention_hook(model)
        self.kwargs = model_kwargs
        self.logits_RV: torch.Tensor
        self._update(outputs)

    @property
    def cache(self) -> DynamicCache:
        """Keys and values of all positions but the last."""
        return self.kwargs[self.cache_name]

    def select(self, rows_R: torch.Tensor) -> None:
        """Keep the given rows, repeated as given; does not change the cache."""
        self.tokens_RS, self.logits_RV = self.tokens_RS[rows_R], self.logits_RV[rows_R]
        for name, value in self.kwargs.items():
            if isinstance(value, torch.Tensor) and value.ndim > 1:  # 1-D tensors are shared by all rows
                by_axis = name == "position_ids" and value.ndim == 3  # time, height, width: (3 or 4, R, S)
                self.kwargs[name] = value[:, rows_R] if by_axis else value[rows_R]

    def keep(self, rows_R: torch.Tensor) -> None:
        """Remove the other rows, from the cache too."""
        for layer in self.cache.layers:
            select_cache_rows(layer, rows_R)
        self.select(rows_R)

    def append(self, tokens_R: torch.Tensor) -> None:
        self.tokens_RS = torch.cat([self.tokens_RS, tokens_R[:, None]], dim=1)

    def forward(self) -> dict[str, Any]:
        """Compute the logits after the last token; returns the inputs of the model."""
        prepare = self.model.prepare_inputs_for_generation
        inputs = prepare(self.tokens_RS, next_sequence_length=1, **self.kwargs)
        if inputs.get(self.cache_name) is None:
            raise WrongLogpsError(
                f"it drops its cache at {self.tokens_RS.shape[1]} tokens, where the log-probs of all tokens "
                "before change"
            )
        if self.supports_packing:
            mask_RS = inputs.get("attention_mask")  # generate omits it if nothing is padded
            attention = OneQueryAttention(None if mask_RS is None else mask_RS[:, None, None, :].bool())
            inputs.update(attention_mask=attention.mask, attention_function=attention)
        self._update(self.model(**inputs, return_dict=True))
        return inputs

    def _update(self, outputs: Any) -> None:
        self.kwargs = update_model_kwargs(self.model, outputs, self.kwargs)
        # A view would keep the logits of the whole prompt alive in models that compute all of them.
        copy = outputs.logits.shape[1] > 1
        self.logits_RV = outputs.logits[:, -1].to(self.tokens_RS.device, torch.float32, copy=copy)


class OneQueryAttention:
    """Attention of one query per row to the positions where ``mask`` (R, 1, 1, S) is True; None: to all.

    The H / K query heads of a key-value head are treated as H / K queries, so that its keys are not copied. A
    sliding window is counted back from the last position, which is that of the query.
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
        visible = slice(-window if window else None, None)
        half_on_cpu = value_RKSD.device.type == "cpu" and value_RKSD.dtype in (torch.bfloat16, torch.float16)
        attention = float32_attention if half_on_cpu else scaled_dot_product_attention
        out = attention(
            query_RH1D.reshape(rows, key_RKSD.shape[1], -1, size),
            key_RKSD[:, :, visible],
            value_RKSD[:, :, visible],
            attn_mask=None if self.mask is None else self.mask[..., visible],
            scale=scale,
        )
        return out.reshape(rows, 1, heads, -1)
