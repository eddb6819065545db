"""Private attributes of DeepSpeed, seen in 0.19."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Return True if ZeRO-3 partitions ``parameter`` over processes."""
    return hasattr(parameter, "ds_id")
