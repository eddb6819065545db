"""Parameters and adapters of a model in a worker of vLLM. Undocumented symbols, seen in 0.32."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Rows of the identity matrix that a kernel is called with to read its weights.
_READ_ROWS = 256


def add_worker_method(name: str, method: Callable[..., Any]) -> None:
    """Add a method to vLLM's workers, for ``collective_rpc``."""
    from vllm.v1.worker.worker_base import WorkerBase

    setattr(WorkerBase, name, method)


@contextmanager
def without_lora_layers(model: nn.Module) -> Iterator[None]:
    """Put the base layers in the places of vLLM's LoRA layers, so that modules have a checkpoint's names."""
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapped = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA) and hasattr(child, "base_layer")
    ]
    try:
        for parent, name, child in wrapped:
            parent._modules[name] = child.base_layer
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child


@contextmanager
def on_meta_device(model: nn.Module) -> Iterator[dict[tuple[str, str], torch.Tensor]]:
    """Replace all parameters and buffers by those before loading, on the meta device; put them back at exit.

    Yields:
        the parameters by (module path, name); of tied ones the first.
    """
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta, to_meta_tensor

    layers = dict(model.named_modules())
    before = {
        layer: (dict(layer._parameters), dict(layer._buffers), set(layer._non_persistent_buffers_set))
        for layer in layers.values()
    }
    seen: set[int] = set()
    found: dict[tuple[str, str], torch.Tensor] = {}
    try:
        for path, layer in layers.items():
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            for tensors in (layer._parameters, layer._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and not tensor.is_meta:  # such as a bias, which vLLM leaves
                        tensors[name] = to_meta_tensor(tensor)
            for parameter in layer._parameters.values():
                if hasattr(parameter, "weight_loader"):  # that of a reload before would defer the copies
                    parameter.weight_loader = _get_original_loader(parameter)
            for name, parameter in before[layer][0].items():
                on_meta = layer._parameters.get(name)
                if parameter is not None and on_meta is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    found[path, name] = on_meta
        yield found
    finally:
        for layer, (parameters, buffers, not_persistent) in before.items():
            layer._parameters.clear()
            layer._parameters.update(parameters)
            layer._buffers.clear()
            layer._buffers.update(buffers)
            layer._non_persistent_buffers_set = not_persistent


def loaded_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters that weights are loaded into; of tied ones the first.

    vLLM adds others after loading, such as matrices that it derives for multi-head latent attention.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    layers = dict(model.named_modules())
    names = [name for name, _ in model.named_parameters()]
    split = {name: name.rpartition(".")[::2] for name in names}
    return {
        name
        for name, (path, own) in split.items()
        if own in get_layerwise_info(layers[path]).restore_metadata[0]
    }


def repacking_kernel(module: Any) -> Any:
    """Return the function of a CPU layer that multiplies by a repacked copy of its weight; None without."""
    kernel = getattr(module, "cpu_linear", None)
    return kernel if getattr(kernel, "__closure__", None) else None


def read_kernel(module: Any, kernel: Any, width: int) -> torch.Tensor:
    """Read a repacked matrix (N, ``width``) by products with unit vectors, which are exact."""
    import torch

    units = torch.eye(width, dtype=module.weight.dtype)
    return torch.cat([kernel(part, module.weight, None) for part in units.split(_READ_ROWS)]).T


def keep_digests_of_repacked(row_digests: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Attach ``row_digests`` of every matrix that vLLM repacks from now on to the kernel that reads it."""
    from vllm.model_executor.layers import utils

    repack = utils.dispatch_cpu_unquantized_gemm
    if hasattr(repack, "__wrapped__"):
        return

    @functools.wraps(repack)
    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight.detach()
        digests = row_digests(weight) if weight.dim() == 2 and not weight.is_meta else None
        repack(layer, remove_weight)
        if (kernel := repacking_kernel(layer)) is not None:
            kernel.row_digests = digests

    utils.dispatch_cpu_unquantized_gemm = dispatch


def _experts_kind(module: Any) -> str:
    """Return the kernels of a layer of experts, such as TRITON or CPU; "" for another layer."""
    backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
    return getattr(backend, "name", "")


def repack_experts(model: nn.Module) -> None:
    """Make the reload that is under way repack experts for a CPU, as the first load did.

    vLLM repacks them only when it makes their kernel: after a reload, it would read plain matrices as packed.
    """
    for module in model.modules():
        if _experts_kind(module) == "CPU":
            module.quant_method.moe_kernel = None  # type: ignore[union-attr]


def as_loaded(module: Any, name: str, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter with the elements in the order in which they are loaded.

    Returns:
        None if that order is not known: of experts that a kernel for GPUs has rearranged.
    """
    import torch

    kind = _experts_kind(module)
    if kind in ("", "TRITON", "BATCHED_TRITON") or name not in ("w13_weight", "w2_weight"):
        return parameter
    if kind != "CPU":
        return None
    kernel = module.quant_method.moe_kernel.fused_experts
    if kernel._use_zentorch:  # it reads plain matrices
        return parameter
    order = _packed_order(parameter.shape[1], parameter.shape[2], parameter.dtype, kernel.isa)
    return (
        torch.empty_like(parameter).flatten(1).index_copy_(1, order, parameter.flatten(1)).view_as(parameter)
    )


@functools.cache
def _packed_order(rows: int, columns: int, dtype: torch.dtype, isa: str) -> torch.Tensor:
    """Return the index in the matrix of an expert of every element that vLLM's kernel reads, in its order.

    vLLM packs a matrix of the indices, one byte of them at a time: every dtype has exact values up to 256.
    """
    import torch
    from vllm._custom_ops import cpu_prepack_moe_weight

    index = torch.arange(rows * columns)
    order = torch.zeros_like(index)
    for shift in range(0, 32, 8):
        byte = (index >> shift & 255).to(dtype).view(1, rows, columns)
        order += cpu_prepack_moe_weight(byte, isa).flatten().long() << shift
    return order


def adapter_tensors(worker: Any, names: Iterable[str]) -> Iterator[dict[str, torch.Tensor | None]]:
    """Iterate over the LoRA adapters of a worker, the latest first.

    Args:
        names: names of tensors in the format of PEFT.

    Yields:
        tensors by name, those of them that the adapter has; None for one in a layer whose format is not
        known. They are the ones that kernels read, with zeros beyond the adapter's rank, or those that are
        copied there when a request uses the adapter. B is scaled.
    """
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.utils import parse_fine_tuned_lora_name

    manager = worker.model_runner.lora_manager._adapter_manager
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    fused = {
        part: (whole, i) for whole, parts in manager.packed_modules.items() for i, part in enumerate(parts)
    }
    for number in sorted(manager.list_adapters(), reverse=True):
        lora, found = manager.get_adapter(number), {}
        for name in names:
            path, is_a = parse_fine_tuned_lora_name(name, mapper)
            path, index = fused.get(path, (path, None))
            layer, own = manager.modules.get(path), lora.get_lora(path)
            if layer is None or own is None:
                continue
            tensor = None
            if isinstance(layer, BaseLinearLayerWithLoRA):
                tensor = own.lora_a if is_a else own.lora_b
                tensor = tensor if index is None else tensor[index]
                if number in manager.lora_index_to_id and layer.tp_size == 1:
                    stacked = layer.lora_a_stacked if is_a else layer.lora_b_stacked
                    tensor = stacked[index or 0][manager.lora_index_to_id.index(number), 0]
            found[name] = tensor
        yield found
