"""Layouts without padding: the sequences of a micro-batch as one row of S tokens.

`packed` concatenates the sequences. `shared_prefix` contains the prompt of a group once, followed by its
completions; the positions of each completion continue from the prompt's end, and a completion attends to the
prompt and to itself. A group of two completions, p0 p1 p2 → a0 a1 and b0 b1 b2::

    token       p0 p1 p2 a0 a1 b0 b1 b2      input of the model, (1, S), S = 8
    position     0  1  2  3  4  3  4  5      restarts at the prompt's end: a0 and b0 both follow p2

    attention   p0 p1 p2 a0 a1 b0 b1 b2      row: query, column: key, x: visible
          p0     x                           block 1, causal: the prompt
          p1     x  x
          p2     x  x  x
          a0     x  x  x  x                  block 2, a row per completion:
          a1     x  x  x  x  x               queries a0 a1, keys p0 p1 p2 a0 a1
          b0     x  x  x        x
          b1     x  x  x        x  x         queries b0 b1 b2, keys p0 p1 p2 b0 b1 b2
          b2     x  x  x        x  x  x

    logits of   p2 a0    p2 b0 b1            logit_index_N = 2 3 2 5 6: p2 predicts both first tokens
    predict     a0 a1    b0 b1 b2            target_N, N = 5; output_index_N places them in (B, T)

The S x S mask is never built: attention gathers queries and keys into blocks of rows of similar length, and
within a row a key is visible if its position is not after the query's. All other computation is per token and
independent of the layout.

Axes: S tokens of the packed sequence, N completion tokens of the micro-batch, B sequences, L prompt tokens,
T completion tokens, E features. In a block: R rows, Q queries, K keys. Attention: H query heads, J key-value
heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import nn

from groupwise.core.padding import pad_sequences
from groupwise.policy.attention import (
    AttentionFunction,
    attention_dtype,
    grouped_query_attention,
    install_attention_hook,
)
from groupwise.policy.heads.capture import LogprobHead, ModelInputs, forward_logprobs
from groupwise.policy.introspection import base_model
from groupwise.records import LogprobOutput, TokenBatch
from groupwise.records.sampling_mask import SamplingMask, join_sampling_masks
from groupwise.records.tensors import shape_of

HALF_PRECISION = (torch.float16, torch.bfloat16)
_NEVER = torch.iinfo(torch.int32).max  # position of a padded key: after every query

#: A row of attention in the packed sequence: a shared beginning, or nothing, and the tokens that see it and,
#: up to their own position, each other.
Branch = tuple[Sequence[int], range]


@dataclass(frozen=True)
class Block:
    """Rows of attention that are computed in one call.

    query_RQ, key_RK: indices into the packed sequence; padding repeats the first index of the row.
    query_position_RQ, key_position_RK: positions in the sequence; padded keys are after every query.
    same: keys and queries are the same tokens, so without a sliding window causal attention needs no mask.
    """

    query_RQ: torch.Tensor
    key_RK: torch.Tensor
    query_position_RQ: torch.Tensor
    key_position_RK: torch.Tensor
    same: bool

    def mask(self, sliding_window: int | None, heads_per_key: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return 0 for visible keys, else -inf, (R, 1, H / J · Q, K); None: plain causal attention."""
        if self.same and (sliding_window is None or sliding_window >= self.key_RK.shape[1]):
            return None
        # (R, 1, Q, 1) and (R, 1, 1, K).
        query_R1Q1, key_R11K = self.query_position_RQ[:, None, :, None], self.key_position_RK[:, None, None]
        # Causal by position, so completions of a group do not see each other's keys.
        hidden_R1QK = key_R11K > query_R1Q1
        if sliding_window is not None:
            hidden_R1QK |= key_R11K <= query_R1Q1 - sliding_window
        mask_R1QK = torch.zeros_like(hidden_R1QK, dtype=dtype).masked_fill_(hidden_R1QK, float("-inf"))
        return mask_R1QK.repeat(1, 1, heads_per_key, 1)


