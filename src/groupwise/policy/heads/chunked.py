"""Log-probs and entropy without materialized logits: the N x V matrix is computed tile by tile.

The forward pass updates running softmax statistics with every tile (online softmax); the backward pass
recomputes each tile and derives the gradient of the logits from the saved statistics. CPU tiles fit into a
core's cache; on CUDA one kernel does the elementwise work on a tile (`kernels`), at little cost compared with
the matrix products.

Axes: N rows (one predicted token each), V vocabulary, H hidden size, R rows of a tile, C columns of a tile.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from groupwise.compat.torch import (
    addmm_into,
    has_native_bf16_cpu,
    has_onednn_linear,
    mm_into,
    onednn_linear,
)
from groupwise.policy.heads.dense import projection_dtype, statistics_dtype
from groupwise.policy.heads.tiles import LogitTransform, RowSlopes, RowStatistics, Tiles
from groupwise.policy.heads.weights import HeadWeights
from groupwise.records.sampling_mask import SamplingMask, SamplingMaskTiles

_CPU_TILE = (1024, 768)  # 3 MB of float32: fits a core's cache; malloc takes it from the heap
_ACCELERATOR_TILE = (4096, 16384)  # 256 MB of float32: large products, few kernel launches
_ALIGNMENT = 64  # columns
_LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Plan:
    """Tiling, precision and sampling mask, the same in the forward and the backward pass."""

    transform: LogitTransform
    dtype: torch.dtype  # of the projection's operands
    rows: int
    columns: int
    tiles: type[Tiles]
    kept: SamplingMaskTiles | None

    def kept_tile(self, rows: slice, columns: slice) -> torch.Tensor | None:
        """Return the mask (R, C) of a tile's kept entries; None: all are kept."""
        return None if self.kept is None else self.kept.tile(rows, columns)

    def make_tiles(self, device: torch.device) -> Tiles:
        """Allocate the tile operations of one pass; buffers are allocated at first use."""
        return self.tiles(
            self.transform, self.rows * self.columns, statistics_dtype(self.dtype), self.dtype, device
        )


