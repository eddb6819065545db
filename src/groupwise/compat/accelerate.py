"""Undocumented symbols of accelerate, seen in 1.4 to 1.15."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from accelerate.utils import DistributedDataParallelKwargs
    from torch import nn


def is_out_of_memory(error: Exception) -> bool:
    """Return True if ``error`` is an out-of-memory error of any device."""
    from accelerate.utils.memory import should_reduce_batch_size

    return should_reduce_batch_size(error)


def without_buffer_broadcast(handler: DistributedDataParallelKwargs) -> DistributedDataParallelKwargs:
    """Return ``handler`` without a broadcast of buffers in a forward; torch 2.13 renamed it."""
    import inspect

    from torch.nn.parallel import DistributedDataParallel

    if "forward_sync_buffers" not in inspect.signature(DistributedDataParallel.__init__).parameters:
        return replace(handler, broadcast_buffers=False)

    @dataclass
    class WithForwardSync(type(handler)):  # type: ignore[misc]  # accelerate passes on what is not the default
        forward_sync_buffers: bool = True

    return WithForwardSync(**vars(handler), forward_sync_buffers=False)


def forward_attribute(module: nn.Module) -> str:
    """Return the name of the instance attribute that replaces the forward of ``module`` itself.

    Hooks of accelerate (offloading, a model spread over devices) replace ``forward`` by a wrapper that calls
    ``_old_forward``.
    """
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def forward_autocast(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of the autocast that ``Accelerator.prepare_model`` put around the module's forward."""
    import torch

    state = shared_states()[1] if "_original_forward" in vars(module) else {}
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(state.get("_mixed_precision", ""))


def shared_states() -> list[dict[str, Any]]:
    """Return the dictionaries that all instances of accelerate's state classes share in this process."""
    from accelerate import state

    return [kind._shared_state for kind in (state.PartialState, state.AcceleratorState, state.GradientState)]
