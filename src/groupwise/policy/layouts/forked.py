"""Forked layout: the prompt of a group once, then its completions from copies of the cache after the prompt.

For models whose layers keep a recurrent or convolution state, or attention that the hook cannot separate, and
for models of images, which are inputs of the first pass alone::

    prompts (P, L - 1)    [p0 p1]         first pass: keys, values and states after it, with gradients
                             |            one copy for each of the R rows
    inputs (R, T)         [p2 c0 c1]      further passes: each input predicts the next token of its row
                          [p2 c0  .]      . padding on the right: no token sees it, in attention or in a state
    targets (R, T)        [c0 c1 c2]
                          [c0 c1  .]

Only prompts of one length share a first pass, so that no padding precedes a prompt, and only completions of
similar length share a further pass. Gradients flow through the copies into the first pass.

With sharded parameters every pass gathers them, on all ranks together: ranks with fewer passes add passes
over two tokens, and the backward of every pass begins at its output, so that all ranks gather in one order::

    rank 0    prompts, completions, prompts, completions
    rank 1    prompts, completions, 2 tokens, 2 tokens       gradient 0 of the outputs that no loss uses

Axes: B rows of the batch, P distinct prompts, L prompt tokens, R rows of a pass, T completion tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import Cache

from groupwise.compat.transformers import (
    cache_argument,
    cache_without_rows,
    checkpoints_keep_cache,
    select_cache_rows,
    supports_cache_in_checkpoints,
    supports_dynamic_cache,
)
from groupwise.core.padding import length_mask
from groupwise.policy.heads.capture import LogprobHead, ModelInputs, call_model, forward_logprobs
from groupwise.policy.introspection import (
    CausalLM,
    accepted_arguments,
    base_model,
    cannot_continue_images,
    dropout_of_attention,
    has_own_positions,
    has_prompt_learning,
    multimodal_part,
    unwrapped,
)
from groupwise.policy.layouts.padded import compute_padded_logprobs, join_outputs
from groupwise.records import ImageInputs, LogprobOutput, TokenBatch
from groupwise.records.images import has_images, join_images
from groupwise.records.sampling_mask import SamplingMask, join_sampling_masks
from groupwise.records.tensors import Shape, shape_of

#: Methods by which a forward pass writes to a layer of its cache.
_UPDATES = ("update", "update_conv_state", "update_recurrent_state")


@dataclass(frozen=True)
class Continuations:
    """Completions of one further pass.

    rows_R: their rows in the batch.
    prompt_R: index of each row's prompt in the first pass.
    input_ids_RT, target_RT: inputs of the model and the tokens that they predict.
    kept: tokens of the truncated distribution at each of the R · T positions; None: all tokens.
    real_RT: inputs that are no padding.
    """

    rows_R: torch.Tensor
    prompt_R: torch.Tensor
    input_ids_RT: torch.Tensor
    target_RT: torch.Tensor
    kept: SamplingMask | None
    real_RT: torch.Tensor


@dataclass(frozen=True)
class Fork:
    """Distinct prompts of one length without their last tokens, (P, L - 1), and all their completions.

    images: image inputs of the P prompts; empty without a processor.
    rows_P: number of rows of each prompt.
    first_P: first of these rows.
    """

    prompt_ids_PL: torch.Tensor
    rows_P: list[int]
    first_P: torch.Tensor
    parts: list[Continuations]
    images: Sequence[ImageInputs]


@dataclass(frozen=True)
class ForkedSequences:
    """Inputs of the forward passes over the sequences of a micro-batch.

    padded_rows: rows with images in their completion or at the end of their prompt: no pass has all of one.
    padded: these rows; None: there are none.
    """

    forks: list[Fork]
    padded_rows: list[int]
    padded: TokenBatch | None

    def num_tokens(self) -> int:
        """Return the number of input tokens of all passes, padding included."""
        parts = [part for fork in self.forks for part in fork.parts]
        prompts = sum(fork.prompt_ids_PL.numel() for fork in self.forks)
        padded = 0 if self.padded is None else self.padded.num_tokens()
        return prompts + sum(part.input_ids_RT.numel() for part in parts) + padded

    def num_passes(self) -> int:
        """Return the number of forward passes."""
        first = sum(fork.prompt_ids_PL.numel() > 0 for fork in self.forks)
        return first + sum(len(fork.parts) for fork in self.forks) + (self.padded is not None)


def plan_forks(shape: Shape, rows: Sequence[int]) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Return the groups of each length of a prompt, and the blocks of rows that continue them together.

    A block has completions of similar length, to the longest of which they are padded: the shortest has at
    least half its length, or at most 32 tokens less.
    """
    by_length: dict[int, list[list[int]]] = {}  # padding before a prompt would reach its state
    for group in shape.groups_of(rows):
        by_length.setdefault(shape.prompts[group[0]], []).append(group)
    forks = []
    for groups in by_length.values():
        blocks: list[list[int]] = []
        longest = 0
        for row in sorted((row for group in groups for row in group), key=lambda r: -shape.completions[r]):
            length = shape.completions[row]
            if not blocks or (2 * length < longest and length + 32 < longest):
                blocks.append([])
                longest = length
            blocks[-1].append(row)
        forks.append((groups, blocks))
    return forks


