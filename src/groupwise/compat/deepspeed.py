"""Private attributes of DeepSpeed, seen in 0.19."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Return True if ZeRO-3 partitions ``parameter`` over processes."""
    return hasattr(parameter, "ds_id")


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Context manager in which each rank has all parameters of a ZeRO-3 model; all ranks enter it.

    DeepSpeed's forward hooks are removed meanwhile: they gather each layer and free it again, which ranks
    can do only in the same order.
    """
    import deepspeed

    parameters = [parameter for parameter in model.parameters() if is_partitioned(parameter)]
    hooks = [
        hooks for module in model.modules() for hooks in (module._forward_pre_hooks, module._forward_hooks)
    ]
    before = [dict(each) for each in hooks]
    with deepspeed.zero.GatheredParameters(parameters):
        for each in hooks:
            for key, hook in list(each.items()):
                if str(getattr(hook, "__module__", "")).startswith("deepspeed."):
                    del each[key]
        try:
            yield
        finally:
            for each, saved in zip(hooks, before, strict=True):
                each.clear()
                each.update(saved)
