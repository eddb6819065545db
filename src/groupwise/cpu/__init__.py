"""Savings of time and memory that only CPU runs use; the functions do nothing on other devices.

:func:`install_cpu_training` once per run, :func:`save_matmul_outputs` after gradient checkpointing is
enabled, :func:`cpu_generation` around sampling, :func:`trim_heap` between the forward and the backward pass.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psutil
import torch

from groupwise.compat.torch import has_onednn_linear
from groupwise.compat.transformers import add_checkpoint_contexts
from groupwise.records.fast_paths import FastPath


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
    from groupwise.cpu.malloc import return_large_blocks

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
        "the run with OMP_NUM_THREADS=1, which may be many times as fast"
    )
    return [FastPath("threads", str(threads), reason, warns=True)]


def save_matmul_outputs(model: torch.nn.Module) -> None:
    """Save outputs of linear layers in the gradient checkpoints of ``model``, if oneDNN computes them.

    No effect on gradient checkpointing that is enabled later, reentrant checkpoints, and those that have
    contexts of their own.
    """
    if not _is_on_cpu(model):
        return
    from groupwise.cpu.checkpoint import checkpoint_contexts
    from groupwise.cpu.linear import OneDNNLinear

    if any(isinstance(module, OneDNNLinear) for module in model.modules()):
        add_checkpoint_contexts(model, checkpoint_contexts)


@contextmanager
def cpu_generation(model: torch.nn.Module) -> Iterator[None]:
    """Context manager for sampling: prepacks linear weights, keeps freed tensors in the heap.

    The weights of ``model`` must not change inside.
    """
    if not _is_on_cpu(model):
        yield
        return
    from groupwise.cpu.linear import prepacked_weights
    from groupwise.cpu.malloc import keep_large_blocks

    with keep_large_blocks(), prepacked_weights(model):
        yield


def trim_heap(device: torch.device) -> None:
    """Return free heap memory to the system if ``device`` is a CPU.

    The activations of a forward pass are allocated with an alignment, and their freed blocks hold no second
    one of the same size in glibc before 2.38: they would stay until the peak of the backward pass.
    """
    if device.type == "cpu":
        from groupwise.cpu.malloc import malloc_trim

        malloc_trim()


def _is_on_cpu(model: torch.nn.Module) -> bool:
    return any(parameter.device.type == "cpu" for parameter in model.parameters())