def _width(shape: Shape, block: Sequence[int]) -> int:
    # At least 2: models decode a single token by kernels without a backward pass.
    return max(2, *(shape.completions[row] for row in block))


def count_tokens(shape: Shape, rows: Sequence[int]) -> tuple[int, int]:
    """Return the input tokens of all passes over ``rows``, and the padding among them."""
    forks = plan_forks(shape, rows)
    prompts = sum(len(groups) * (shape.prompts[groups[0][0]] - 1) for groups, _ in forks)
    inputs = sum(len(block) * _width(shape, block) for _, blocks in forks for block in blocks)
    return prompts + inputs, inputs - sum(shape.completions[row] for row in rows)


def fork_sequences(batch: TokenBatch, *, whole: bool = False) -> ForkedSequences:
    """Arrange the sequences of ``batch`` in passes. Waits once for the device, to read the lengths.

    Args:
        whole: the last token of the longest completion of a pass is an input too: it predicts nothing, but
            its router counts in a balancing loss.
    """
    shape = shape_of(batch)
    device = batch.prompt_ids_BL.device
    images = batch.images or ()
    padded = [row for row, inputs in enumerate(images) if inputs.end >= shape.prompts[row]]
    rows_left = [row for row in range(len(batch)) if row not in padded]
    forks = []
    # P groups of prompts with L tokens, and blocks of R of their completions, at most T tokens long.
    for groups, blocks in plan_forks(shape, rows_left):
        length = shape.prompts[groups[0][0]]
        prompt_of = {row: index for index, group in enumerate(groups) for row in group}
        first = torch.tensor([group[0] for group in groups], device=device)
        # Prompts end at the last column: padding is on their left.
        prompt_ids_PL = batch.prompt_ids_BL[first, batch.prompt_ids_BL.shape[1] - length : -1]
        parts = []
        for rows in blocks:
            width = _width(shape, rows) + whole
            rows_R = torch.tensor(rows, device=device)
            target_RT = batch.completion_ids_BT[rows_R, :width]
            target_RT = F.pad(target_RT, (0, width - target_RT.shape[1]))
            input_ids_RT = torch.cat([batch.prompt_ids_BL[rows_R, -1:], target_RT[:, :-1]], dim=1)
            kept = None
            if batch.sampling_mask is not None:
                kept = join_sampling_masks([batch.sampling_mask[row] for row in rows], [width] * len(rows))
            prompt_R = torch.tensor([prompt_of[row] for row in rows], device=device)
            # Column 0 is the prompt's last token: n + 1 inputs of n completion tokens.
            real_RT = length_mask([shape.completions[row] + 1 for row in rows], width, device=device)
            parts.append(Continuations(rows_R, prompt_R, input_ids_RT, target_RT, kept, real_RT))
        inputs = [images[group[0]] for group in groups] if images else ()
        forks.append(Fork(prompt_ids_PL, [*map(len, groups)], first, parts, inputs))
    # Images last: DDP searches the graph of the last pass for parameters without a gradient.
    forks.sort(key=lambda fork: has_images(fork.images))
    return ForkedSequences(forks, padded, batch.select(padded) if padded else None)


