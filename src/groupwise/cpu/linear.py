"""Linear layers of a model that trains in float32 on a CPU, through oneDNN.

PyTorch multiplies float32 matrices with MKL, which leaves half of the vector units of processors of other
makers idle; oneDNN does not, and its kernels are in every PyTorch build for x86. Both round as float32 does:
nothing is traded for the speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

_SMALLEST = 128  # features on either side below which the call costs more than the product
_ROWS = 8  # that oneDNN chooses a layout for; those for 8 and for 512 rows serve one another equally well
_USES = 4  # of a weight until it is packed, which takes the time that 20 to 30 products save


class _Packing:
    """A weight that will be copied into oneDNN's own layout, unless it is used only a few times."""

    def __init__(self, weight_OI: torch.Tensor) -> None:
        self.weight_OI, self.uses = weight_OI, 0

    def weight_at_next_use(self) -> torch.Tensor:
        self.uses += 1
        if self.uses == _USES:
            self.weight_OI = torch.ops.mkldnn._reorder_linear_weight(self.weight_OI, _ROWS)
        return self.weight_OI


class OneDNNLinear(torch.nn.Linear):
    """``nn.Linear`` with another way to the same product; parameters and state are the same."""

    packing: _Packing | None = None  # within packed_weights

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        plain = input.dtype == self.weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        if not plain or input.dim() < 2 or not input.numel():
            return F.linear(input, self.weight, self.bias)
        if not torch.is_grad_enabled():
            weight = self.packing.weight_at_next_use() if self.packing else self.weight
            return onednn_product(input, weight, self.bias)
        # Saved before it is computed: where a checkpoint only needs what a layer saves, its last product is
        # never reached.
        output = _Linear.apply(input, self.weight, self.bias)
        with torch.no_grad():
            output.data = onednn_product(input, self.weight, self.bias)
        return output


def speed_up_linears(model: torch.nn.Module) -> int:
    """Turn the large plain ``nn.Linear`` modules of ``model`` into :class:`OneDNNLinear`; how many there are.

    Subclasses, such as quantised layers, and modules that are not on a CPU stay as they are.
    """
    layers = [module for module in model.modules() if _eligible(module)] if has_onednn() else []
    for layer in layers:
        layer.__class__ = OneDNNLinear
    return len(layers)


@contextmanager
def packed_weights(model: torch.nn.Module) -> Iterator[None]:
    """A context for many forwards without gradients between which the weights do not change.

    Each :class:`OneDNNLinear` that is used more than a few times copies its weight into oneDNN's own layout.
    """
    layers = [module for module in model.modules() if isinstance(module, OneDNNLinear)]
    for layer in layers:
        layer.packing = _Packing(layer.weight.detach())
    try:
        yield
    finally:
        for layer in layers:
            layer.packing = None


def has_onednn() -> bool:
    """Whether this build of PyTorch has the operation that :func:`onednn_product` calls."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _eligible(module: torch.nn.Module) -> bool:
    return (
        type(module) is torch.nn.Linear
        and module.weight.device.type == "cpu"
        and min(module.weight.shape, default=0) >= _SMALLEST
    )


class _Linear(torch.autograd.Function):
    """The gradients of a product, and memory for it that the caller replaces with the product."""

    @staticmethod
    def forward(ctx: Any, input_NI, weight_OI, bias_O):
        ctx.save_for_backward(input_NI, weight_OI)
        return input_NI.new_empty(*input_NI.shape[:-1], len(weight_OI))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO):
        input_NI, weight_OI = ctx.saved_tensors
        flat_NO = grad_NO.flatten(0, -2)
        grad_input = onednn_product(grad_NO, weight_OI.t()) if ctx.needs_input_grad[0] else None
        grad_weight = (
            onednn_product(flat_NO.t(), input_NI.flatten(0, -2).t()) if ctx.needs_input_grad[1] else None
        )
        return grad_input, grad_weight, flat_NO.sum(0) if ctx.needs_input_grad[2] else None


def onednn_product(left: torch.Tensor, right: torch.Tensor, bias: Any = None) -> torch.Tensor:
    """``left @ right.T + bias`` in float32 on a CPU; ``left`` (..., I) not empty, ``right`` (O, I)."""
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
