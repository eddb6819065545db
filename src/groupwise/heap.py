"""The heap of a process that trains on a CPU."""

from __future__ import annotations

import ctypes
import os

_M_MMAP_THRESHOLD = -3
_THRESHOLD = 4 << 20  # bytes; smaller than the activations of a layer


def return_large_blocks() -> bool:
    """Let freed tensors of 4 MB and more go back to the system at once; whether that was possible.

    glibc raises this size up to 32 MB with every larger block that is freed, and from then on keeps the
    activations of a layer in a heap that fragments: in training, a fifth of the process's memory. It takes
    glibc; the environment's MALLOC_MMAP_THRESHOLD_ has precedence.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return mallopt(_M_MMAP_THRESHOLD, _THRESHOLD) == 1


def give_back() -> None:
    """Let what was freed go back to the system, where glibc can be told to."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return
