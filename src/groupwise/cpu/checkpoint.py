"""Selective activation checkpointing that needs no memory of its own: outputs of linear layers are kept.

A checkpoint keeps its inputs and computes everything else twice. The memory of a step is largest at the end
of the backward pass, when every gradient exists. Until the gradient of a weight is allocated, its memory is
free and holds the output of the layer, which is then not computed a second time.

PyTorch's ``create_selective_checkpoint_contexts`` calls Python at every operation of both passes, and decides
by operation alone. Here only linear layers ask, with their weight at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from groupwise.compat.torch import in_place_changes

_current: _MatmulOutputs | None = None


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Make the contexts of one checkpoint's two passes, a ``context_fn`` of ``torch.utils.checkpoint``."""
    products = _MatmulOutputs()
    return _Pass(products, recomputes=False), _Pass(products, recomputes=True)


def fill_with_matmul(
    output: torch.Tensor, weight_OI: torch.Tensor, product: Callable[[], torch.Tensor]
) -> None:
    """Make ``product()`` the data of ``output``, or its equal saved in a checkpoint's forward pass."""
    kept = _current.take() if _current else None
    output.data = product() if kept is None else kept
    if _current:
        _current.offer(output, weight_OI)


class _MatmulOutputs:
    """Matmul outputs of one checkpoint in the order of its forward; its recomputation takes each once."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.Tensor, int] | None] = []  # with its in-place changes; None: not kept
        self._position: int | None = None  # in the recomputation

    def start_recomputation(self) -> None:
        self._position = 0

    def end_forward(self) -> None:
        self._kept = self._kept[:-1]  # the recomputation stops before the last product

    def take(self) -> torch.Tensor | None:
        """Return the next product of a recomputation; None if it was not kept, or changed in place since."""
        if self._position is None or self._position >= len(self._kept):
            return None
        index, self._position = self._position, self._position + 1
        entry, self._kept[index] = self._kept[index], None
        if entry is None:
            return None
        output, changes = entry
        return output if in_place_changes(output) == changes else None

    def offer(self, output: torch.Tensor, weight_OI: torch.Tensor) -> None:
        """Keep a product of the forward pass that fits into the unallocated gradient of its weight."""
        if self._position is not None:
            return
        fits = weight_OI.requires_grad and weight_OI.grad is None and output.nbytes <= weight_OI.nbytes
        self._kept.append((output.detach(), in_place_changes(output)) if fits else None)


class _Pass(AbstractContextManager[None]):
    """Forward pass or recomputation of a checkpoint; a graph that is retained is recomputed several times."""

    def __init__(self, products: _MatmulOutputs, *, recomputes: bool) -> None:
        self.products, self.recomputes = products, recomputes

    def __enter__(self) -> None:
        global _current
        self.outer, _current = _current, self.products
        if self.recomputes:
            self.products.start_recomputation()

    def __exit__(self, *_: object) -> None:
        global _current
        _current = self.outer
        if not self.recomputes:
            self.products.end_forward()