def compute_forked_logprobs(
    model: nn.Module,
    batch: TokenBatch,
    forked: ForkedSequences,
    head: LogprobHead,
    *,
    with_entropy: bool,
    with_aux_loss: bool = False,
    routing: Any = None,
    num_passes: int = 0,
) -> LogprobOutput:
    """Compute log-probs (and entropies) of the completion tokens at the temperature that sampled them.

    Args:
        model: one for which :func:`cannot_fork` returned None.
        forked: the same sequences from :func:`fork_sequences`, ``whole`` if with_aux_loss.
        num_passes: forward passes of every rank, if all must run as many; 0: those of ``forked``.

    Returns:
        log-probs and entropies (B, T), float32, arbitrary on padding; router sums, if requested.

    Raises:
        RuntimeError: the model did not use the cache that it was given, or reentrant checkpoints detach it.
    """
    outputs: list[tuple[torch.Tensor, LogprobOutput]] = []  # with the rows of each pass
    unused: list[torch.Tensor] = []  # outputs of passes that no loss reads
    sums: list[torch.Tensor | None] = []  # (2E + 1,) of each pass, if requested
    # Below DDP, whose hooks fire once per backward pass; not below a wrapper that gathers parameters.
    reader = model if num_passes else unwrapped(model)
    temperature = batch.sampler.temperature
    compute = partial(forward_logprobs, head=head, temperature=temperature, with_entropy=with_entropy)
    for fork in forked.forks:
        prompt = ForkableCache(_empty_layers(model), forked.num_tokens(), keep=True)
        start_P1 = _read_prompts(reader, fork, prompt, unused, sums, with_aux_loss, routing)
        for part in fork.parts:
            output = _continue_prompts(model, part, prompt, start_P1, compute, with_aux_loss, routing)
            outputs.append((part.rows_R, output))
            sums.append(output.aux_loss)
        prompt.after.clear()  # a recomputation reads the layers before the pass alone
    if forked.padded is not None:
        rows_R = torch.tensor(forked.padded_rows, device=batch.prompt_ids_BL.device)
        options: Any = {"with_router_sums": with_aux_loss, "routing": routing, "rows_R": rows_R}
        output = compute_padded_logprobs(model, forked.padded, head, with_entropy=with_entropy, **options)
        outputs.append((rows_R, output))
        sums.append(output.aux_loss)
    for _ in range(num_passes - forked.num_passes()):
        ids_12 = batch.prompt_ids_BL[:1, -1:].expand(1, 2)  # not one token: see _width
        unused.append(model(input_ids=ids_12, logits_to_keep=1, use_cache=False).logits)
    if num_passes:
        # Plus 0, with a gradient of 0 to outputs that no loss reads: without, the last layer and the head of
        # such a pass would have no backward, and their ranks would gather less.
        zeros = [output.masked_fill(torch.ones_like(output, dtype=torch.bool), 0.0) for output in unused]
        rows_R, output = outputs[0]
        tied_RT = output.logps_BT + sum(zero.sum() for zero in zeros)
        outputs[0] = rows_R, replace(output, logps_BT=tied_RT)
    return join_outputs(outputs, batch.completion_ids_BT.shape[1], sums)


