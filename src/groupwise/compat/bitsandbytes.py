"""Private attributes of bitsandbytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def is_quantized(parameter: torch.Tensor) -> bool:
    """Return True for 4-bit (``quant_state``) and 8-bit (``SCB``) parameters."""
    return hasattr(parameter, "quant_state") or hasattr(parameter, "SCB")


def cannot_dequantize(module: nn.Module, weight: torch.Tensor, *, sharded: bool) -> bool:
    """Return True for 8 bits, and for the 4-bit layers of a sharded model: shards have no quantization state.

    Args:
        module: the layer of the weight.
        sharded: ``weight`` is a shard or was gathered from shards.
    """
    return hasattr(weight, "SCB") or (sharded and hasattr(module, "quant_state"))


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """Return the data of a weight, of a 4-bit one the matrix that its layer computes with."""
    if not is_quantized(weight):
        return weight.data
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)  # type: ignore[attr-defined]


def as_saved(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a weight as in a checkpoint: for 4 bits, packed values and the quantization state."""
    if not is_quantized(weight):
        return {name: weight.detach()}
    state = weight.quant_state.as_dict(packed=True)  # type: ignore[attr-defined]
    return {name: weight.data, **{f"{name}.{key}": value for key, value in state.items()}}


def disable_cpu_packing(module: nn.Module) -> bool:
    """Keep a 4-bit layer from repacking its weights on a CPU with AVX512_BF16; return True if it has already.

    The first forward in evaluation repacks. No gradient flows through packed weights, and they cannot be
    dequantized.
    """
    if not hasattr(module, "support_avx512bf16_for_cpu"):
        return False
    module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    return bool(getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False))
