"""Rows of a rollout as sequences of their own in the normalizer (``rollout_credit="row"``).

A row here is what starts after a prompt of its own: rows that continue each other are one. A rollout with the
loss mask ``[1 0 1 1 1]`` whose tokens from index 3 on follow another prompt has two::

    row_masks_BKT = [[[1 0 1 0 0], [0 0 0 1 1]]]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from groupwise.core.weights import Normalizer, WindowCounts

if TYPE_CHECKING:
    from groupwise.records import Experience


def count_rows(batch: Experience) -> torch.Tensor:
    """Return per rollout the number of rows with loss tokens, at least 1: its number of sequences."""
    return _row_masks(batch).any(-1).sum(-1).clamp(min=1)


def weigh_rows(normalizer: Normalizer, batch: Experience, counts: WindowCounts) -> torch.Tensor:
    """Return the token weights (B, T) of a normalizer that gets each row as a sequence.

    Args:
        counts: its ``sequences`` are rows (``count_rows``).
    """
    masks_BKT = _row_masks(batch)
    groups_N = batch.group_ids_B.repeat_interleave(masks_BKT.shape[1])
    weights_NT = normalizer(masks_BKT.flatten(0, 1), groups_N, counts)
    return weights_NT.view_as(masks_BKT).sum(1)  # each token has a weight in one row


def _row_masks(batch: Experience) -> torch.Tensor:
    """Split each loss mask at the beginnings of rows; (B, K, T), zeros for rollouts of fewer than K rows."""
    row_BT = torch.zeros_like(batch.loss_mask_BT, dtype=torch.long)  # index of the row of each token
    contexts = batch.contexts or ()
    for index, starts in enumerate(contexts):
        for start, _ in starts or ():
            row_BT[index, start:] += 1
    num_rows = 1 + max((len(starts or ()) for starts in contexts), default=0)  # K
    numbers_K1 = torch.arange(num_rows, device=row_BT.device).unsqueeze(1)
    return (row_BT.unsqueeze(1) == numbers_K1) * batch.loss_mask_BT.float().unsqueeze(1)
