"""Padding of ragged lists."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch


def pad_sequences(
    sequences: Sequence[Sequence[float] | torch.Tensor],
    value: float,
    *,
    left: bool = False,
    multiple_of: int | None = None,
    dtype: torch.dtype = torch.long,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Pad sequences of different lengths to a tensor.

    Args:
        multiple_of: round T up to a multiple of this number.

    Returns:
        (B, T), T is the longest length (at least 1), rounded up.
    """
    # T ≥ 1, so that reductions over it are defined.
    width = max([len(sequence) for sequence in sequences] + [1])
    if multiple_of:
        width = -(-width // multiple_of) * multiple_of
    code, of_code = ("f", torch.float32) if dtype.is_floating_point else ("q", torch.int64)
    # (B, T), built on the host: one transfer instead of B.
    padded = torch.full((len(sequences), width), value, dtype=dtype)
    for row, sequence in zip(padded, sequences, strict=True):
        if len(sequence):
            # Prompts: left, so that completions begin in one column.
            span = slice(width - len(sequence), None) if left else slice(len(sequence))
            is_tensor = isinstance(sequence, torch.Tensor)
            # By way of an array: torch reads a list at a tenth of its speed.
            row[span] = sequence if is_tensor else torch.frombuffer(array(code, sequence), dtype=of_code)
    return padded.to(device) if device is not None else padded


def length_mask(lengths: Sequence[int], width: int, *, left: bool = False, device=None) -> torch.Tensor:
    """Build the mask of padded rows: 1 on real tokens. Returns (B, width) long."""
    position = torch.arange(width, device=device)  # (width,)
    lengths_B1 = torch.as_tensor(list(lengths), device=device).unsqueeze(1)
    real = position >= width - lengths_B1 if left else position < lengths_B1  # (B, width)
    return real.long()
