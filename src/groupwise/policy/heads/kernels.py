"""Elementwise operations on one tile of logits as Triton kernels, each of which reads the tile once.

Same interface as `tiles.Tiles`. Matrix products use the vendor's library. Row offsets are 64-bit, since a
tile may have more than 2³¹ entries.

Axes: R rows of a tile, C columns (vocabulary entries) of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from groupwise.policy.heads.tiles import RowSlopes, RowStatistics, Tiles
from groupwise.records.sampling_mask import EXCLUDED_LOGIT

_STATISTICS_BLOCK = 4096  # columns per iteration of a program, which loops over the whole row
_GRADIENT_BLOCK = 2048  # columns per program
_ELEMENTS_PER_WARP = 512
_EXCLUDED: tl.constexpr = tl.constexpr(EXCLUDED_LOGIT)


@triton.jit
def _tanh(y):
    """Compute tanh to a few ulp, also near zero, where 1 - e^(-2|y|) cancels."""
    square = y * y
    # Minimax polynomial of Cephes' tanhf for |y| < 0.625.
    series = -5.70498872745e-3
    series = series * square + 2.06390887954e-2
    series = series * square - 5.37397155531e-2
    series = series * square + 1.33314422036e-1
    series = series * square - 3.33332819422e-1
    near = series * square * y + y
    decay = tl.exp(-2.0 * tl.abs(y))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(y) < 0.625, near, tl.where(y < 0, -far, far))


@triton.jit
def _logits(raw_ptr, bias_ptr, offsets, inside, gain, bound):
    """Compute x of `tiles.LogitTransform`, undefined outside `inside`. Expects `gain` divided by `bound`."""
    x = tl.load(raw_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    x *= gain
    if bound is not None:
        x = bound * _tanh(x)
    return x


@triton.jit
def _statistics_kernel(
    raw_ptr,
    bias_ptr,
    targets_ptr,
    kept_ptr,
    max_ptr,
    sum_ptr,
    weighted_ptr,
    target_logit_ptr,
    columns,
    gain,
    bound,
    BLOCK: tl.constexpr,
):
    """Continue the online softmax of each row with one more tile. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    raw_ptr += row * columns
    top = tl.load(max_ptr + row)
    total = tl.load(sum_ptr + row)
    weighted = 0.0
    if weighted_ptr is not None:
        weighted = tl.load(weighted_ptr + row)
    target = tl.load(targets_ptr + row)
    is_here = (target >= 0) & (target < columns)
    target_logit = _logits(raw_ptr, bias_ptr, target, is_here, gain, bound)
    tl.store(target_logit_ptr + row, target_logit, mask=is_here)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        x = _logits(raw_ptr, bias_ptr, offsets, inside, gain, bound)
        if kept_ptr is not None:
            is_kept = tl.load(kept_ptr + row * columns + offsets, mask=inside, other=0) != 0
            x = tl.where(is_kept, x, _EXCLUDED)
        x = tl.where(inside, x, float("-inf"))
        new_top = tl.maximum(top, tl.max(x, 0))
        drop = top - new_top
        shrink = tl.exp(drop)
        z = x - new_top
        p = tl.exp(z)
        if weighted_ptr is not None:
            # Excludes 0 · -∞ = NaN outside.
            weighted = (weighted + total * drop) * shrink + tl.sum(tl.where(inside, p * z, 0.0), 0)
        total = total * shrink + tl.sum(p, 0)
        top = new_top
    tl.store(max_ptr + row, top)
    tl.store(sum_ptr + row, total)
    if weighted_ptr is not None:
        tl.store(weighted_ptr + row, weighted)


@triton.jit
def _gradient_kernel(
    raw_ptr,
    grad_ptr,
    bias_ptr,
    targets_ptr,
    kept_ptr,
    max_ptr,
    a_ptr,
    b_ptr,
    g_ptr,
    columns,
    gain,
    bound,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of the raw projections, one program per row and block; may be in place."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < columns
    x = _logits(raw_ptr + row * columns, bias_ptr, offsets, inside, gain, bound)
    z = x - tl.load(max_ptr + row)
    factor = tl.load(a_ptr + row)
    if b_ptr is not None:
        factor += tl.load(b_ptr + row) * z
    grad = -factor * tl.exp(z)
    grad += tl.where(offsets == tl.load(targets_ptr + row), tl.load(g_ptr + row), 0.0)
    if bound is not None:
        tanh = x / bound
        grad *= 1.0 - tanh * tanh
    if kept_ptr is not None:
        is_kept = tl.load(kept_ptr + row * columns + offsets, mask=inside, other=0) != 0
        grad = tl.where(is_kept, grad, 0.0)
    tl.store(grad_ptr + row * columns + offsets, grad.to(grad_ptr.dtype.element_ty), mask=inside)


class TritonTiles(Tiles):
    """`Tiles` with float32 statistics, on devices that Triton supports.

    Gradients are stored in `operand_dtype` directly, which avoids a separate cast.
    """

    def update_statistics(
        self,
        raw_RC: torch.Tensor,
        bias_C: torch.Tensor | None,
        local_targets_R: torch.Tensor,
        statistics: RowStatistics,
        kept_RC: torch.Tensor | None = None,
    ) -> None:
        rows, columns = raw_RC.shape
        block, warps = _block(columns, _STATISTICS_BLOCK)
        with torch.cuda.device_of(raw_RC):  # Triton launches on the current device
            _statistics_kernel[(rows,)](
                raw_RC,
                bias_C,
                local_targets_R,
                _bytes(kept_RC),
                statistics.max_N,
                statistics.sum_N,
                statistics.weighted_N,
                statistics.target_logit_N,
                columns,
                *self._transform_arguments(),
                BLOCK=block,
                num_warps=warps,
            )

    def gradient(
        self,
        raw_RC: torch.Tensor,
        bias_C: torch.Tensor | None,
        local_targets_R: torch.Tensor,
        slopes: RowSlopes,
        kept_RC: torch.Tensor | None = None,
    ) -> torch.Tensor:
        in_place = self.operand_dtype == raw_RC.dtype
        grad_RC = raw_RC if in_place else self.buffer("gradient", raw_RC.shape, self.operand_dtype)
        rows, columns = raw_RC.shape
        block, warps = _block(columns, _GRADIENT_BLOCK)
        with torch.cuda.device_of(raw_RC):
            _gradient_kernel[(rows, triton.cdiv(columns, block))](
                raw_RC,
                grad_RC,
                bias_C,
                local_targets_R,
                _bytes(kept_RC),
                slopes.max_N,
                slopes.a_N,
                slopes.b_N,
                slopes.g_N,
                columns,
                *self._transform_arguments(),
                BLOCK=block,
                num_warps=warps,
            )
        return grad_RC

    def _transform_arguments(self) -> tuple[float, float | None]:
        gain, bound = self.transform.gain, self.transform.bound
        return (gain, None) if bound is None else (gain / bound, bound)


def _bytes(mask_RC: torch.Tensor | None) -> torch.Tensor | None:
    """View a boolean mask as uint8, which every Triton version loads."""
    return None if mask_RC is None else mask_RC.view(torch.uint8)


def _block(columns: int, most: int) -> tuple[int, int]:
    """Return columns and warps of a program."""
    block = min(triton.next_power_of_2(columns), most)
    return block, max(1, block // _ELEMENTS_PER_WARP)
