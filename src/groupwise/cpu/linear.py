"""Linear layers on a CPU, computed with oneDNN in float32 and bfloat16.

PyTorch multiplies float32 matrices with MKL, which uses half of the vector units of non-Intel processors.
oneDNN uses all of them, and its kernels are in every PyTorch build for x86. PyTorch multiplies bfloat16
matrices with oneDNN too; here their weights are packed while decoding, and a checkpoint does not repeat its
last product. The rounding error is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from groupwise.compat.torch import has_native_bf16_cpu, has_onednn_linear, onednn_linear, onednn_pack

_MIN_FEATURES = 128  # below that, on either side, the call costs more than the product
_ROWS = 8  # rows the packed layout is chosen for; layouts for 8 and for 512 rows are equally fast on both
_USES = 4  # products before a weight is packed; packing costs what 20 to 30 products save


class _Prepacking:
    """A constant weight in the dtype of the products, copied to oneDNN's packed layout at its fourth use."""

    def __init__(self, weight_OI: torch.Tensor) -> None:
        self.source_OI, self.weight_OI, self.uses = weight_OI, weight_OI, 0

    def weight_at_next_use(self, dtype: torch.dtype) -> torch.Tensor:
        if self.weight_OI.dtype != dtype:
            self.weight_OI, self.uses = self.source_OI.to(dtype), 0
        self.uses += 1
        if self.uses == _USES:
            self.weight_OI = onednn_pack(self.weight_OI, _ROWS)
        return self.weight_OI


class OneDNNLinear(torch.nn.Linear):
    """``nn.Linear`` computed with oneDNN; parameters and state dict are those of ``nn.Linear``."""

    packing: _Prepacking | None = None  # set inside prepacked_weights

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        dtype = _operand_dtype(input, self.weight)
        if dtype is None or input.dim() < 2 or not input.numel():
            return F.linear(input, self.weight.to(input.dtype), self.bias)  # policy/frozen_weights.py
        if torch.is_grad_enabled():
            return _linear_with_gradient(input, self.weight, self.bias, dtype)
        weight = self.packing.weight_at_next_use(dtype) if self.packing else self.weight.to(dtype)
        return onednn_linear(input.to(dtype), weight, None if self.bias is None else self.bias.to(dtype))


def _operand_dtype(input: torch.Tensor, weight: torch.Tensor) -> torch.dtype | None:
    """Return the dtype that autocast or the operands choose for the product; None: not one for oneDNN."""
    dtypes = {input.dtype, weight.dtype}
    if torch.is_autocast_enabled("cpu") and torch.float64 not in dtypes:
        dtypes = {torch.get_autocast_dtype("cpu")}
    if dtypes == {torch.float32} or (dtypes == {torch.bfloat16} and has_native_bf16_cpu()):
        return dtypes.pop()
    return None


def replace_linears(model: torch.nn.Module) -> None:
    """Convert the large ``nn.Linear`` modules of ``model`` to :class:`OneDNNLinear` in place.

    Subclasses of ``nn.Linear``, such as quantized layers, and modules on other devices are left alone. Does
    nothing if this PyTorch has no oneDNN.
    """
    linears = [m for m in model.modules() if type(m) is torch.nn.Linear and m.weight.device.type == "cpu"]
    for layer in linears if has_onednn_linear() else ():
        if min(layer.weight.shape, default=0) >= _MIN_FEATURES:
            layer.__class__ = OneDNNLinear


@contextmanager
def prepacked_weights(model: torch.nn.Module) -> Iterator[None]:
    """Context manager for many forward passes without gradients and with constant weights.

    Each :class:`OneDNNLinear` that is used more than a few times copies its weight to oneDNN's packed layout.
    """
    layers = [module for module in model.modules() if isinstance(module, OneDNNLinear)]
    for layer in layers:
        layer.packing = _Prepacking(layer.weight.detach())
    try:
        yield
    finally:
        for layer in layers:
            layer.packing = None


@contextmanager
def stock_linears(model: torch.nn.Module) -> Iterator[None]:
    """Context manager in which linear layers are PyTorch's own: products are rounded as without groupwise."""
    layers = [module for module in model.modules() if isinstance(module, OneDNNLinear)]
    for layer in layers:
        layer.__class__ = torch.nn.Linear  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = OneDNNLinear


def _linear_with_gradient(
    input: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    with torch.no_grad():  # _Linear has the gradients of these casts
        operand, operand_OI = input.to(dtype), weight_OI.to(dtype)
    # The operands are saved before the product is computed: a checkpoint's recomputation stops once all
    # tensors are saved, so it skips the last product.
    output = _Linear.apply(input, weight_OI, bias_O, operand, operand_OI)
    with torch.no_grad():
        bias = None if bias_O is None else bias_O.to(dtype)
        output.data = onednn_linear(operand, operand_OI, bias)
    return output


class _Linear(torch.autograd.Function):
    """Backward pass of the product of the operands; the forward allocates the output and the caller fills it.

    Gradients have the dtype of the operands; autograd casts them to those of input, weight and bias.
    """

    @staticmethod
    def forward(ctx, input, weight_OI, bias_O, operand_NI, operand_OI):
        ctx.save_for_backward(operand_NI, operand_OI)
        return operand_NI.new_empty(*operand_NI.shape[:-1], len(operand_OI))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NO):
        operand_NI, operand_OI = ctx.saved_tensors
        flat_NO = grad_NO.flatten(0, -2)
        grad_input = onednn_linear(grad_NO, operand_OI.t()) if ctx.needs_input_grad[0] else None
        grad_weight = (
            onednn_linear(flat_NO.t(), operand_NI.flatten(0, -2).t()) if ctx.needs_input_grad[1] else None
        )
        return grad_input, grad_weight, flat_NO.sum(0) if ctx.needs_input_grad[2] else None, None, None
