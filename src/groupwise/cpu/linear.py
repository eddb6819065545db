"""Float32 linear layers on a CPU, computed with oneDNN.

PyTorch multiplies float32 matrices with MKL, which uses half of the vector units of non-Intel processors.
oneDNN uses all of them, and its kernels are in every PyTorch build for x86. The rounding error is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from groupwise.compat.torch import has_onednn_linear, onednn_linear, onednn_pack

_MIN_FEATURES = 128  # below that, on either side, the call costs more than the product
_ROWS = 8  # rows the packed layout is chosen for; layouts for 8 and for 512 rows are equally fast on both
_USES = 4  # products before a weight is packed; packing costs what 20 to 30 products save


class _Packing:
    """A weight that is copied to oneDNN's packed layout at its fourth use."""

    def __init__(self, weight_OI: torch.Tensor) -> None:
        self.weight_OI, self.uses = weight_OI, 0

    def weight_at_next_use(self) -> torch.Tensor:
        self.uses += 1
        if self.uses == _USES:
            self.weight_OI = onednn_pack(self.weight_OI, _ROWS)
        return self.weight_OI


class OneDNNLinear(torch.nn.Linear):
    """``nn.Linear`` computed with oneDNN; parameters and state dict are those of ``nn.Linear``."""

    packing: _Packing | None = None  # set inside packed_weights

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        plain = input.dtype == self.weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        if not plain or input.dim() < 2 or not input.numel():
            return F.linear(input, self.weight, self.bias)
        if not torch.is_grad_enabled():
            weight = self.packing.weight_at_next_use() if self.packing else self.weight
            return onednn_linear(input, weight, self.bias)
        # The inputs are saved before the product is computed: a checkpoint's recomputation stops once all
        # tensors are saved, so it skips the last product.
        output = _Linear.apply(input, self.weight, self.bias)
        with torch.no_grad():
            output.data = onednn_linear(input, self.weight, self.bias)
        return output


def replace_linears(model: torch.nn.Module) -> int:
    """Convert the large ``nn.Linear`` modules of ``model`` to :class:`OneDNNLinear` in place.

    Subclasses of ``nn.Linear``, such as quantized layers, and modules on other devices are left alone.

    Returns:
        Number of converted layers; 0 if this PyTorch has no oneDNN.
    """
    layers = [module for module in model.modules() if _eligible(module)] if has_onednn_linear() else []
    for layer in layers:
        layer.__class__ = OneDNNLinear
    return len(layers)


@contextmanager
def packed_weights(model: torch.nn.Module) -> Iterator[None]:
    """Context manager for many forward passes without gradients and with constant weights.

    Each :class:`OneDNNLinear` that is used more than a few times copies its weight to oneDNN's packed layout.
    """
    layers = [module for module in model.modules() if isinstance(module, OneDNNLinear)]
    for layer in layers:
        layer.packing = _Packing(layer.weight.detach())
    try:
        yield
    finally:
        for layer in layers:
            layer.packing = None


def _eligible(module: torch.nn.Module) -> bool:
    return (
        type(module) is torch.nn.Linear
        and module.weight.device.type == "cpu"
        and min(module.weight.shape, default=0) >= _MIN_FEATURES
    )


class _Linear(torch.autograd.Function):
    """Backward pass of the product; the forward allocates the output and the caller fills it."""

    @staticmethod
    def forward(ctx, input_NI, weight_OI, bias_O):
        ctx.save_for_backward(input_NI, weight_OI)
        return input_NI.new_empty(*input_NI.shape[:-1], len(weight_OI))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NO):
        input_NI, weight_OI = ctx.saved_tensors
        flat_NO = grad_NO.flatten(0, -2)
        grad_input = onednn_linear(grad_NO, weight_OI.t()) if ctx.needs_input_grad[0] else None
        grad_weight = (
            onednn_linear(flat_NO.t(), input_NI.flatten(0, -2).t()) if ctx.needs_input_grad[1] else None
        )
        return grad_input, grad_weight, flat_NO.sum(0) if ctx.needs_input_grad[2] else None
