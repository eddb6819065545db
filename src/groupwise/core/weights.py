"""Token weights: every normaliser of the family, linear in the per-token loss.

A normaliser depends on masks and counts only, so the weights of a whole accumulation window are known before
its first forward pass. Gradients are averaged over ranks afterwards; the factor ``world_size`` undoes that
where the normaliser is a global count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class WindowCounts:
    """Exact counts of one accumulation window, over all micro-batches and all ranks.

    sequences: number of sequences, whether or not they have loss tokens.
    tokens: number of loss tokens.
    micro_batches: accumulation steps of this rank (N_acc).
    world_size: number of data-parallel ranks.
    max_completion_length: L_max.
    """

    sequences: int
    tokens: int
    micro_batches: int
    world_size: int
    max_completion_length: int


def sequence_mean(mask_BT: torch.Tensor, counts: WindowCounts) -> torch.Tensor:
    """1 / (sequences · |o_i|): mean over tokens, then over sequences (DeepSeekMath, eq. 3)."""
    lengths_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)
    return mask_BT * counts.world_size / (counts.sequences * lengths_B1)


def local_token_mean(mask_BT: torch.Tensor, counts: WindowCounts) -> torch.Tensor:
    """1 / (N_acc · tokens of this micro-batch): depends on how the window is split (BNPO)."""
    return mask_BT / (counts.micro_batches * mask_BT.sum().clamp(min=1))


def constant_length(mask_BT: torch.Tensor, counts: WindowCounts) -> torch.Tensor:
    """1 / (sequences · L_max): no length bias (Dr. GRPO, section 3.2)."""
    return mask_BT * counts.world_size / (counts.sequences * counts.max_completion_length)


def token_mean(mask_BT: torch.Tensor, counts: WindowCounts) -> torch.Tensor:
    """1 / (loss tokens of the window over all ranks): every token counts the same (DAPO, eq. 8)."""
    return mask_BT * counts.world_size / max(counts.tokens, 1)


def sequence_sum(mask_BT: torch.Tensor, counts: WindowCounts) -> torch.Tensor:
    """1 / sequences: sum over tokens, mean over sequences (LUSPO)."""
    return mask_BT * counts.world_size / counts.sequences


NORMALIZERS: dict[str, Callable[[torch.Tensor, WindowCounts], torch.Tensor]] = {
    "sequence_mean": sequence_mean,
    "local_token_mean": local_token_mean,
    "constant_length": constant_length,
    "token_mean": token_mean,
    "sequence_sum": sequence_sum,
}
