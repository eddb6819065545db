"""A CUDA graph without CUDA: a recorded list of operators that is repeated on the same memory.

Like a graph it repeats no Python: numbers and shapes are those of the recording, tensors are where they were,
and an operator that reads a value from the device cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operators that return a value of the device, or a result whose shape depends on one.
_READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__.split(".")[0] in _READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        results = func(*args, **kwargs)
        self.calls.append(lambda: _repeat(func, args, kwargs, results))
        return results


def _repeat(func: Any, args: Any, kwargs: Any, results: Any) -> None:
    """Call an operator again and put its results where they were."""
    if func.is_view:  # of memory that stays
        return
    again = func(*args, **kwargs)
    for old, new in zip(_tensors(results), _tensors(again), strict=True):
        if old.data_ptr() != new.data_ptr():  # equal: written in place
            old.copy_(new)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Recording:
    """Stands for ``capture_cuda_graph``; counts.

    Attributes:
        recorded: number of operators of each recording.
        replayed: number of repetitions.
    """

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.replayed = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        with _Recorder() as recorder:
            step()
        self.recorded.append(len(recorder.calls))

        def replay() -> None:
            self.replayed += 1
            with torch.no_grad():
                for call in recorder.calls:
                    call()

        return replay