def _inputs_of(
    model: nn.Module, ids_RT: torch.Tensor, start_R1: torch.Tensor, cache: ForkableCache
) -> ModelInputs:
    """Return the arguments of a pass over tokens whose positions begin at ``start_R1`` (R, 1)."""
    inputs: ModelInputs = {"input_ids": ids_RT, cache_argument(base_model(model)) or "": cache}
    if "position_ids" in accepted_arguments(model):  # not every model derives them from its cache
        inputs["position_ids"] = start_R1 + torch.arange(ids_RT.shape[1], device=ids_RT.device)
    return inputs


def _read_prompts(
    model: nn.Module,
    fork: Fork,
    cache: ForkableCache,
    unused: list[torch.Tensor],
    sums: list[torch.Tensor | None],
    with_aux_loss: bool,
    routing: Any,
) -> torch.Tensor:
    """Write the prompts of ``fork`` and their images to ``cache``; returns their next positions (P, 1).

    Adds the logits of the last positions to ``unused``, and router sums to ``sums``.
    """
    ids_PL = fork.prompt_ids_PL
    size, length = ids_PL.shape
    start_P1 = ids_PL.new_zeros(size, 1)
    if not length:  # a prompt of one token has nothing before its last token
        return start_P1
    inputs = _inputs_of(model, ids_PL, start_P1, cache)
    if routing is not None:  # columns of the prompts without their last tokens
        inputs["routing"] = routing, routing.index(fork.first_P, length + 1, length)
    arrays, accepted = join_images(fork.images, [0] * size, length, ids_PL.device), accepted_arguments(model)
    inputs.update({name: value for name, value in arrays.items() if name in accepted})
    own_positions = has_images(fork.images) and has_own_positions(model)
    if own_positions:
        inputs.pop("position_ids", None)
    weight_S = None
    if with_aux_loss:  # a prompt's token counts once per row, (P · (L - 1),)
        weight_S = torch.tensor(fork.rows_P, device=ids_PL.device).repeat_interleave(length)
    with checkpoints_keep_cache(model):
        output, of_pass = call_model(model, {**inputs, "logits_to_keep": 1}, router_weight_S=weight_S)
    unused.append(output.logits)
    sums.append(of_pass)
    cache.check_written()
    # An image takes fewer positions than tokens.
    return start_P1 + length + (multimodal_part(model).rope_deltas if own_positions else 0)


def _continue_prompts(
    model: nn.Module,
    part: Continuations,
    prompt: ForkableCache,
    start_P1: torch.Tensor,
    compute: Callable[..., Any],
    with_aux_loss: bool,
    routing: Any,
) -> LogprobOutput:
    """Return log-probs and entropies (R, T) of completions that continue the layers of ``prompt``.

    Args:
        compute: :func:`forward_logprobs` with the head and the temperature.
    """
    before = prompt.rows(part.prompt_R) if prompt.written else _empty_layers(model)
    cache = ForkableCache(before, prompt.num_tokens, keep=False)
    inputs = _inputs_of(model, part.input_ids_RT, start_P1[part.prompt_R], cache)
    if routing is not None:  # from the prompt's last token on
        inputs["routing"] = routing, routing.index(part.rows_R, 1, part.input_ids_RT.shape[1])
    weight_S = part.real_RT.flatten() if with_aux_loss else None
    with checkpoints_keep_cache(model):
        output = compute(model, inputs, part.target_RT, kept=part.kept, router_weight_S=weight_S)
    cache.check_written()
    return LogprobOutput(*output)


