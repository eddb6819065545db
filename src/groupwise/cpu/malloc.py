"""Settings of glibc's malloc for a process that trains on a CPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_THRESHOLD = 4 << 20  # bytes; smaller than the activations of a layer
_LARGEST = 32 << 20  # bytes; the largest threshold that glibc accepts
_KEPT = 64 << 20  # bytes kept at the end of the heap; without them every new tensor there is paged in again


def return_large_blocks() -> bool:
    """Return freed blocks of 4 MB and more to the system at once.

    By default glibc raises this threshold, up to 32 MB, each time a larger block is freed. The activations of
    a layer then stay in a heap that fragments: a fifth of the process's memory in training. The environment
    variable MALLOC_MMAP_THRESHOLD_ takes precedence.

    Returns:
        True if the setting was applied, which needs glibc.
    """
    return _set({_M_MMAP_THRESHOLD: _THRESHOLD, _M_TRIM_THRESHOLD: _KEPT, _M_TOP_PAD: _THRESHOLD})


@contextmanager
def keep_large_blocks() -> Iterator[None]:
    """Context manager that keeps freed tensors in the heap until its end.

    For code that frees and allocates the same sizes repeatedly: new memory costs a page fault per page.
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
    return all(_call("mallopt", name, value) == 1 for name, value in settings.items())


def malloc_trim() -> None:
    """Return free heap memory to the system, if the C library is glibc."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> int | None:
    """Call a function of the C library; None if it has no such function, as outside of glibc."""
    try:
        return getattr(ctypes.CDLL(None), name)(*arguments)
    except (AttributeError, OSError, TypeError):
        return None
