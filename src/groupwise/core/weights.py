"""Token weights: the normalizers of the loss, all linear in the per-token loss.

A normalizer depends on masks, groups and counts only, so the weights of a whole accumulation window are known
before its first forward pass. Gradients are averaged over ranks afterwards; the factor ``world_size`` undoes
that where the normalizer is a global count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from groupwise.registry import Registry

if TYPE_CHECKING:
    from groupwise.records import Experience


@dataclass(frozen=True)
class WindowCounts:
    """Exact counts of one accumulation window, over all micro-batches and all ranks.

    sequences: number of sequences, with and without loss tokens; those of dropped completions do not count.
    tokens: number of loss tokens.
    micro_batches: accumulation steps (N_acc): micro-batches with sequences that count, mean over ranks.
    world_size: number of data-parallel ranks.
    max_completion_length: L_max.
    group_tokens: number of loss tokens of every prompt of the window, by group id; empty unless the
        normalizer was registered with ``needs_group_tokens=True``.
    """

    sequences: int
    tokens: int
    micro_batches: float
    world_size: int
    max_completion_length: int
    group_tokens: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WeightInputs:
    """Rows of one micro-batch that a normalizer weighs.

    mask_BT: loss mask of ones and zeros, floating point.
    group_ids_B: number of the prompt of each row.
    """

    mask_BT: torch.Tensor
    group_ids_B: torch.Tensor

    @property
    def lengths_B1(self) -> torch.Tensor:
        """Number of loss tokens |o_i| of each row, may be 0."""
        return self.mask_BT.sum(-1, keepdim=True)


NormalizerFunction = Callable[[WeightInputs, WindowCounts], torch.Tensor]


@dataclass(frozen=True)
class Normalizer:
    """Entry of ``NORMALIZERS``; see :func:`register_normalizer`."""

    function: NormalizerFunction
    needs_group_tokens: bool = False

    def __call__(
        self, mask_BT: torch.Tensor, group_ids_B: torch.Tensor, counts: WindowCounts
    ) -> torch.Tensor:
        return self.function(WeightInputs(mask_BT, group_ids_B), counts)


NORMALIZERS: Registry[Normalizer] = Registry("normalizer")


def register_normalizer(name: str, function: NormalizerFunction, *, needs_group_tokens: bool = False) -> None:
    """Make ``name`` available as the normalizer of :func:`register_objective`.

    Args:
        function: ``(WeightInputs, WindowCounts) -> (B, T)`` weights, zero off the mask. Gradients are
            averaged over ranks: multiply by ``counts.world_size`` when dividing by a global count.
        needs_group_tokens: count the loss tokens of every prompt over all ranks into ``counts.group_tokens``,
            one more collective per optimizer step.

    Raises:
        ConfigError: the name is taken.
    """
    NORMALIZERS.register(name, Normalizer(function, needs_group_tokens))


def sequence_mean(rows: WeightInputs, counts: WindowCounts) -> torch.Tensor:
    """1 / (sequences · |o_i|): mean over tokens, then over sequences (DeepSeekMath, eq. 3)."""
    # A token of a long row weighs less.
    return rows.mask_BT * counts.world_size / (counts.sequences * rows.lengths_B1.clamp(min=1))


def local_token_mean(rows: WeightInputs, counts: WindowCounts) -> torch.Tensor:
    """1 / (N_acc · tokens of this micro-batch): depends on how the window is split (BNPO)."""
    # No world_size: ranks are averaged, like micro-batches.
    return rows.mask_BT / (counts.micro_batches * rows.mask_BT.sum().clamp(min=1))


def constant_length(rows: WeightInputs, counts: WindowCounts) -> torch.Tensor:
    """1 / (sequences · L_max): no length bias (Dr. GRPO, section 3.2)."""
    # The same for every token of the run.
    return rows.mask_BT * counts.world_size / (counts.sequences * counts.max_completion_length)


def token_mean(rows: WeightInputs, counts: WindowCounts) -> torch.Tensor:
    """1 / (loss tokens of the window over all ranks): every token counts the same (DAPO, eq. 8)."""
    return rows.mask_BT * counts.world_size / max(counts.tokens, 1)  # the same for every token of the window


def sequence_sum(rows: WeightInputs, counts: WindowCounts) -> torch.Tensor:
    """1 / sequences: sum over tokens, mean over sequences (LUSPO)."""
    return rows.mask_BT * counts.world_size / counts.sequences  # a long row weighs more


for _function in (sequence_mean, local_token_mean, constant_length, token_mean, sequence_sum):
    register_normalizer(_function.__name__, _function)


# Rows of a rollout as sequences of their own (``rollout_credit="row"``). A row is what starts after a prompt
# of its own: rows that continue each other are one. A rollout with the loss mask [1 0 1 1 1] whose tokens
# from index 3 on follow another prompt has two: row_masks_BKT = [[[1 0 1 0 0], [0 0 0 1 1]]].


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
