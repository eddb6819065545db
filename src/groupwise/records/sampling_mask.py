"""Token sets that truncated sampling keeps: top-p, top-k, min-p.

With the set K_t that the sampler recorded for token t, every policy (current, old, reference) has

    log π(a_t) = z_a / T − log Σ_{v ∈ K_t} exp(z_v / T)

the keep-sampling-mask of DeepSeek-V3.2 (arXiv 2512.02556, section 3.1). Entropy and KL are of the same
truncated distribution. The sets are constants: no gradient flows through the choice of K_t.

Axes: T positions of a sequence, N positions of a batch, E tokens kept at all positions, V vocabulary, R rows
and C columns of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: Logit of a token outside K_t. Finite, so that 0 · logit is 0; its exp is 0 in float32 and float64.
EXCLUDED_LOGIT = -1e30


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """Token ids kept at consecutive positions, in host memory: 4 bytes per position and 4 per token kept.

    Example: tokens 3 and 5 kept at the first position, all tokens at the second, token 4 at the third::

        SamplingMask(ids=tensor([3, 5, 4]), counts=tensor([2, 0, 1]))

    ids: (E,) int32, position after position. The sampled token of a position is among its ids.
    counts: (T,) int32, ids of each position; 0: the whole vocabulary was kept, and no ids are stored.
    """

    ids: torch.Tensor
    counts: torch.Tensor

    def __len__(self) -> int:
        return len(self.counts)

    @staticmethod
    def whole_vocabulary(length: int) -> SamplingMask:
        """Return ``length`` positions without truncation."""
        return SamplingMask(torch.zeros(0, dtype=torch.int32), torch.zeros(length, dtype=torch.int32))

    @staticmethod
    def from_lists(positions: Sequence[Sequence[int]]) -> SamplingMask:
        """Build from one list of ids per position; an empty list stands for the whole vocabulary."""
        ids = [token for position in positions for token in position]
        counts = [len(position) for position in positions]
        return SamplingMask(torch.tensor(ids, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32))

    @staticmethod
    def concatenate(parts: Sequence[SamplingMask]) -> SamplingMask:
        """Join parts of a sequence."""
        return SamplingMask(
            torch.cat([part.ids for part in parts]), torch.cat([part.counts for part in parts])
        )

    def first(self, length: int) -> SamplingMask:
        """Return the first ``length`` positions, without memory of the others."""
        if length >= len(self):
            return self
        counts = self.counts[:length].clone()
        return SamplingMask(self.ids[: int(counts.sum())].clone(), counts)


def join_sampling_masks(
    rows: Sequence[SamplingMask | None], widths: Sequence[int], start: int | Sequence[int] = 0
) -> SamplingMask | None:
    """Lay out the sampling masks of B sequences row after row, as the positions of a forward pass.

    Args:
        rows: sampling mask per sequence, B; None: the whole vocabulary at every position.
        widths: positions of each row in the result, B.
        start: position of each sequence's first token in its row, one for all or B; positions before it and
            after its end keep the whole vocabulary.

    Returns:
        sum(widths) positions; None if no position is truncated.
    """
    if all(row is None or not len(row.ids) for row in rows):
        return None
    counts = torch.zeros(sum(widths), dtype=torch.int32)
    offset, starts = 0, [start] * len(rows) if isinstance(start, int) else start
    for row, width, first in zip(rows, widths, starts, strict=True):
        if row is not None:
            counts[offset + first : offset + first + len(row)] = row.counts
        offset += width
    return SamplingMask(torch.cat([row.ids for row in rows if row is not None]), counts)


@dataclass(frozen=True, eq=False)
class SamplingMaskTiles:
    """Sampling mask of N positions as boolean tiles of the (N, V) mask, which is never built as a whole.

    Between the passes of a head it takes 8 bytes per token kept on the device, and 4 on the host.

    sorted_ids_E: kept ids in ascending order, on the host: the entries of a tile's columns are contiguous.
    column_E, row_E: the same ids and their positions on the device, int32.
    untruncated_N: positions that keep the whole vocabulary.
    """

    sorted_ids_E: torch.Tensor
    column_E: torch.Tensor
    row_E: torch.Tensor
    untruncated_N: torch.Tensor

    @staticmethod
    def on(device: torch.device, kept: SamplingMask) -> SamplingMaskTiles:
        """Move a sampling mask to ``device``; waits for no computation."""
        sorted_ids_E, order_E = kept.ids.sort()
        row_E = torch.arange(len(kept), dtype=torch.int32).repeat_interleave(kept.counts)[order_E]
        return SamplingMaskTiles(
            sorted_ids_E, sorted_ids_E.to(device), row_E.to(device), (kept.counts == 0).to(device)
        )

    def tile(self, rows: slice, columns: slice) -> torch.Tensor:
        """Return the mask (R, C) of a tile, True for kept tokens; contiguous."""
        height, width = rows.stop - rows.start, columns.stop - columns.start
        bounds = torch.tensor([columns.start, columns.stop], dtype=torch.int32)
        first, last = torch.searchsorted(self.sorted_ids_E, bounds).tolist()
        row_E, column_E = self.row_E[first:last] - rows.start, self.column_E[first:last] - columns.start
        # Entries of other rows fall on one more element: selecting entries would wait for the device.
        outside_E = (row_E < 0) | (row_E >= height)
        index_E = (row_E.long() * width + column_E).masked_fill(outside_E, height * width)
        flat = torch.empty(height * width + 1, dtype=torch.bool, device=self.row_E.device)
        mask_RC = flat[:-1].view(height, width)
        mask_RC.copy_(self.untruncated_N[rows].unsqueeze(1).expand(-1, width))
        flat[index_E] = True
        return mask_RC