@dataclass(frozen=True)
class PackedAttention:
    """Attention of packed sequences, an ``AttentionFunction`` of ``groupwise.policy.attention``.

    blocks: rows of attention; every token is a query of exactly one block.
    order_S: index of each token in the concatenated outputs of all blocks.
    varlen: computes the same in half precision, in one call; None: nothing does.
    """

    blocks: Sequence[Block]
    order_S: torch.Tensor
    varlen: AttentionFunction | None = None
    # By block, window, queries per key and dtype. A mask lives as long as layers keep it for their backward
    # pass: it grows with the square of the tokens, unlike the activations.
    _masks: WeakValueDictionary[Any, torch.Tensor] = field(default_factory=WeakValueDictionary, repr=False)

    @torch.compiler.disable  # blocks differ in number and shape from one micro-batch to the next
    def __call__(
        self,
        query_1HSD: torch.Tensor,
        key_1JSD: torch.Tensor,
        value_1JSD: torch.Tensor,
        scale: float | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Compute the attention of one layer. Returns (1, S, H, D)."""
        if self.varlen is not None and value_1JSD.dtype in HALF_PRECISION:
            return self.varlen(query_1HSD, key_1JSD, value_1JSD, scale, sliding_window)
        heads_per_key, dtype = query_1HSD.shape[1] // key_1JSD.shape[1], attention_dtype(query_1HSD)
        outputs = []
        for index, block in enumerate(self.blocks):
            kind = (sliding_window, heads_per_key, dtype)
            mask_R1GK = self._masks.get((index, kind))
            if mask_R1GK is None and (mask_R1GK := block.mask(*kind)) is not None:
                self._masks[index, kind] = mask_R1GK  # the same tensor for all layers
            out_RHQD = grouped_query_attention(
                _gather(query_1HSD, block.query_RQ),  # (R, H, Q, D)
                _gather(key_1JSD, block.key_RK),  # (R, J, K, D), a shared prompt once per completion
                _gather(value_1JSD, block.key_RK),
                mask_R1GK,
                scale,
            )
            outputs.append(out_RHQD.transpose(1, 2).flatten(0, 1).flatten(1))  # (R * Q, H * D)
        rows = torch.cat(outputs) if len(outputs) > 1 else outputs[0]  # (all R · Q, H · D)
        # Drops the padding of rows.
        return F.embedding(self.order_S, rows).unflatten(1, (query_1HSD.shape[1], -1)).unsqueeze(0)


def _gather(heads_1HSD: torch.Tensor, index_RQ: torch.Tensor) -> torch.Tensor:
    """Gather tokens of every head. Returns (R, H, Q, D).

    Uses an embedding lookup: its backward sums repeated indices fast, and on CUDA in a deterministic order.
    """
    rows_RQE = F.embedding(index_RQ, heads_1HSD[0].transpose(0, 1).flatten(1))  # E = H * D
    return rows_RQE.unflatten(2, (heads_1HSD.shape[1], -1)).transpose(1, 2)


@dataclass(frozen=True)
class PackedSequences:
    """Inputs of one forward pass over the sequences of a micro-batch.

    token_ids_1S, position_ids_1S: inputs of the model, int64.
    logit_index_N: index of the token whose logits predict a completion token; repeated for shared prompts.
    target_N: the completion tokens.
    output_index_N: index of each completion token in the flattened (B, T) of the batch.
    kept: tokens of the truncated distribution at each of the N tokens; None: all tokens.
    attention: replaces the model's attention if the hook is installed.
    cu_seqlens: layout `packed`: 0 and the end of each sequence, int32.
    max_seqlen: length of the longest of these sequences.
    rows_S: number of rows of the batch that contain each token.
    source_S: index of each token in the flattened (B, L + T) of the batch.
    """

    token_ids_1S: torch.Tensor
    position_ids_1S: torch.Tensor
    logit_index_N: torch.Tensor
    target_N: torch.Tensor
    output_index_N: torch.Tensor
    attention: PackedAttention
    cu_seqlens: torch.Tensor
    max_seqlen: int
    rows_S: torch.Tensor
    source_S: torch.Tensor
    kept: SamplingMask | None = None

    def num_tokens(self) -> int:
        """Return the number of input tokens."""
        return self.token_ids_1S.numel()


@dataclass
class Packing:
    """Lists of a packing on the host, while tokens are added to it.

    source: index of each token in the flattened (B, L + T).
    positions, counts: position of each token, and number of rows that contain it.
    branches: rows of attention; every token belongs to the second part of exactly one.
    logit_index, output_index: see :class:`PackedSequences`; row after row.
    """

    source: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    logit_index: list[int] = field(default_factory=list)
    output_index: list[int] = field(default_factory=list)

    def add(self, begin: int, length: int, path: Sequence[int] = (), rows: int = 1) -> range:
        """Add tokens of the batch from index ``begin`` on; returns their packed indices.

        Args:
            path: packed indices of all tokens before them, which they attend to.
            rows: number of rows that contain them.
        """
        own = range(len(self.source), len(self.source) + length)
        self.source += range(begin, begin + length)
        self.positions += range(len(path), len(path) + length)
        self.counts += [rows] * length
        if own:
            self.branches.append((path, own))
        return own

    def on_device(self, batch: TokenBatch, completions: list[int], *, varlen: bool) -> PackedSequences:
        """Copy the packing to the device of ``batch``, in one transfer.

        Args:
            completions: tokens of each row's completion.
            varlen: compute attention in half precision with a varlen kernel.
        """
        ends = [0, *(own.stop for path, own in self.branches if not path)]  # of sequences
        order, padded = _block_indices(self.branches, len(self.source))
        lists = (self.source, self.positions, self.counts, self.logit_index, self.output_index, ends, order)
        source_S, position_S, rows_S, logit_index_N, output_index_N, cu_seqlens, order_S, *indices = (
            _on_device([*map(torch.LongTensor, lists), *padded], batch.prompt_ids_BL.device)
        )
        # Positions of queries and keys are read on the device.
        blocks = [_block(*pair, position_S) for pair in zip(indices[::2], indices[1::2], strict=True)]
        in_one_call = None
        if varlen:  # CPUs and float32 have no such kernel, and do not import its attention
            from groupwise.policy.layouts.varlen import varlen_rows

            in_one_call = varlen_rows(self.branches, position_S.device)
        tokens, kept = batch.sequences()[0].flatten(), batch.sampling_mask  # (B · (L + T),), by row
        return PackedSequences(
            token_ids_1S=tokens[source_S].unsqueeze(0),  # (1, S)
            position_ids_1S=position_S.unsqueeze(0),
            logit_index_N=logit_index_N,
            target_N=batch.completion_ids_BT.flatten()[output_index_N],  # (N,)
            output_index_N=output_index_N,
            attention=PackedAttention(blocks, order_S, in_one_call),
            cu_seqlens=cu_seqlens.int(),
            max_seqlen=max(end - start for start, end in pairwise(ends)),
            rows_S=rows_S,
            source_S=source_S,
            kept=None if kept is None else join_sampling_masks(kept, completions),
        )


def pack_sequences(batch: TokenBatch, *, shared: bool, varlen: bool = False) -> PackedSequences:
    """Pack the sequences of ``batch`` into one row.

    Waits once for the device, to read the lengths; all indices go there in one copy. The forward pass over
    the result does not wait.

    Args:
        shared: include the prompt of consecutive rows with the same prompt only once.
        varlen: compute attention in half precision with a varlen kernel.
    """
    shape, packing = shape_of(batch), Packing()
    max_completion, max_prompt = batch.completion_ids_BT.shape[1], batch.prompt_ids_BL.shape[1]
    for rows in shape.groups(shared=shared):
        length, is_shared = shape.prompts[rows[0]], len(rows) > 1
        # Padding is on the left of prompts and on the right of completions: a sequence is one range.
        begin = rows[0] * (max_prompt + max_completion) + max_prompt - length
        own = packing.add(begin, length + (0 if is_shared else shape.completions[rows[0]]), rows=len(rows))
        prompt = own[:length]
        for row in rows:
            begin = row * (max_prompt + max_completion) + max_prompt
            # A shared prompt attends to itself alone; a group of one row is an ordinary sequence.
            completion = packing.add(begin, shape.completions[row], prompt) if is_shared else own[length:]
            if completion:
                packing.logit_index += [prompt[-1], *completion[:-1]]  # the prompt predicts the first token
                packing.output_index += range(row * max_completion, row * max_completion + len(completion))
    return packing.on_device(batch, shape.completions, varlen=varlen)


def _on_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy integers to the device in one transfer of int32. Returns int64 tensors of the same shapes."""
    # Small copies cost a launch each, so that a few dozen of them outweigh a packing.
    buffer = torch.cat([tensor.flatten() for tensor in tensors]).int().to(device).long()
    parts = buffer.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _block_indices(branches: Sequence[Branch], num_tokens: int) -> tuple[list[int], list[torch.Tensor]]:
    """Return ``order_S``, and queries (R, Q) and keys (R, K) of each block in turn, padded with -1.

    A block has rows of similar length: the shortest has at least half the length of the longest. Rows without
    a prefix come first: without a sliding window, a block of them needs no mask.
    """
    blocks: list[list[Branch]] = []
    for branch in sorted(branches, key=lambda branch: (len(branch[0]) > 0, -len(branch[1]))):
        longest = blocks[-1][0] if blocks else branch
        if blocks and bool(branch[0]) == bool(longest[0]) and 2 * len(branch[1]) >= len(longest[1]):
            blocks[-1].append(branch)
        else:
            blocks.append([branch])
    indices = []
    order = [0] * num_tokens  # index of each token in the concatenated outputs of the blocks
    num_outputs = 0
    for rows in blocks:
        queries = [own for _, own in rows]
        keys = [[*prefix, *own] for prefix, own in rows] if rows[0][0] else queries
        indices += [pad_sequences(queries, -1), pad_sequences(keys, -1)]
        for own in queries:
            order[own.start : own.stop] = range(num_outputs, num_outputs + len(own))
            num_outputs += len(queries[0])  # Q, the longest of the block
    return order, indices


def _block(query_RQ: torch.Tensor, key_RK: torch.Tensor, position_S: torch.Tensor) -> Block:
    """Build the block of rows with these queries and keys, indices into the packed sequence or -1."""
    same = query_RQ.shape == key_RK.shape  # without a prefix
    key_position_RK = torch.where(key_RK < 0, _NEVER, position_S[key_RK])  # no query sees padding
    query_RQ, key_RK = (torch.where(index < 0, index[:, :1], index) for index in (query_RQ, key_RK))
    return Block(query_RQ, key_RK, position_S[query_RQ], key_position_RK, same=same)


def compute_packed_logprobs(
    model: nn.Module,
    batch: TokenBatch,
    packed: PackedSequences,
    head: LogprobHead,
    *,
    with_entropy: bool,
    with_aux_loss: bool = False,
    routing: Any = None,
) -> LogprobOutput:
    """Compute log-probs (and entropies) of the completion tokens at the temperature that sampled them.

    Args:
        model: one for which :func:`unsupported` returned None.
        packed: the same sequences from :func:`pack_sequences`.

    Returns:
        log-probs and entropies (B, T), float32, zero on padding; router sums, if requested.
    """
    inputs: ModelInputs = {
        "input_ids": packed.token_ids_1S,
        "position_ids": packed.position_ids_1S,
        "logits_to_keep": packed.logit_index_N,
    }
    if install_attention_hook(base_model(model)):
        # (1, 1, 1, 1), a placeholder: given a mask of four axes, the model builds no S x S mask of its own.
        inputs["attention_mask"] = packed.token_ids_1S.new_zeros((1, 1, 1, 1), dtype=torch.bool)
        inputs["attention_function"] = packed.attention
    else:
        # Boundaries of the sequences, which transformers else derives in every layer from the positions.
        inputs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), packed.cu_seqlens)  # int32, from 0 to S
        inputs |= dict.fromkeys(("max_length_q", "max_length_k"), packed.max_seqlen)
    if routing is not None:  # of experts, by the token's place in (B, L + T)
        inputs["routing"] = routing, packed.source_S
    targets_1N = packed.target_N.unsqueeze(0)  # (1, N)
    logps_1N, entropy_1N, router_sums = forward_logprobs(
        model,
        inputs,
        targets_1N,
        head,
        batch.sampler.temperature,
        with_entropy=with_entropy,
        router_weight_S=packed.rows_S if with_aux_loss else None,
        kept=packed.kept,
    )
    shape = batch.completion_ids_BT.shape

    def unpack(values_1N: torch.Tensor) -> torch.Tensor:
        zeros = values_1N.new_zeros(shape.numel())  # (B · T,), 0 on padding
        return zeros.scatter(0, packed.output_index_N, values_1N[0]).view(shape)

    return LogprobOutput(unpack(logps_1N), None if entropy_1N is None else unpack(entropy_1N), router_sums)
