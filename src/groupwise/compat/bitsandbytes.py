"""Private attributes of bitsandbytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def is_quantized(parameter: torch.Tensor) -> bool:
    """Return True for 4-bit (``quant_state``) and 8-bit (``SCB``) parameters."""
    return hasattr(parameter, "quant_state") or hasattr(parameter, "SCB")


def dequantized(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a weight under its name, a 4-bit one as the matrix that its layer computes with."""
    if not is_quantized(weight):
        return {name: weight.detach()}
    from bitsandbytes.functional import dequantize_4bit

    return {name: dequantize_4bit(weight.data, weight.quant_state)}  # type: ignore[attr-defined]


def as_saved(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a weight as in a checkpoint: for 4 bits, packed values and the quantization state."""
    if not is_quantized(weight):
        return {name: weight.detach()}
    state = weight.quant_state.as_dict(packed=True)  # type: ignore[attr-defined]
    return {name: weight.data, **{f"{name}.{key}": value for key, value in state.items()}}


def disable_cpu_packing(module: nn.Module) -> None:
    """Keep a 4-bit layer from repacking its weights at the first forward on a CPU.

    Repacking is permanent, and no gradient flows through packed weights.
    """
    if hasattr(module, "support_avx512bf16_for_cpu"):
        module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
