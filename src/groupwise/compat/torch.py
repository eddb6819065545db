"""Private symbols of PyTorch, seen in 2.6 to 2.15 except where a function says otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Parts of module names that torch.compile, activation checkpointing and FSDP add.
WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@cache
def has_native_bf16_cpu() -> bool:
    """Return True if oneDNN computes bfloat16 by AVX512_BF16 or AMX; ONEDNN_MAX_CPU_ISA may forbid it."""
    import torch

    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    if hasattr(torch.cpu, "get_capabilities"):  # public, seen in 2.13 and 2.15
        capabilities = torch.cpu.get_capabilities()
        return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_tile"))
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def hide_dataloader_worker() -> None:
    """Make ``get_worker_info`` return None in this process.

    Streaming datasets of ``datasets`` change their order in a worker, even if it is the only one.
    """
    from torch.utils.data._utils import worker

    worker._worker_info = None


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of ``module`` itself that its state dict contains."""
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace a parameter of ``module`` itself; its attribute setter and hooks are not called."""
    module._parameters[name] = parameter


def process_group_store(timeout: float) -> torch.distributed.Store:
    """Return the store of the default process group; with gloo, set the time limit of its collectives."""
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.distributed_c10d import _get_default_store, get_backend

    if get_backend() == "gloo":
        set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout  # before torch 2.14
        set_timeout(timedelta(seconds=timeout))
    return _get_default_store()


def skip_buffer_broadcast(model: nn.Module) -> None:
    """Skip the broadcast of buffers in the next forward of a DDP model."""
    from torch.nn.parallel import DistributedDataParallel

    wrapper = getattr(model, "_orig_mod", model)  # of torch.compile
    if isinstance(wrapper, DistributedDataParallel):
        wrapper.require_forward_param_sync = False


def has_fused_gqa(query_BHQD: torch.Tensor, key_BJKD: torch.Tensor, value_BJKD: torch.Tensor) -> bool:
    """Return True if a fused kernel computes causal attention with ``enable_gqa`` for these tensors.

    Otherwise math attention would, with a matrix of scores per query head (flash attention alone takes groups
    of heads, in half precision and on Ampere or newer).
    """
    import torch
    from torch.nn.attention import SDPBackend

    choice = torch._fused_sdp_choice(query_BHQD, key_BJKD, value_BJKD, is_causal=True, enable_gqa=True)
    return choice not in (SDPBackend.MATH.value, SDPBackend.ERROR.value)


def varlen_attention() -> Callable[..., Any] | None:
    """Return ``varlen_attn`` if it takes groups of heads, as since 2.13; else None."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return None
    takes_groups = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
    return varlen.varlen_attn if takes_groups else None


def has_out_dtype() -> bool:
    """Return True if products of half-precision matrices can have a float32 result on CUDA (since 2.8)."""
    import torch

    return all("dtype_out" in product.overloads() for product in (torch.ops.aten.mm, torch.ops.aten.addmm))


def mm_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Write ``left @ right`` of half-precision CUDA matrices to the wider ``out`` without rounding."""
    import torch

    if has_out_dtype():
        return torch.mm(left, right, out_dtype=out.dtype, out=out)
    return torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)


def addmm_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add ``left @ right`` of half-precision CUDA matrices to the wider ``out`` without rounding."""
    import torch

    if has_out_dtype():
        return torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    return out.addmm_(left.to(out.dtype), right.to(out.dtype))


def has_onednn_linear() -> bool:
    """Return True if this build has the operators of ``onednn_linear`` and ``onednn_pack``."""
    import torch

    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``left @ right.T + bias`` on a CPU in the one dtype of all operands, float32 or bfloat16.

    ``left`` is (..., I) and not empty, ``right`` is (O, I), which may be packed by ``onednn_pack``.
    """
    import torch

    if left.dtype == torch.bfloat16 and not right.is_mkldnn:
        # Calls oneDNN too; the operator below would copy transposed operands.
        return torch.nn.functional.linear(left, right, bias)
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


def onednn_pack(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Return ``weight`` in oneDNN's packed layout for inputs of ``rows`` rows."""
    import torch

    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, which tensors on the meta device have, too."""
    return tensor.untyped_storage()._cdata


def observed_operations(
    observe: Callable[[str, list[torch.Tensor], object], None],
) -> AbstractContextManager[object]:
    """Context manager that calls ``observe(name, tensor arguments, result)`` after every operation.

    Tensors in lists count as arguments.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Observed(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            lists = [
                value if isinstance(value, (list, tuple)) else [value] for value in args
            ]  # of cat, stack
            tensors = [value for values in lists for value in values if isinstance(value, torch.Tensor)]
            observe(func.overloadpacket.__name__, tensors, result)
            return result

    return Observed()