def chunked_head(
    hidden_NH: torch.Tensor,
    head: HeadWeights,
    targets_N: torch.Tensor,
    temperature: float = 1.0,
    with_entropy: bool = True,
    *,
    kept: SamplingMask | None = None,
    chunk_rows: int | None = None,
    chunk_columns: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute log-probs and entropy from hidden states, with at most one tile of logits in memory.

    Both outputs are differentiable once with respect to hidden states, weight and bias; no gradient is
    computed for a frozen input. Between the passes the function saves three floats per row and its inputs.

    Args:
        hidden_NH: final hidden states, one row per predicted token.
        targets_N: token ids in [0, V).
        temperature: positive divisor of the logits, applied after the model's own scale and softcap.
        kept: tokens of the truncated distribution at each of the N positions; None: all tokens.
        chunk_rows: rows of a tile; None picks a size for the device.
        chunk_columns: columns (vocabulary entries) of a tile; None picks a size for the device.

    Returns:
        Log-probs and entropy (or None), (N,), float32 (float64 for float64 hidden states), in nats.
    """
    tile_rows, tile_columns = _CPU_TILE if hidden_NH.device.type == "cpu" else _ACCELERATOR_TILE
    rows = chunk_rows or max(1, min(hidden_NH.shape[0], tile_rows))
    # With few rows, a wider tile keeps the products large; a multiple of _ALIGNMENT, for aligned wide loads.
    widest = tile_rows * tile_columns // max(rows, tile_rows // 8)
    columns = chunk_columns or max(widest // _ALIGNMENT, 1) * _ALIGNMENT
    dtype = projection_dtype(hidden_NH, head.fp32)
    plan = _Plan(
        transform=LogitTransform(head.scale, head.softcap, temperature),
        dtype=dtype,
        rows=rows,
        columns=min(columns, head.weight_VH.shape[0]),
        tiles=_tile_operations(hidden_NH.device, dtype),
        kept=None if kept is None else SamplingMaskTiles.on(hidden_NH.device, kept),
    )
    return _ChunkedHead.apply(hidden_NH, head.weight_VH, head.bias_V, targets_N, plan, with_entropy)


def _tile_operations(device: torch.device, dtype: torch.dtype) -> type[Tiles]:
    """Return the Triton kernels on CUDA, or with TRITON_INTERPRET=1 on any device; otherwise torch."""
    can_run = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    if not can_run or dtype == torch.float64 or importlib.util.find_spec("triton") is None:
        return Tiles
    from groupwise.policy.heads.kernels import TritonTiles

    return TritonTiles


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH, weight_VH, bias_V, targets_N, plan: _Plan, with_entropy: bool):
        with torch.autocast(hidden_NH.device.type, enabled=False):
            logps_N, entropy_N, max_N, sum_N = _forward_tiles(
                hidden_NH, weight_VH, bias_V, targets_N, plan, with_entropy
            )
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, entropy_N, max_N, sum_N)
        return logps_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps_N, grad_entropy_N):
        if grad_logps_N is None and grad_entropy_N is None:
            return (None,) * 6
        saved = ctx.saved_tensors
        with torch.autocast(saved[0].device.type, enabled=False):
            gradients = _backward_tiles(saved, grad_logps_N, grad_entropy_N, ctx.plan, ctx.needs_input_grad)
        return *gradients, None, None, None


def _forward_tiles(hidden_NH, weight_VH, bias_V, targets_N, plan: _Plan, with_entropy: bool):
    """Compute log-prob, entropy and the statistics m and s of every row in one pass over the tiles.

    With s and t of `RowStatistics` the entropy is log s - t / s, a sum of two non-negative terms, which
    avoids cancellation between large logits.
    """
    total = hidden_NH.shape[0]
    statistics = RowStatistics.empty(total, with_entropy, statistics_dtype(plan.dtype), hidden_NH.device)
    tiles = plan.make_tiles(hidden_NH.device)
    for columns in _spans(weight_VH.shape[0], plan.columns):
        weight_CH, bias_C = _operands(weight_VH, bias_V, columns, plan)
        for rows in _spans(total, plan.rows):
            raw_RC, missing_bias_C = _project(tiles, hidden_NH[rows].to(plan.dtype), weight_CH, bias_C)
            local_targets_R = targets_N[rows] - columns.start
            kept_RC = plan.kept_tile(rows, columns)
            tiles.update_statistics(raw_RC, missing_bias_C, local_targets_R, statistics.part(rows), kept_RC)
    max_N, sum_N, weighted_N = statistics.max_N, statistics.sum_N, statistics.weighted_N
    log_sum_N = sum_N.log()
    entropy_N = None if weighted_N is None else log_sum_N - weighted_N / sum_N
    return statistics.target_logit_N - max_N - log_sum_N, entropy_N, max_N, sum_N


def _backward_tiles(saved, grad_logps_N, grad_entropy_N, plan: _Plan, needed):
    """Compute gradients of hidden states, weight and bias from recomputed tiles.

    ∂logp/∂x_j = [j = target] - p_j  and  ∂H/∂x_j = -p_j (log p_j + H), where z = x - m, p = e^z / s and
    log p = z - log s. With g and e the gradients of logp and H,
    ∂L/∂x_j = g [j = target] - e^(z_j) (a + b z_j), with a = (g + e (H - log s)) / s and b = e / s per row.
    """
    hidden_NH, weight_VH, bias_V, targets_N, entropy_N, max_N, sum_N = saved
    needs_hidden, needs_weight, needs_bias = needed[:3]
    options = {"dtype": statistics_dtype(plan.dtype), "device": hidden_NH.device}
    gain = plan.transform.gain
    # d logits / d projection is the same for all columns: applied once per row, not per entry of a tile.
    g_N = torch.zeros_like(sum_N) if grad_logps_N is None else grad_logps_N.to(sum_N.dtype) * gain
    e_N = None if grad_entropy_N is None else grad_entropy_N.to(sum_N.dtype) * gain
    a_N = g_N / sum_N if e_N is None else (g_N + e_N * (entropy_N - sum_N.log())) / sum_N
    slopes = RowSlopes(max_N, a_N, None if e_N is None else e_N / sum_N, g_N)
    grad_hidden_NH = torch.zeros(hidden_NH.shape, **options) if needs_hidden else None
    grad_weight_VH = torch.empty_like(weight_VH) if needs_weight else None
    grad_bias_V = torch.empty_like(bias_V) if needs_bias else None
    tiles = plan.make_tiles(hidden_NH.device)
    for columns in _spans(weight_VH.shape[0], plan.columns):
        weight_CH, bias_C = _operands(weight_VH, bias_V, columns, plan)
        # Sums over rows use the statistics' dtype and are rounded to the weight's dtype once.
        sum_CH = None
        sum_C = torch.zeros(weight_CH.shape[0], **options) if needs_bias else None
        for rows in _spans(hidden_NH.shape[0], plan.rows):
            hidden_RH = hidden_NH[rows].to(plan.dtype)
            raw_RC, missing_bias_C = _project(tiles, hidden_RH, weight_CH, bias_C)
            local_targets_R = targets_N[rows] - columns.start
            kept_RC = plan.kept_tile(rows, columns)
            grad_RC = tiles.gradient(raw_RC, missing_bias_C, local_targets_R, slopes.part(rows), kept_RC)
            if grad_hidden_NH is not None:
                _accumulate(grad_hidden_NH[rows], grad_RC, weight_CH)
            if needs_weight:
                sum_CH = _accumulate(sum_CH, grad_RC.t(), hidden_RH, whole=len(hidden_RH) == len(hidden_NH))
            if sum_C is not None:
                sum_C += grad_RC.sum(0, dtype=sum_C.dtype)
        if grad_weight_VH is not None:
            grad_weight_VH[columns] = 0 if sum_CH is None else sum_CH
        if grad_bias_V is not None and sum_C is not None:
            grad_bias_V[columns] = sum_C
    if grad_hidden_NH is not None:
        grad_hidden_NH = grad_hidden_NH.to(hidden_NH.dtype)
    return grad_hidden_NH, grad_weight_VH, grad_bias_V


def _spans(total: int, step: int) -> Iterator[slice]:
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def _operands(weight_VH, bias_V, columns: slice, plan: _Plan):
    bias_C = None if bias_V is None else bias_V[columns].to(plan.dtype)
    return weight_VH[columns].to(plan.dtype), bias_C


def _project(tiles: Tiles, hidden_RH, weight_CH, bias_C) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute a tile of h Wᵀ, which may be overwritten. Also returns the bias, None if already added."""
    if not hidden_RH.is_cuda and weight_CH.dtype not in _LOW_PRECISION:
        return _product(hidden_RH, weight_CH), bias_C
    raw_RC = tiles.buffer("raw", (len(hidden_RH), len(weight_CH)))
    if not hidden_RH.is_cuda:
        return raw_RC.copy_(F.linear(hidden_RH, weight_CH, bias_C)), None
    if weight_CH.dtype in _LOW_PRECISION:
        mm_into(raw_RC, hidden_RH, weight_CH.t())  # no rounding of the logits
    else:
        torch.mm(hidden_RH, weight_CH.t(), out=raw_RC)
    return raw_RC, bias_C


def _product(left, right) -> torch.Tensor:
    """Compute `left @ right.T`."""
    if left.device.type == "cpu" and left.dtype == torch.float32 and left.numel() and has_onednn_linear():
        return onednn_linear(left, right)
    return left @ right.t()


def _accumulate(sum_: torch.Tensor | None, left, right, *, whole: bool = False) -> torch.Tensor:
    """Compute `sum_ += left @ right` in the dtype of `sum_`; None is zero in the statistics' dtype.

    Rounding each tile's product to half precision before the sum would add one error per tile, while a
    single full product is rounded once.

    Args:
        whole: this product is the whole sum, which may be rounded to the dtype of `right`.
    """
    dtype = statistics_dtype(right.dtype) if sum_ is None else sum_.dtype
    if not left.is_cuda:
        # A CPU's product of bfloat16 operands is twice as fast, but has no wider result.
        rounded = whole and right.dtype == torch.bfloat16 and left.device.type == "cpu"
        operand_dtype = right.dtype if rounded and has_native_bf16_cpu() else dtype
        product = _product(left.to(operand_dtype), right.to(operand_dtype).t())
        return product if sum_ is None else sum_.add_(product)
    if sum_ is None:
        sum_ = torch.zeros(left.shape[0], right.shape[1], dtype=dtype, device=left.device)
    if right.dtype in _LOW_PRECISION:
        return addmm_into(sum_, left.to(right.dtype), right)
    return sum_.addmm_(left, right)
