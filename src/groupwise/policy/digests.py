"""Digests of weights, by which trainer and engines compare all values without moving them.

The digest of a tensor with C columns (its last axis; the axes before it are rows) is

    D = Σ_i u_i Σ_j v_j b_ij   modulo 2^64

b_ij: the bits of element (i, j) as float32, read as a signed 32-bit integer; -0 counts as 0. u, v: fixed
pseudo-random odd numbers of 64 bits. Integers are summed, so D is the same on every device and in any order,
and the digests of parts of a tensor add up to D: of the rows of a fused matrix, of the shards of several
GPUs. Conversion to float32 is exact for narrower types: a bfloat16 tensor and a float32 tensor with the same
values have equal digests.

A change of one element always changes D: u_i v_j is odd, and the difference of two b is less than 2^32. For
other changes, let 2^k be the largest power of 2 that divides all differences, k < 32. For random u and v, the
sums of the rows with a difference are uniform among multiples of at least 2^k, and so is D in turn. The
probability that D stays the same is largest if only sign bits change (k = 31), and is then below 2^-26.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

_ROW, _COLUMN = 0x2545F4914F6CDD1D, 0x1B873593CC9E2D51  # seeds of u and v
_MIX_1, _MIX_2 = 0x3F58476D1CE4E5B9, 0x14D049BB133111EB

#: Elements that are multiplied at a time: within the cache of a CPU core, and enough to occupy a GPU.
_CHUNK = {"cpu": 2**17}
_CHUNK_ON_DEVICE = 2**24


def position_weights(index: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the odd pseudo-random int64 weight of each position in ``index``."""
    mixed = (index + seed) * _MIX_1
    mixed = (mixed ^ (mixed >> 31)) * _MIX_2
    return (mixed ^ (mixed >> 29)) | 1


@lru_cache(maxsize=64)  # a model has few shapes
def _weights(
    first: int, sizes: tuple[int, ...], steps: tuple[int, ...], device: torch.device, seed: int
) -> torch.Tensor:
    """Return the weights of the positions along axes of these sizes and steps, flat."""
    positions = torch.tensor(first, device=device)
    for size, step in zip(sizes, steps, strict=True):
        positions = positions.unsqueeze(-1) + torch.arange(size, device=device) * step
    return position_weights(positions.flatten(), seed)


def row_digests(matrix: torch.Tensor, first_column: int = 0) -> torch.Tensor:
    """Return Σ_j v_j b_ij of the rows of a matrix (R, C) as (R,) int64; v begins at ``first_column``."""
    num_rows, num_columns = matrix.shape
    weights_C = _weights(first_column, (num_columns,), (1,), matrix.device, _COLUMN)
    sums_R = torch.empty(num_rows, dtype=torch.int64, device=matrix.device)
    step = max(1, _CHUNK.get(matrix.device.type, _CHUNK_ON_DEVICE) // max(num_columns, 1))
    rows = min(step, num_rows)
    floats = torch.empty(rows, num_columns, dtype=torch.float32, device=matrix.device)
    products = torch.empty(rows, num_columns, dtype=torch.int64, device=matrix.device)
    for start in range(0, num_rows, step):
        part = matrix[start : start + step]
        product = products[: len(part)]
        if part.is_floating_point():
            part = torch.add(part, 0.0, out=floats[: len(part)]).view(torch.int32)  # -0 + 0 = 0
        torch.sum(product.copy_(part).mul_(weights_C), 1, out=sums_R[start : start + step])
    return sums_R


def digest_of_rows(
    sums_R: torch.Tensor, first: int, sizes: tuple[int, ...], steps: tuple[int, ...]
) -> torch.Tensor:
    """Return Σ_i u_i s_i, an int64 scalar, for row digests s.

    Args:
        first: index of the first row.
        sizes, steps: of the axes that the rows are made of, flattened; steps count rows.
    """
    return (sums_R * _weights(first, sizes, steps, sums_R.device, _ROW)).sum()


def part_digest(values: torch.Tensor, offset: int, strides: Sequence[int], num_columns: int) -> torch.Tensor:
    """Return what part of a tensor adds to its digest, as an int64 scalar.

    Args:
        values: elements of the part, with any axes and strides.
        offset: position of the first element in the tensor, flattened.
        strides: distance of positions per axis of ``values``.
        num_columns: C of the tensor.

    Raises:
        ValueError: the part is not made of whole ranges of rows and columns.
    """
    axes = sorted((axis for axis in range(values.dim()) if values.shape[axis] > 1), key=lambda a: -strides[a])
    steps = [strides[axis] for axis in axes]
    first_row, first_column = divmod(offset, num_columns)
    view = values.permute(*axes, *(a for a in range(values.dim()) if a not in axes)).reshape(
        [values.shape[axis] for axis in axes]
    )
    if not steps or steps[-1] != 1:
        view, steps = view.unsqueeze(-1), [*steps, 1]
    if view.shape[-1] > num_columns and first_column == 0 and view.shape[-1] % num_columns == 0:
        view, steps = view.unflatten(-1, (-1, num_columns)), [*steps[:-1], num_columns, 1]
    if first_column + view.shape[-1] > num_columns or any(step % num_columns for step in steps[:-1]):
        raise ValueError(f"no ranges of rows and columns: offset {offset}, strides {tuple(strides)}")
    sums_R = row_digests(view.reshape(-1, view.shape[-1]), first_column)
    row_steps = tuple(step // num_columns for step in steps[:-1])
    return digest_of_rows(sums_R, first_row, tuple(view.shape[:-1]), row_steps)


def tensor_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the digest of a whole tensor as an int64 scalar on its device."""
    strides = torch.empty(tensor.shape, device="meta").stride()
    return part_digest(tensor, 0, strides, columns_of(tensor.shape))


def columns_of(shape: Sequence[int]) -> int:
    """Return C of a tensor: the size of its last axis."""
    return max(shape[-1], 1) if len(shape) else 1
