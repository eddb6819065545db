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
from typing import Any

import torch

from groupwise.core.padding import length_mask, pad_sequences
from groupwise.records import LogprobOutput, TokenBatch
from groupwise.records.sampling_mask import SamplingMask


@dataclass(frozen=True)
class ModelRows:
    """Rows that the model computes for a batch of rollouts.

    rows: R rows without contexts; the first B are those after the prompts.
    index_BT: position of each token of the rollouts in the flattened completions of ``rows``; 0 on padding.
    rollout_R: rollout of each row.
    """

    rows: TokenBatch
    index_BT: torch.Tensor
    rollout_R: list[int]

    def num_tokens(self) -> int:
        return self.rows.num_tokens()

    def join(self, output: LogprobOutput) -> LogprobOutput:
        """Return log-probs and entropies of the rows (R, T') as those of the rollouts (B, T)."""
        entropy_RT = output.entropy_BT
        return replace(
            output,
            logps_BT=output.logps_BT.flatten()[self.index_BT],
            entropy_BT=None if entropy_RT is None else entropy_RT.flatten()[self.index_BT],
        )


def split_contexts(batch: TokenBatch) -> ModelRows:
    """Return the rows that the model computes for ``batch``; waits once for the device, to read lengths."""
    size, width = batch.completion_ids_BT.shape  # B, T
    lengths = batch.completion_mask_BT.sum(-1).tolist()
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
    index = torch.zeros(size * width, dtype=torch.long)
    for row, tokens in enumerate(source):
        index[tokens.start : tokens.stop] = torch.arange(len(tokens)) + row * row_width
    prompts_RL, prompt_mask_RL = _prompts(batch, [ids for _, ids, *_ in later], device)

    def of_tokens(values_BT: torch.Tensor, fill: float = 0) -> torch.Tensor:
        return values_BT.flatten()[source_RT].masked_fill(real_RT == 0, fill)

    masks = batch.sampling_mask
    sampler_BT = batch.sampler_logps_BT
    rows = TokenBatch(
        prompt_ids_BL=prompts_RL,
        prompt_mask_BL=prompt_mask_RL,
        completion_ids_BT=of_tokens(batch.completion_ids_BT),
        completion_mask_BT=real_RT,
        loss_mask_BT=of_tokens(batch.loss_mask_BT),
        group_ids_B=batch.group_ids_B[rollout_R],
        old_logps_BT=of_tokens(batch.old_logps_BT, torch.nan),
        sampler_logps_BT=None if sampler_BT is None else of_tokens(sampler_BT, torch.nan),
        sampler=batch.sampler,
        images=None if batch.images is None else tuple(batch.images[rollout] for rollout in rollout_R),
        sampling_mask=masks
        and tuple(_positions(masks[rollout], start, end) for rollout, _, start, end in parts),
    )
    return ModelRows(rows, index.to(device).view(size, width), rollout_R)


def _prompts(
    batch: TokenBatch, contexts: list[Any], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prompts of the batch and the contexts below them, (R, L') ids and mask, padded left."""
    if not contexts:
        return batch.prompt_ids_BL, batch.prompt_mask_BL
    ids = pad_sequences(contexts, 0, left=True, device=device)
    mask = length_mask([len(context) for context in contexts], ids.shape[1], left=True, device=device)
    width = max(ids.shape[1], batch.prompt_ids_BL.shape[1])
    pairs = ((batch.prompt_ids_BL, ids), (batch.prompt_mask_BL, mask))
    padded = [[torch.nn.functional.pad(part, (width - part.shape[1], 0)) for part in pair] for pair in pairs]
    return torch.cat(padded[0]), torch.cat(padded[1])


def _positions(mask: SamplingMask | None, start: int, end: int) -> SamplingMask | None:
    """Return the sampling mask of the tokens from ``start`` to ``end``."""
    if mask is None:
        return None
    skipped = mask.first(start)
    kept = mask.first(end)
    return SamplingMask(kept.ids[len(skipped.ids) :], kept.counts[start:])
