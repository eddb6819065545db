"""Savings of time and memory that only CPU runs use; the functions do nothing on other devices.

:func:`install_cpu_training` once per run, :func:`cpu_generation` around sampling, :func:`trim_heap` between
the forward and the backward pass.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil
import torch

from groupwise.compat.torch import has_onednn_linear
from groupwise.records import MicroBatch
from groupwise.records.fast_paths import FastPath
from groupwise.records.tensors import shape_of

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # options of glibc's mallopt
_THRESHOLD = 4 << 20  # bytes; smaller than the activations of a layer
_LARGEST = 32 << 20  # bytes; the largest threshold that glibc accepts
_KEPT = 64 << 20  # bytes kept at the end of the heap; without them every new tensor there is paged in again
_CACHE_TOKENS = 1024  # of one part of a micro-batch; a single group may have more


def install_cpu_training(models: Iterable[torch.nn.Module | None], *, onednn_linears: bool = True) -> None:
    """Return freed memory to the system, and compute the large linear layers of ``models`` with oneDNN.

    Args:
        models: models of this process, or None; those on other devices are left alone.
        onednn_linears: replace linear layers. Set False where something else rewrites them (FSDP, DeepSpeed,
            ``torch.compile``).
    """
    on_cpu = [model for model in models if model is not None and _is_on_cpu(model)]
    if not on_cpu:
        return
    from groupwise.cpu.linear import replace_linears

    return_large_blocks()
    if onednn_linears:
        for model in on_cpu:
            replace_linears(model)


def linears_path(model: torch.nn.Module, *, onednn_linears: bool) -> FastPath:
    """Return what computes the linear layers of a model on a CPU; see :func:`install_cpu_training`."""
    from groupwise.cpu.linear import OneDNNLinear

    if any(isinstance(module, OneDNNLinear) for module in model.modules()):
        return FastPath("linear layers", "oneDNN, packed for sampling")
    if not onednn_linears:
        return FastPath("linear layers", "PyTorch", "FSDP, DeepSpeed or torch_compile rewrites them")
    if not has_onednn_linear():
        return FastPath("linear layers", "PyTorch", "this PyTorch has no oneDNN", warns=True)
    return FastPath("linear layers", "PyTorch", "none is large enough")


def threads_paths() -> list[FastPath]:
    """Return a warning if other processes take the cores from this process's threads, else nothing.

    The threads of a matrix product wait for the slowest of them.
    """
    threads, cores, load = torch.get_num_threads(), os.cpu_count() or 1, psutil.getloadavg()[0]
    if threads == 1 or load < 2 * cores:
        return []
    reason = (
        f"{load:.0f} processes want the machine's {cores} cores, and each thread waits for the others; start "
        "the run with OMP_WAIT_POLICY=passive or OMP_NUM_THREADS=1, which may be many times as fast"
    )
    return [FastPath("threads", str(threads), reason, warns=True)]


@contextmanager
def cpu_generation(model: torch.nn.Module) -> Iterator[None]:
    """Context manager for sampling: prepacks linear weights, keeps freed tensors in the heap.

    The weights of ``model`` must not change inside.
    """
    if not _is_on_cpu(model):
        yield
        return
    from groupwise.cpu.linear import prepacked_weights

    with keep_large_blocks(), prepacked_weights(model):
        yield


def trim_heap(device: torch.device) -> None:
    """Return free heap memory to the system if ``device`` is a CPU.

    The activations of a forward pass are allocated with an alignment, and their freed blocks hold no second
    one of the same size in glibc before 2.38: they would stay until the peak of the backward pass.
    """
    if device.type == "cpu":
        malloc_trim()


def _is_on_cpu(model: torch.nn.Module) -> bool:
    return any(parameter.device.type == "cpu" for parameter in model.parameters())


def cache_sized(batch: MicroBatch, *, shared: bool) -> list[MicroBatch]:
    """Split a micro-batch into parts whose activations fit a CPU cache, without computing a prompt twice.

    Larger matrix products are no faster on a CPU, and they write more activations to memory. The largest part
    comes first, while no gradient is allocated: the sum of both has a lower peak.

    Args:
        shared: the layout computes a shared prompt once.
    """
    shape = shape_of(batch)
    # Rows that share a prefix stay together: apart, each part would compute the prompt again.
    groups = shape.groups(shared=shared)
    parts: list[list[int]] = []
    sizes: list[int] = []  # tokens of each part
    for group in groups:
        cost = shape.group_tokens(group)
        if not parts or sizes[-1] + cost > _CACHE_TOKENS:  # next fit: the order of the rows is kept
            parts.append([])
            sizes.append(0)
        parts[-1] += group
        sizes[-1] += cost
    largest_first = sorted(range(len(parts)), key=lambda part: -sizes[part])
    return [batch] if len(parts) == 1 else [batch.select(parts[part]) for part in largest_first]


def return_large_blocks() -> None:
    """Return freed blocks of 4 MB and more to the system at once.

    By default glibc raises this threshold, up to 32 MB, each time a larger block is freed. The activations of
    a layer then stay in a heap that fragments: a fifth of the process's memory in training. Needs glibc; the
    environment variable MALLOC_MMAP_THRESHOLD_ takes precedence.
    """
    _set({_M_MMAP_THRESHOLD: _THRESHOLD, _M_TRIM_THRESHOLD: _KEPT, _M_TOP_PAD: _THRESHOLD})


@contextmanager
def keep_large_blocks() -> Iterator[None]:
    """Context manager that keeps freed tensors in the heap until its end.

    For code that frees and allocates the same sizes repeatedly: new memory costs a page fault per page.
    """
    _set({_M_MMAP_THRESHOLD: _LARGEST, _M_TRIM_THRESHOLD: 8 * _LARGEST})
    try:
        yield
    finally:
        return_large_blocks()
        malloc_trim()


def _set(settings: dict[int, int]) -> None:
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        for name, value in settings.items():
            _call("mallopt", name, value)


def malloc_trim() -> None:
    """Return free heap memory to the system, if the C library is glibc."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    """Call a function of the C library, if it has this one: only glibc does."""
    with suppress(AttributeError, OSError, TypeError):
        getattr(ctypes.CDLL(None), name)(*arguments)


def float32_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Compute scaled_dot_product_attention in float32; faster than the CPU's fused kernel for few queries."""
    with torch.autocast("cpu", enabled=False):
        scores = query.float() @ key.float().transpose(-1, -2)
        scores *= query.shape[-1] ** -0.5 if scale is None else scale
        if attn_mask is not None:
            scores.masked_fill_(~attn_mask, torch.finfo(scores.dtype).min)
        return (scores.softmax(-1) @ value.float()).to(value.dtype)
