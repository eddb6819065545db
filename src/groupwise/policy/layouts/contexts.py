"""Rows that the model computes for rollouts whose tokens follow several contexts (``TokenBatch.contexts``).

The loss sees a rollout as one row of T tokens; the model computes a row of its own after each context. One
rollout with 3 tokens after its prompt P and 1 after Q::

    batch       P | a r b c     contexts (3, Q)
    rows        P | a r b       Q | c
    index_BT        0 1 2  3                 of each token in the flattened rows (R, T'), here T' = 3

Axes: B rollouts, T tokens of a rollout, R rows of the model, T' tokens of the longest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from groupwise.core.padding import length_mask, pad_sequences
from groupwise.policy.layouts.packed import PackedSequences, Packing
from groupwise.records import ImageInputs, LogprobOutput, TokenBatch
from groupwise.records.sampling_mask import SamplingMask


@dataclass(frozen=True)
class ModelRows:
    """Rows that the model computes for a batch of rollouts.

    rows: R rows without contexts; the first B are those after the prompts.
    index_BT: position of each token of the rollouts in the flattened completions of ``rows``; 0 on padding.
    rollout_R: rollout of each row.
    packed: the rows in the layout of the run, if it was prepared.
    """

    rows: TokenBatch
    index_BT: torch.Tensor
    rollout_R: list[int]
    packed: Any = None

    def num_tokens(self) -> int:
        return self.rows.num_tokens() if self.packed is None else self.packed.num_tokens()

    def join(self, output: LogprobOutput) -> LogprobOutput:
        """Return log-probs and entropies of the rows (R, T') as those of the rollouts (B, T)."""
        entropy_RT = output.entropy_BT
        return replace(
            output,
            logps_BT=output.logps_BT.flatten()[self.index_BT],
            entropy_BT=None if entropy_RT is None else entropy_RT.flatten()[self.index_BT],
        )


def split_contexts(batch: TokenBatch) -> ModelRows:
    """Return the rows that the model computes for ``batch``; waits twice for the device, to read tokens."""
    size, width = batch.completion_ids_BT.shape  # B, T
    lengths = batch.completion_mask_BT.sum(-1).tolist()  # |tokens| of each rollout, tools included
    # (rollout, context or None for the prompt, first token, end) of each row; rows after the prompts first,
    # so that those of a group stay neighbours and share their prompt.
    first: list[tuple[int, list[int] | None, int, int]] = []
    later: list[tuple[int, list[int] | None, int, int]] = []
    for rollout, contexts in enumerate(batch.contexts or [None] * size):
        starts = [start for start, _ in contexts or ()]
        ends = [*starts, lengths[rollout]]
        first.append((rollout, None, 0, ends[0]))
        later += [(rollout, ids, s, e) for (s, ids), e in zip(contexts or (), ends[1:], strict=True)]
    parts = first + later
    rollout_R = [rollout for rollout, *_ in parts]
    device = batch.completion_ids_BT.device
    # Flat positions in (B, T) of each row's tokens, and back.
    source = [range(rollout * width + start, rollout * width + end) for rollout, _, start, end in parts]
    source_RT = pad_sequences(source, 0, device=device)
    row_width = source_RT.shape[1]  # T'
    real_RT = length_mask([len(tokens) for tokens in source], row_width, device=device)
    index = torch.zeros(size * width, dtype=torch.long)  # (B · T,), on the host: one transfer
    for row, tokens in enumerate(source):
        index[tokens.start : tokens.stop] = torch.arange(len(tokens)) + row * row_width
    # The prompts of the batch with their padding, and the contexts below them: ids and mask, (R, L').
    prompts, prompt_masks = torch.stack([batch.prompt_ids_BL, batch.prompt_mask_BL]).tolist()
    others: list[Any] = [ids for _, ids, *_ in later]
    prompt_ids_RL = pad_sequences([*prompts, *others], 0, left=True, device=device)
    ones = [[1] * len(ids) for ids in others]
    prompt_mask_RL = pad_sequences([*prompt_masks, *ones], 0, left=True, device=device)

    def of_tokens(values_BT: torch.Tensor, fill: float = 0) -> torch.Tensor:
        return values_BT.flatten()[source_RT].masked_fill(real_RT == 0, fill)

    masks = batch.sampling_mask
    sampler_BT = batch.sampler_logps_BT
    rows = TokenBatch(
        prompt_ids_BL=prompt_ids_RL,
        prompt_mask_BL=prompt_mask_RL,
        completion_ids_BT=of_tokens(batch.completion_ids_BT),
        completion_mask_BT=real_RT,
        loss_mask_BT=of_tokens(batch.loss_mask_BT),
        group_ids_B=batch.group_ids_B[rollout_R],
        old_logps_BT=of_tokens(batch.old_logps_BT, torch.nan),
        sampler_logps_BT=None if sampler_BT is None else of_tokens(sampler_BT, torch.nan),
        sampler=batch.sampler,
        images=None if batch.images is None else (*batch.images, *_images(batch, later)),
        sampling_mask=masks
        and tuple(_positions(masks[rollout], start, end) for rollout, _, start, end in parts),
    )
    return ModelRows(rows, index.to(device).view(size, width), rollout_R)


def pack_tree(batch: TokenBatch, *, varlen: bool = False) -> PackedSequences:
    """Pack rows with every common beginning once, where the layout `shared_prefix` has common prompts once.

    Rows ``P a r b``, ``P a s c`` and ``P d`` of 2, 1, 1, 1, … tokens::

        token       P P a r b s c d
        position    0 1 2 3 4 3 4 2        r and s both follow a, and d follows P
        attention   P P | a | r b | s c | d, each with the tokens of its row before it

    Waits for the device, to read the tokens.
    """
    ids, mask = batch.sequences()
    rows = [
        [token for token, real in zip(*row, strict=True) if real]
        for row in zip(ids.tolist(), mask.tolist(), strict=True)
    ]
    prompts, completions = batch.prompt_mask_BL.sum(-1).tolist(), batch.completion_mask_BT.sum(-1).tolist()
    max_prompt, max_completion = batch.prompt_ids_BL.shape[1], batch.completion_ids_BT.shape[1]
    width = max_prompt + max_completion
    packing = Packing()
    paths: dict[int, list[int]] = {}  # by row, the packed index of each of its tokens
    # Rows that begin alike are neighbours in the order of their tokens; and their common beginning so far.
    pending: list[tuple[list[int], list[int]]] = [(sorted(range(len(rows)), key=rows.__getitem__), [])]
    while pending:
        group, path = pending.pop()
        first, last = rows[group[0]], rows[group[-1]]
        limit = min(len(rows[row]) for row in group)
        end = next((i for i in range(len(path), limit) if first[i] != last[i]), limit)
        begin = group[0] * width + max_prompt - prompts[group[0]]  # of the row in the padded batch
        # What follows the known beginning.
        own = packing.add(begin + len(path), end - len(path), path, rows=len(group))
        path = [*path, *own]
        paths.update({row: path for row in group if len(rows[row]) == end})
        # Rows that end here are complete; the others go on, one branch for each next token.
        longer = [row for row in group if len(rows[row]) > end]
        pending += [([*rest], path) for _, rest in groupby(longer, key=lambda row: rows[row][end])]
    for row, length in enumerate(completions):  # a token is predicted at the one before it on its path
        packing.logit_index += paths[row][prompts[row] - 1 : prompts[row] + length - 1]
        packing.output_index += range(row * max_completion, row * max_completion + length)
    return packing.on_device(batch, completions, varlen=varlen)


def _images(batch: TokenBatch, later: list[Any]) -> list[ImageInputs]:
    """Return the images of rows after contexts: those of the prompt where a context begins with it.

    Another context is that of a sub-agent without images; a model refuses image tokens that have none.
    """
    assert batch.images is not None
    pairs = zip(batch.prompt_ids_BL.tolist(), batch.prompt_mask_BL.sum(-1).tolist(), strict=True)
    prompts = [ids[len(ids) - length :] for ids, length in pairs]  # padding is on the left
    return [
        batch.images[rollout] if ids[: len(prompts[rollout])] == prompts[rollout] else ImageInputs()
        for rollout, ids, *_ in later
    ]


def _positions(mask: SamplingMask | None, start: int, end: int) -> SamplingMask | None:
    """Return the sampling mask of the tokens from ``start`` to ``end``."""
    if mask is None:
        return None
    skipped = mask.first(start)
    kept = mask.first(end)
    return SamplingMask(kept.ids[len(skipped.ids) :], kept.counts[start:])
