"""Elementwise operations on one tile of logits in torch, for any device and dtype; reference for `kernels`.

Axes: N rows (one predicted token each), R rows of a tile, C columns (vocabulary entries) of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from groupwise.records.sampling_mask import EXCLUDED_LOGIT


@dataclass(frozen=True)
class LogitTransform:
    """Transform of raw projections to logits over temperature: x = cap(scale * raw) / temperature."""

    scale: float
    softcap: float | None
    temperature: float

    @property
    def gain(self) -> float:
        """Slope of x with respect to the raw projection, without the softcap."""
        return self.scale / self.temperature

    @property
    def bound(self) -> float | None:
        """Softcap after the temperature: x = bound * tanh(gain * raw / bound)."""
        return None if self.softcap is None else self.softcap / self.temperature


@dataclass(frozen=True)
class RowStatistics:
    """Running softmax statistics of every row, updated in place.

    Relative to the running maximum m: s = Σ e^(x-m) and t = Σ e^(x-m) (x-m) <= 0; t is None without entropy.
    """

    max_N: torch.Tensor
    sum_N: torch.Tensor
    weighted_N: torch.Tensor | None
    target_logit_N: torch.Tensor

    @staticmethod
    def empty(total: int, with_entropy: bool, dtype: torch.dtype, device: torch.device) -> RowStatistics:
        """Return the statistics of `total` rows before the first tile."""
        lowest = torch.full((total,), torch.finfo(dtype).min, dtype=dtype, device=device)
        # Separate tensors, because some are saved for the backward pass and the others freed.
        sum_N, weighted_N, target_logit_N = (torch.zeros_like(lowest) for _ in range(3))
        return RowStatistics(lowest, sum_N, weighted_N if with_entropy else None, target_logit_N)

    def part(self, rows: slice) -> RowStatistics:
        """Return views of the given rows."""
        weighted_R = None if self.weighted_N is None else self.weighted_N[rows]
        return RowStatistics(self.max_N[rows], self.sum_N[rows], weighted_R, self.target_logit_N[rows])


@dataclass(frozen=True)
class RowSlopes:
    """Coefficients of the gradient of each row; b is None if the entropy has no gradient.

    ∂L/∂y_j = g [j = target] - e^(x_j - m) (a + b (x_j - m)) for the raw projection y_j, without a softcap.
    """

    max_N: torch.Tensor
    a_N: torch.Tensor
    b_N: torch.Tensor | None
    g_N: torch.Tensor

    def part(self, rows: slice) -> RowSlopes:
        """Return views of the given rows."""
        b_R = None if self.b_N is None else self.b_N[rows]
        return RowSlopes(self.max_N[rows], self.a_N[rows], b_R, self.g_N[rows])


class Tiles:
    """Elementwise operations on tiles, with buffers reused for all tiles to avoid page faults.

    Args:
        elements: number of entries of the largest tile.
        dtype: dtype of statistics, raw projections and logits.
        operand_dtype: operand dtype of the matrix products with gradients of the logits.
    """

    def __init__(
        self,
        transform: LogitTransform,
        elements: int,
        dtype: torch.dtype,
        operand_dtype: torch.dtype,
        device: torch.device,
    ):
        self.transform = transform
        self.operand_dtype = operand_dtype
        self._elements, self._dtype, self._device = elements, dtype, device
        self._buffers: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialized buffer; calls with the same name return the same memory."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self._elements, dtype=dtype or self._dtype, device=self._device)
        return self._buffers[name][: shape[0] * shape[1]].view(shape)

    def update_statistics(
        self,
        raw_RC: torch.Tensor,
        bias_C: torch.Tensor | None,
        local_targets_R: torch.Tensor,
        statistics: RowStatistics,
        kept_RC: torch.Tensor | None = None,
    ) -> None:
        """Update the statistics of the rows with one more tile; overwrites the tile.

        Args:
            raw_RC: projections without transform.
            bias_C: bias to be added to them, or None.
            local_targets_R: column of each row's target, int64; outside [0, C) for targets in other tiles.
            statistics: statistics of these rows, updated in place.
            kept_RC: True for tokens of the truncated distribution; None: all tokens.
        """
        x_RC = self._logits(raw_RC, bias_C)
        local_R1, inside_R1 = _within(local_targets_R, x_RC.shape[1])
        statistics.target_logit_N.add_((x_RC.gather(1, local_R1) * inside_R1).squeeze(1))
        if kept_RC is not None:
            x_RC.masked_fill_(~kept_RC, EXCLUDED_LOGIT)

        old_max_R = statistics.max_N.clone()
        new_max_R = torch.maximum(old_max_R, x_RC.amax(1), out=statistics.max_N)
        x_RC.sub_(new_max_R.unsqueeze(1))
        drop_R = old_max_R - new_max_R
        shrink_R = drop_R.exp()
        sum_R, weighted_R = statistics.sum_N, statistics.weighted_N
        if weighted_R is not None:
            p_RC = torch.exp(x_RC, out=self.buffer("exp", raw_RC.shape))
            tile_sum_R = p_RC.sum(1)
            tile_weighted_R = p_RC.mul_(x_RC).sum(1)
            weighted_R.add_(sum_R * drop_R).mul_(shrink_R).add_(tile_weighted_R)
        else:
            tile_sum_R = x_RC.exp_().sum(1)
        sum_R.mul_(shrink_R).add_(tile_sum_R)

    def gradient(
        self,
        raw_RC: torch.Tensor,
        bias_C: torch.Tensor | None,
        local_targets_R: torch.Tensor,
        slopes: RowSlopes,
        kept_RC: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the gradient (R, C) of the raw projections, valid until the next tile; overwrites the tile.

        Args:
            raw_RC, bias_C, local_targets_R, kept_RC: as in :meth:`update_statistics`.
        """
        x_RC = self._logits(raw_RC, bias_C)
        slope_RC = None
        bound = self.transform.bound
        if bound is not None:  # d(bound tanh(y / bound))/dy = 1 - tanh² = 1 - (x / bound)²
            slope_RC = torch.mul(x_RC, 1 / bound, out=self.buffer("slope", raw_RC.shape))
            slope_RC.square_().neg_().add_(1.0)
        if kept_RC is not None:
            x_RC.masked_fill_(~kept_RC, EXCLUDED_LOGIT)
        x_RC.sub_(slopes.max_N.unsqueeze(1))
        if slopes.b_N is None:
            grad_RC = x_RC.exp_().mul_(-slopes.a_N.unsqueeze(1))
        else:
            exp_RC = torch.exp(x_RC, out=self.buffer("exp", raw_RC.shape))
            grad_RC = x_RC.mul_(-slopes.b_N.unsqueeze(1)).sub_(slopes.a_N.unsqueeze(1)).mul_(exp_RC)
        local_R1, inside_R1 = _within(local_targets_R, x_RC.shape[1])
        grad_RC.scatter_add_(1, local_R1, slopes.g_N.unsqueeze(1) * inside_R1)
        return grad_RC if slope_RC is None else grad_RC.mul_(slope_RC)

    def _logits(self, raw_RC: torch.Tensor, bias_C: torch.Tensor | None) -> torch.Tensor:
        if bias_C is not None:
            raw_RC.add_(bias_C)
        gain, bound = self.transform.gain, self.transform.bound
        if bound is not None:
            return raw_RC.mul_(gain / bound).tanh_().mul_(bound)
        return raw_RC if gain == 1.0 else raw_RC.mul_(gain)


def _within(local_targets_R: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Clamp columns into the tile. Returns them and the mask of unclamped ones, (R, 1), without a sync."""
    local_R1 = local_targets_R.unsqueeze(1)
    return local_R1.clamp(0, width - 1), (local_R1 >= 0) & (local_R1 < width)