class ForkableCache(DynamicCache):
    """Cache whose layers a forward pass reads as they were before it; what the pass writes is kept apart.

    A recomputation in the backward pass therefore repeats the same values, and no tensor that autograd has
    saved is written to.

    Args:
        before: layers before the pass.
        num_tokens: input tokens of all passes of the micro-batch, whose activations exist together.
        keep: keep what the pass writes, for passes that continue it.

    Attributes:
        written: (layer, method, number of the state) of every write so far.
    """

    def __init__(self, before: list[Any], num_tokens: int, *, keep: bool) -> None:
        self.before = before
        self.num_tokens = num_tokens
        self.after = [_copy(layer) for layer in before] if keep else []
        self.written: set[tuple[Any, ...]] = set()
        self.has_gradient = torch.is_grad_enabled()
        Cache.__init__(self, layers=[self._reader(index) for index in range(len(before))])

    def rows(self, rows_R: torch.Tensor) -> list[Any]:
        """Return the layers after the pass with rows ``rows_R``, which may repeat rows."""
        layers = [_copy(layer) for layer in self.after]
        for layer in layers:
            for number, size in getattr(layer, "conv_kernel_size", {}).items():
                if size is not None:  # only the inputs that the convolution of the next token reads
                    layer.conv_states[number] = layer.conv_states[number][..., -size:]
            select_cache_rows(layer, rows_R)
        return layers

    def check_written(self) -> None:
        """Raise a RuntimeError if the pass wrote nothing: it saw no cache."""
        if not self.written:
            raise RuntimeError(
                "sequence_layout='forked': the model's forward did not use the cache that it was given; "
                "use sequence_layout='padded'"
            )

    def _reader(self, index: int) -> Any:
        """Return layer ``index`` as the pass sees it."""
        reader = _copy(self.before[index])
        for method in _UPDATES:
            if hasattr(reader, method):
                setattr(reader, method, partial(self._update, index, method))
        return reader

    def _update(self, index: int, method: str, *states: Any, **kwargs: Any) -> Any:
        number = next((state for state in states if isinstance(state, int)), 0)  # of several in one layer
        write = (index, method, number)
        if self.has_gradient and not torch.is_grad_enabled():  # states without a gradient to the prompt
            raise RuntimeError(
                "sequence_layout='forked': gradient checkpoints with use_reentrant=True detach the cache; "
                "set gradient_checkpointing_kwargs={'use_reentrant': False}, or sequence_layout='padded'"
            )
        # The second time is a recomputation: its result counts, its states have been kept.
        keeps = bool(self.after) and write not in self.written
        layer = self.after[index] if keeps else _copy(self.before[index])
        self.written.add(write)
        if method != "update_recurrent_state":
            return getattr(layer, method)(*states, **kwargs)
        # The layer's own method copies into the old state, which autograd has saved.
        layer.recurrent_states[number] = states[0]
        layer.is_recurrent_states_initialized[number] = True
        return states[0]


def _empty_layers(model: nn.Module) -> list[Any]:
    """Create the layers of the cache of ``model`` before the first token."""
    layers: list[Any] = DynamicCache(config=base_model(model).config).layers
    for layer in layers:
        if hasattr(layer, "conv_states"):
            layer.record_past = True  # without, convolutions write their last inputs in place
    return layers


def _copy(layer: Any) -> Any:
    """Return a cache layer with the same tensors, whose attributes can be set apart from it."""
    copied = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):  # states by number
            setattr(copied, name, dict(value))
    return copied


def cannot_fork(model: nn.Module) -> str | None:
    """Return the reason why the cache of ``model`` cannot be continued with gradients; None if it can."""
    base: CausalLM = base_model(model)
    if has_prompt_learning(model):
        return "its adapter adds virtual tokens to every prompt"
    if reason := cannot_continue_images(model):
        return reason
    if base.config.is_encoder_decoder or not supports_dynamic_cache(base):
        return f"transformers makes no DynamicCache for {type(base).__name__}"
    if reason := cache_without_rows(base)[0]:
        return reason
    if cache_argument(base) is None or "logits_to_keep" not in accepted_arguments(model):
        return "its forward does not accept a cache and logits_to_keep"
    if not supports_cache_in_checkpoints():
        return "this version of transformers takes the cache from layers under gradient checkpointing"
    return dropout_of_attention(base)
