"""Private attributes of bitsandbytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def is_quantized(parameter: torch.Tensor) -> bool:
    """Return True for 4-bit (``quant_state``) and 8-bit (``SCB``) parameters."""
    return hasattr(parameter, "quant_state") or hasattr(parameter, "SCB")


def disable_cpu_packing(module: nn.Module) -> None:
    """Keep a 4-bit layer from repacking its weights at the first forward on a CPU.

    Repacking is permanent, and no gradient flows through packed weights.
    """
    if hasattr(module, "support_avx512bf16_for_cpu"):
        module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
