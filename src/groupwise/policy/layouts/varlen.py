"""Attention of packed sequences in one call of a varlen flash kernel, on CUDA in half precision.

The tokens are the queries; the keys of each row are a shared prompt and its own tokens::

    queries   p0 p1 p2 | a0 a1 | b0 b1 b2              boundaries  0 3 5 8
    keys      p0 p1 p2 | p0 p1 p2 a0 a1 | p0 … b2      boundaries  0 3 8 14

Axes: S tokens, K keys of all rows, H query heads, J key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F

from groupwise.compat.torch import varlen_attention
from groupwise.policy.attention import AttentionFunction


def reason_against_varlen(device: torch.device, dtype: torch.dtype) -> str:
    """Return the reason why no kernel computes attention of ``dtype`` on a CUDA device; "": one does."""
    if not (dtype.is_floating_point and dtype.itemsize == 2):
        return f"flash attention has no {str(dtype).removeprefix('torch.')}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "flash attention needs Ampere or newer"
    return "" if varlen_attention() is not None else "torch.nn.attention.varlen needs torch 2.13 or newer"


def varlen_rows(rows: Sequence[tuple[Sequence[int], range]], device: torch.device) -> AttentionFunction:
    """Return the attention of rows, each a shared prompt and its own tokens; these are all tokens."""
    rows = sorted((row for row in rows if row[1]), key=lambda row: row[1].start)
    lengths = [[len(own) for _, own in rows], [len(prompt) + len(own) for prompt, own in rows]]
    ends = torch.tensor([[0, *accumulate(each)] for each in lengths], dtype=torch.int32)
    keys = torch.tensor([token for prompt, own in rows for token in (*prompt, *own)])
    return partial(_attend, keys.to(device), ends.to(device), [*map(max, lengths)])


def _attend(
    key_index_K: torch.Tensor, ends: torch.Tensor, longest: Sequence[int],
    query_1HSD: torch.Tensor, key_1JSD: torch.Tensor, value_1JSD: torch.Tensor,
    scale: float | None, sliding_window: int | None,
) -> torch.Tensor:  # fmt: skip
    # (K, J, D): a shared prompt once per completion. The backward of a lookup sums repeated tokens fast.
    key_KJD, value_KJD = (
        F.embedding(key_index_K, heads[0].transpose(0, 1).flatten(1)).unflatten(1, (heads.shape[1], -1))
        for heads in (key_1JSD, value_1JSD)
    )
    # Under autocast a norm after the projections leaves float32 queries and keys.
    query_SHD = query_1HSD[0].transpose(0, 1).to(value_KJD.dtype)
    # Causal from the lower right: the last query of a row sees its last key. A window of 1 is the query.
    out_SHD: torch.Tensor = varlen_attention()(  # type: ignore[misc]
        query_SHD, key_KJD.to(value_KJD.dtype), value_KJD, *ends, *longest, scale=scale,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query_SHD.shape[1] != key_KJD.shape[1],
    )  # fmt: skip
    return out_SHD.unsqueeze(0)
