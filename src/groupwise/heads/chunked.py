"""Log-probs and entropy without the logits: the N x V matrix is visited tile by tile and never held.

Forward folds every tile into running softmax statistics; backward computes each tile again and, with the
saved statistics, turns it in place into the gradient of the logits. A tile is small enough for a
processor's cache, so the elementwise passes cost little beside the products.

Axes: N rows (one predicted token each), V vocabulary, H hidden size, R rows of a tile, C columns of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from groupwise.heads.dense import projection_dtype, statistics_dtype
from groupwise.heads.weights import HeadWeights

_CPU_TILE = (1024, 4096)  # 16 MB of float32: stays in a last-level cache
_ACCELERATOR_TILE = (4096, 16384)  # 256 MB of float32: large products, few kernel launches
_LOW_PRECISION = (torch.float16, torch.bfloat16)
_HAS_ONEDNN = torch.backends.mkldnn.is_available()


@dataclass(frozen=True)
class _Plan:
    """What both passes must agree on."""

    scale: float
    softcap: float | None
    temperature: float
    dtype: torch.dtype  # of the projection's operands
    rows: int
    columns: int

    @property
    def gain(self) -> float:
        """Slope of the scaled logits in the raw projection, where no softcap bends it."""
        return self.scale / self.temperature

    @property
    def bound(self) -> float:
        """Softcap after the temperature: x = bound * tanh(gain * raw / bound)."""
        assert self.softcap is not None
        return self.softcap / self.temperature


def chunked_head(
    hidden_NH: torch.Tensor,
    head: HeadWeights,
    targets_N: torch.Tensor,
    temperature: float = 1.0,
    with_entropy: bool = True,
    *,
    chunk_rows: int | None = None,
    chunk_columns: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropy from hidden states, with at most one tile of logits in memory.

    Both outputs are differentiable once, in the hidden states, the weight and the bias; a frozen one costs
    nothing. Beside its inputs and their gradients the function keeps three floats per row between the passes.

    Args:
        hidden_NH: final hidden states, one row per predicted token.
        head: projection and logit transform.
        targets_N: token ids in [0, V).
        temperature: positive divisor of the logits, applied after the model's own scale and softcap.
        with_entropy: also return the entropy.
        chunk_rows: rows of a tile; None picks a size for the device.
        chunk_columns: columns (vocabulary entries) of a tile; None picks a size for the device.

    Returns:
        Log-probs and entropy (or None), shape (N,), float32 (float64 for float64 hidden states), in nats.
    """
    tile_rows, tile_columns = _CPU_TILE if hidden_NH.device.type == "cpu" else _ACCELERATOR_TILE
    rows = chunk_rows or max(1, min(hidden_NH.shape[0], tile_rows))
    # With few rows, a wider tile keeps the products large.
    columns = chunk_columns or tile_rows * tile_columns // max(rows, tile_rows // 8)
    plan = _Plan(
        scale=head.scale,
        softcap=head.softcap,
        temperature=temperature,
        dtype=projection_dtype(hidden_NH, head.fp32),
        rows=rows,
        columns=min(columns, head.weight_VH.shape[0]),
    )
    return _ChunkedHead.apply(hidden_NH, head.weight_VH, head.bias_V, targets_N, plan, with_entropy)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH, weight_VH, bias_V, targets_N, plan: _Plan, with_entropy: bool):
        with torch.autocast(hidden_NH.device.type, enabled=False):
            logps_N, entropy_N, max_N, sum_N = _fold(
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
            gradients = _unfold(saved, grad_logps_N, grad_entropy_N, ctx.plan, ctx.needs_input_grad)
        return *gradients, None, None, None


def _fold(hidden_NH, weight_VH, bias_V, targets_N, plan: _Plan, with_entropy: bool):
    """Log-prob, entropy and the statistics m and s of every row, in one pass over the tiles (online softmax).

    Relative to the running maximum m of a row: s = Σ e^(x-m) and t = Σ e^(x-m) (x-m) <= 0. The entropy
    log s - t / s then adds two non-negative terms, and no logit meets a sum of its own size.
    """
    total = hidden_NH.shape[0]
    options = {"dtype": statistics_dtype(plan.dtype), "device": hidden_NH.device}
    max_N = torch.full((total,), torch.finfo(options["dtype"]).min, **options)
    sum_N, weighted_N, target_logit_N = (torch.zeros(total, **options) for _ in range(3))
    tiles = _Tiles(plan, options, 2 if with_entropy else 1)
    for columns in _spans(weight_VH.shape[0], plan.columns):
        weight_CH, bias_C = _operands(weight_VH, bias_V, columns, plan)
        for rows in _spans(total, plan.rows):
            x_RC, *scratch = tiles.views(rows, columns)
            _project(x_RC, hidden_NH[rows].to(plan.dtype), weight_CH, bias_C, plan)
            local_R1, inside_R1 = _local_targets(targets_N[rows], columns)
            target_logit_N[rows] += (x_RC.gather(1, local_R1) * inside_R1).squeeze(1)

            old_max_R = max_N[rows]
            new_max_R = torch.maximum(old_max_R, x_RC.amax(1))
            x_RC.sub_(new_max_R.unsqueeze(1))
            drop_R = old_max_R - new_max_R
            shrink_R = drop_R.exp()
            if with_entropy:
                p_RC = torch.exp(x_RC, out=scratch[0])
                tile_sum_R = p_RC.sum(1)
                tile_weighted_R = p_RC.mul_(x_RC).sum(1)
                weighted_N[rows] = (weighted_N[rows] + sum_N[rows] * drop_R) * shrink_R + tile_weighted_R
            else:
                tile_sum_R = x_RC.exp_().sum(1)
            sum_N[rows] = sum_N[rows] * shrink_R + tile_sum_R
            max_N[rows] = new_max_R
    log_sum_N = sum_N.log()
    entropy_N = log_sum_N - weighted_N / sum_N if with_entropy else None
    return target_logit_N - max_N - log_sum_N, entropy_N, max_N, sum_N


def _unfold(saved, grad_logps_N, grad_entropy_N, plan: _Plan, needed):
    """Gradients of hidden states, weight and bias, with the tiles computed again.

    ∂logp/∂x_j = [j = target] - p_j  and  ∂H/∂x_j = -p_j (log p_j + H), where z = x - m, p = e^z / s and
    log p = z - log s. With g and e the gradients of logp and H,
    ∂L/∂x_j = g [j = target] - e^(z_j) (a + b z_j), with a = (g + e (H - log s)) / s and b = e / s per row.
    """
    hidden_NH, weight_VH, bias_V, targets_N, entropy_N, max_N, sum_N = saved
    needs_hidden, needs_weight, needs_bias = needed[:3]
    options = {"dtype": statistics_dtype(plan.dtype), "device": hidden_NH.device}
    # The slope of the logits in the projection is common to all columns, so it is paid once per row.
    g_N = torch.zeros_like(sum_N) if grad_logps_N is None else grad_logps_N.to(sum_N.dtype) * plan.gain
    e_N = None if grad_entropy_N is None else grad_entropy_N.to(sum_N.dtype) * plan.gain
    a_N = g_N / sum_N if e_N is None else (g_N + e_N * (entropy_N - sum_N.log())) / sum_N
    b_N = None if e_N is None else e_N / sum_N
    grad_hidden_NH = torch.zeros(hidden_NH.shape, **options) if needs_hidden else None
    grad_weight_VH = torch.empty_like(weight_VH) if needs_weight else None
    grad_bias_V = torch.empty_like(bias_V) if needs_bias else None
    tiles = _Tiles(plan, options, 1 + (b_N is not None) + (plan.softcap is not None))
    for columns in _spans(weight_VH.shape[0], plan.columns):
        weight_CH, bias_C = _operands(weight_VH, bias_V, columns, plan)
        # Summed over the rows in the statistics' dtype and rounded to the weight's dtype once.
        sum_CH = torch.zeros(weight_CH.shape, **options) if needs_weight else None
        sum_C = torch.zeros(weight_CH.shape[0], **options) if needs_bias else None
        for rows in _spans(hidden_NH.shape[0], plan.rows):
            hidden_RH = hidden_NH[rows].to(plan.dtype)
            x_RC, *scratch = tiles.views(rows, columns)
            _project(x_RC, hidden_RH, weight_CH, bias_C, plan)
            slope_RC = _softcap_slope(x_RC, scratch.pop(), plan) if plan.softcap is not None else None
            x_RC.sub_(max_N[rows].unsqueeze(1))
            if b_N is None:
                grad_RC = x_RC.exp_().mul_(-a_N[rows].unsqueeze(1))
            else:
                exp_RC = torch.exp(x_RC, out=scratch[0])
                grad_RC = x_RC.mul_(-b_N[rows].unsqueeze(1)).sub_(a_N[rows].unsqueeze(1)).mul_(exp_RC)
            local_R1, inside_R1 = _local_targets(targets_N[rows], columns)
            grad_RC.scatter_add_(1, local_R1, g_N[rows].unsqueeze(1) * inside_R1)
            if slope_RC is not None:
                grad_RC.mul_(slope_RC)
            if grad_hidden_NH is not None:
                _accumulate(grad_hidden_NH[rows], grad_RC, weight_CH)
            if sum_CH is not None:
                _accumulate(sum_CH, grad_RC.t(), hidden_RH)
            if sum_C is not None:
                sum_C += grad_RC.sum(0)
        if grad_weight_VH is not None and sum_CH is not None:
            grad_weight_VH[columns] = sum_CH
        if grad_bias_V is not None and sum_C is not None:
            grad_bias_V[columns] = sum_C
    if grad_hidden_NH is not None:
        grad_hidden_NH = grad_hidden_NH.to(hidden_NH.dtype)
    return grad_hidden_NH, grad_weight_VH, grad_bias_V


class _Tiles:
    """Buffers of one tile each, allocated once: fresh memory for every tile costs a fault per page."""

    def __init__(self, plan: _Plan, options: dict[str, Any], count: int):
        self._buffers = [torch.empty(plan.rows * plan.columns, **options) for _ in range(count)]

    def views(self, rows: slice, columns: slice) -> list[torch.Tensor]:
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        return [buffer[: shape[0] * shape[1]].view(shape) for buffer in self._buffers]


def _spans(total: int, step: int) -> Iterator[slice]:
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def _operands(weight_VH, bias_V, columns: slice, plan: _Plan):
    bias_C = None if bias_V is None else bias_V[columns].to(plan.dtype)
    return weight_VH[columns].to(plan.dtype), bias_C


def _local_targets(targets_R: torch.Tensor, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each target inside the tile (clamped), and whether it lies there: (R, 1), without a sync."""
    local_R1 = targets_R.unsqueeze(1) - columns.start
    width = columns.stop - columns.start
    return local_R1.clamp(0, width - 1), (local_R1 >= 0) & (local_R1 < width)


def _project(x_RC, hidden_RH, weight_CH, bias_C, plan: _Plan) -> None:
    """Fill a tile with temperature-scaled logits: x = cap(scale * (h Wᵀ + b)) / temperature."""
    rounds = plan.dtype != x_RC.dtype
    if rounds and x_RC.is_cuda:
        torch.mm(hidden_RH, weight_CH.t(), out_dtype=x_RC.dtype, out=x_RC)  # no rounding of the logits
    elif rounds:
        x_RC.copy_(F.linear(hidden_RH, weight_CH, bias_C))
        bias_C = None
    else:
        x_RC.copy_(_product(hidden_RH, weight_CH))
    if bias_C is not None:
        x_RC.add_(bias_C)
    if plan.softcap is not None:
        x_RC.mul_(plan.gain / plan.bound).tanh_().mul_(plan.bound)
    elif plan.gain != 1.0:
        x_RC.mul_(plan.gain)


def _product(left, right) -> torch.Tensor:
    """`left @ right.T`.

    In float32 on a CPU through oneDNN, which uses the widest vector units of every vendor; the library behind
    `torch.mm` (MKL) does not on AMD processors, where it takes twice the time.
    """
    if _HAS_ONEDNN and left.device.type == "cpu" and left.dtype == torch.float32:
        return F.linear(left.to_mkldnn(), right.to_mkldnn()).to_dense()
    return left @ right.t()


def _softcap_slope(x_RC, out_RC, plan: _Plan) -> torch.Tensor:
    """d(bound tanh(y / bound))/dy = 1 - tanh² = (1 - x / bound)(1 + x / bound), into `out_RC`."""
    torch.mul(x_RC, 1 / plan.bound, out=out_RC)
    return out_RC.square_().neg_().add_(1.0)


def _accumulate(sum_, left, right) -> None:
    """`sum_ += left @ right`, every partial product summed in `sum_`'s dtype.

    Rounding the product of each tile to a half precision before the sum would add an error for every tile,
    which no single full product has.
    """
    if right.dtype in _LOW_PRECISION and sum_.is_cuda:
        torch.addmm(sum_, left.to(right.dtype), right, out_dtype=sum_.dtype, out=sum_)
    else:
        sum_ += _product(left, right.to(sum_.dtype).t())
