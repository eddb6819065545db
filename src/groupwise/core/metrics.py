"""Metric values with their reduction, merged exactly across micro-batches, steps and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

Scalar = float | torch.Tensor


def _number(value: Scalar) -> float:
    return value.item() if isinstance(value, torch.Tensor) else float(value)


@dataclass(frozen=True)
class Mean:
    """Weighted mean, stored as numerator and denominator so that merging is exact."""

    total: Scalar  # tensors stay on the device until value(): no synchronisation per micro-batch
    count: Scalar = 1.0  # tokens, rows or calls

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        count = _number(self.count)
        # Without tokens: NaN, not 0.
        return _number(self.total) / count if count else math.nan


@dataclass(frozen=True)
class _OneNumber:
    number: Scalar

    def value(self) -> float:
        return _number(self.number)


class Sum(_OneNumber):
    """Sum over all parts."""

    def merge(self, other: Sum) -> Sum:
        return Sum(self.number + other.number)


class Max(_OneNumber):
    """Maximum over all parts."""

    def merge(self, other: Max) -> Max:
        return Max(_extreme(torch.maximum, max, self.number, other.number))


class Min(_OneNumber):
    """Minimum over all parts."""

    def merge(self, other: Min) -> Min:
        return Min(_extreme(torch.minimum, min, self.number, other.number))


Reduction = Mean | Sum | Max | Min
Metrics = dict[str, Reduction]


def _extreme(tensor_op, number_op, a: Scalar, b: Scalar) -> Scalar:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        device = (a if isinstance(a, torch.Tensor) else b).device  # type: ignore[union-attr]
        # No transfer to the host.
        return tensor_op(torch.as_tensor(a, device=device), torch.as_tensor(b, device=device))
    return number_op(a, b)


def merge_metrics(parts: Iterable[Mapping[str, Reduction]]) -> Metrics:
    """Merge dictionaries of reductions by name; parts that lack a name do not affect it.

    Raises:
        TypeError: one name has two kinds of reduction.
    """
    merged: Metrics = {}
    for part in parts:
        for name, reduction in part.items():
            known = merged.get(name)
            if known is None:
                merged[name] = reduction
            elif type(known) is not type(reduction):
                raise TypeError(
                    f"metric {name!r} is both {type(known).__name__} and {type(reduction).__name__}"
                )
            else:
                merged[name] = known.merge(reduction)  # type: ignore[arg-type]
    return merged


def detach_metrics(metrics: Mapping[str, Reduction]) -> dict[str, tuple[str, tuple[float, ...]]]:
    """Convert to plain Python numbers ``{name: (kind, numbers)}``, for checkpoints and other ranks.

    Tensors are read together, once per dtype and device: each read waits for the device.
    """
    values = [value for reduction in metrics.values() for value in vars(reduction).values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    read: dict[int, float] = {}  # by identity: tensors compare element by element
    for kind in {(tensor.dtype, tensor.device) for tensor in tensors}:
        alike = [tensor for tensor in tensors if (tensor.dtype, tensor.device) == kind]
        read.update(zip(map(id, alike), torch.stack([t.reshape(()) for t in alike]).tolist(), strict=True))
    return {
        name: (
            type(reduction).__name__,
            tuple(read[id(v)] if id(v) in read else float(v) for v in vars(reduction).values()),
        )
        for name, reduction in metrics.items()
    }


def attach_metrics(plain: Mapping[str, tuple[str, tuple[float, ...]]]) -> Metrics:
    """Invert :func:`detach_metrics`."""
    kinds = {kind.__name__: kind for kind in (Mean, Sum, Max, Min)}
    return {name: kinds[kind](*numbers) for name, (kind, numbers) in plain.items()}


def masked_mean(values_BX: torch.Tensor, mask_BT: torch.Tensor) -> Mean:
    """Mean over loss tokens, or over sequences if ``values_BX`` has one value per sequence; detached."""
    if values_BX.shape[1] == 1 and mask_BT.shape[1] != 1:
        return Mean(values_BX.detach().sum(), float(values_BX.shape[0]))  # every row counts once
    return Mean((values_BX.detach() * mask_BT).sum(), mask_BT.sum())  # every loss token counts once
