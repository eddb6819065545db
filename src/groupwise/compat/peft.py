"""Undocumented symbols of PEFT, seen in 0.18 to 0.21."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper


def wrapper_types() -> tuple[type[BaseTunerLayer], type[ModulesToSaveWrapper]]:
    """Return the base class of adapter layers and the wrapper of ``modules_to_save``."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    return BaseTunerLayer, ModulesToSaveWrapper


def merge_dequantized(tuner: Any) -> None:
    """Merge a LoRA layer of 4 bits into its base layer, whose weight was replaced by a full matrix.

    The layer's own ``merge`` would quantize the sum.
    """
    from peft.tuners.lora import Linear

    Linear.merge(tuner)
