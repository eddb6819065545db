"""The heap of a process that trains on a CPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_THRESHOLD = 4 << 20  # bytes; smaller than the activations of a layer
_LARGEST = 32 << 20  # bytes; the largest threshold there is
_KEPT = 64 << 20  # bytes at the heap's end that stay, or every tensor there would be faulted in anew


def return_large_blocks() -> bool:
    """Let freed tensors of 4 MB and more go back to the system at once; whether that was possible.

    glibc raises this size up to 32 MB with every larger block that is freed, and from then on keeps the
    activations of a layer in a heap that fragments: in training, a fifth of the process's memory. It takes
    glibc; the environment's MALLOC_MMAP_THRESHOLD_ has precedence.
    """
    return _set({_M_MMAP_THRESHOLD: _THRESHOLD, _M_TRIM_THRESHOLD: _KEPT, _M_TOP_PAD: _THRESHOLD})


@contextmanager
def large_blocks_kept() -> Iterator[None]:
    """A context for work that frees and makes the same tensors again and again: they stay until its end.

    Fresh memory costs a fault for every page.
    """
    changed = _set({_M_MMAP_THRESHOLD: _LARGEST, _M_TRIM_THRESHOLD: 8 * _LARGEST})
    try:
        yield
    finally:
        if changed:
            return_large_blocks()
            malloc_trim()


def _set(settings: dict[int, int]) -> bool:
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return all(mallopt(name, value) == 1 for name, value in settings.items())


def malloc_trim() -> None:
    """Let what was freed go back to the system, where glibc can be told to."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return
