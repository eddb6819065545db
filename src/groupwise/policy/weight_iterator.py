"""Iterate over the policy's weights as in a checkpoint: whole tensors under checkpoint names.

All ranks visit the same modules in the same order, because gathering a sharded tensor is a collective.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from groupwise.compat.bitsandbytes import as_saved, cannot_dequantize, dequantized, is_quantized
from groupwise.compat.deepspeed import is_partitioned
from groupwise.compat.torch import WRAPPER_NAMES, persistent_buffers, set_parameter
from groupwise.compat.transformers import to_checkpoint_names
from groupwise.errors import BackendError
from groupwise.policy.introspection import CausalLM, unwrapped, without_adapter

BUCKET_BYTES = 512 * 2**20

# Components of module names that checkpoints leave out; the last three are added by PEFT.
_WRAPPERS = WRAPPER_NAMES | {"base_layer", "original_module", "token_adapter"}


@dataclass(frozen=True)
class LoRAWeights:
    """A LoRA adapter as PEFT saves it.

    Attributes:
        tensors: whole tensors by their name in ``adapter_model.safetensors``.
        config: contents of ``adapter_config.json``.
        scaling: factors that the layers multiply with B, by the name of B.
    """

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    scaling: Mapping[str, float]


@torch.no_grad()
def weight_iterator(model: CausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over all weights once, with adapters merged; does not change the model.

    4-bit weights are dequantized first, so that the sums are those that the layers compute with.

    Args:
        model: the unwrapped model (plain, PEFT, ZeRO-3 or ``fully_shard``); under FSDP version 1 the
            outermost ``FullyShardedDataParallel``. If it is sharded, all ranks must iterate to the end.

    Yields:
        (checkpoint name, whole tensor on the model's device); the tensor is valid until the model changes.

    Raises:
        BackendError: 8-bit or sharded 4-bit weights, or an adapter on one of two tied layers.
    """
    wrapped = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
    # The innermost FSDP unit around each module, by module id.
    units = {id(module): unit for unit in wrapped for module in unit.modules()}
    model = without_adapter(model)
    to_checkpoint = to_checkpoint_names(model)
    adapters, skipped = _adapters(model)
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for layer in model.modules():
        if getattr(layer, "tied_adapter", None) is not None:  # trained rows, of the embeddings and the head
            uses[id(layer.get_base_layer().weight)] -= 1
    by_unit: dict[Any, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        if id(module) not in skipped and not isinstance(module, FullyShardedDataParallel):
            by_unit.setdefault(units.get(id(module)), []).append((path, module))
    # Keeps the tensors alive, because ids of gathered tensors are reused once their unit is resharded.
    seen: dict[int, torch.Tensor] = {}
    for unit, modules in by_unit.items():
        with _summoned([unit]):
            for path, module in modules:
                tuners = adapters.get(id(module), [])
                tensors = dict(_own_tensors(module))
                _check(path, module, tensors, tuners, uses, summoned=unit is not None)
                own = {name: tensor for name, tensor in tensors.items() if id(tensor) not in seen}
                seen.update((id(tensor), tensor) for tensor in own.values())
                if not own:
                    continue
                others = dict.fromkeys(units.get(id(part)) for tuner in tuners for part in tuner.modules())
                with _summoned(other for other in others if other is not unit):
                    whole = _merged(module, own, tuners) if tuners else _gathered(own, copy=unit is not None)
                prefix = _checkpoint_path(path)
                yield from to_checkpoint({f"{prefix}{name}": t for name, t in whole.items()}).items()


@torch.no_grad()
def base_weights(model: CausalLM, *, dequantize: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the weights below the adapters, which are left out.

    Args:
        model: the unwrapped model, not sharded if it is quantized.
        dequantize: yield 4-bit weights as full matrices. Otherwise as in a checkpoint: packed values and
            quantization state.

    Yields:
        (checkpoint name, tensor).
    """
    if dequantize or not any(map(is_quantized, model.parameters())):
        with model.disable_adapter():
            yield from weight_iterator(model)
        return
    base = model.get_base_model()
    to_checkpoint = to_checkpoint_names(base)
    _, skipped = _adapters(base)
    seen: set[int] = set()
    for path, module in base.named_modules():
        if id(module) in skipped:
            continue
        own = {name: tensor for name, tensor in _own_tensors(module) if id(tensor) not in seen}
        seen.update(map(id, own.values()))
        for name, tensor in own.items():
            tensors = as_saved(f"{_checkpoint_path(path)}{name}", tensor)
            yield from (to_checkpoint(tensors) if len(tensors) == 1 else tensors).items()


class PolicyWeights:
    """Weights of the policy. The methods may be called any number of times while the weights do not change.

    They gather sharded parameters, which is a collective: if one rank calls a method, all ranks must, and
    read its result to the end.

    Args:
        model: see :func:`weight_iterator`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :func:`weight_iterator`."""
        return weight_iterator(self.model)

    def base(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :func:`base_weights`."""
        return base_weights(self.model)

    def adapter(self) -> LoRAWeights:
        """Gather the active LoRA adapter on the CPU, as PEFT would save it.

        Raises:
            BackendError: the model is wrapped by FSDP version 1.
        """
        model: CausalLM = self.model
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise BackendError(
                "vllm_engine_kwargs['enable_lora'] sends only the adapter, which FSDP version 1 does not "
                "support; set fsdp_version to 2, or leave enable_lora out to send merged weights"
            )
        from peft import get_peft_model_state_dict

        name = model.active_adapter
        parameters = {key: parameter for key, parameter in model.named_parameters() if "lora_" in key}
        with gathering(parameters.values()):
            whole = {key: whole_tensor(parameter.data) for key, parameter in parameters.items()}
            tensors = get_peft_model_state_dict(model, state_dict=whole, adapter_name=name)
            tensors = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
        config = model.peft_config[name].to_dict()
        scaling = {
            f"{path}.lora_B.weight": module.scaling[name]
            for path, module in model.named_modules()
            if isinstance(module.__dict__.get("scaling"), dict) and name in module.scaling
        }
        return LoRAWeights(tensors, {**config, "target_modules": sorted(config["target_modules"])}, scaling)


def gatherable(model: nn.Module) -> CausalLM:
    """Unwrap the policy, except from FSDP version 1, which is needed to gather its weights."""
    return model if isinstance(model, FullyShardedDataParallel) else unwrapped(model, keep_torch_compile=True)


def _summoned(units: Iterable[nn.Module | None]) -> ExitStack:
    """Context manager that gathers the parameters of these FSDP units, without the units inside them."""
    stack = ExitStack()
    for unit in units:
        if unit is not None:
            whole = FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False)
            stack.enter_context(whole)
    return stack


def buckets(
    weights: Iterable[tuple[str, torch.Tensor]], limit: int = BUCKET_BYTES
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Group consecutive weights into buckets of at most ``limit`` bytes; a larger one is its own bucket."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def rounded(
    weights: Iterable[tuple[str, torch.Tensor]], dtypes: Iterable[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Round matrices to the dtype of the engines, as they would; float32 has twice the bytes of bfloat16.

    Vectors are not rounded: they are few bytes, and vLLM keeps some in float32 (router biases, decay rates).

    Args:
        dtypes: names of the engines' dtypes; matrices that are no wider than the widest are left alone.
    """
    dtype = max((getattr(torch, name) for name in dtypes), key=lambda dtype: dtype.itemsize)
    for name, tensor in weights:
        wide = tensor.is_floating_point() and tensor.dtype.itemsize > dtype.itemsize and tensor.dim() > 1
        yield name, tensor.to(dtype) if wide else tensor


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the module's parameters and persistent buffers, without those of submodules."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from persistent_buffers(module)


def _checkpoint_path(path: str) -> str:
    parts = path.split(".")
    if "modules_to_save" in parts:  # followed by the adapter's name
        index = parts.index("modules_to_save")
        del parts[index : index + 2]
    kept = [part for part in parts if part and part not in _WRAPPERS]
    return ".".join([*kept, ""])


def _adapters(model: nn.Module) -> tuple[dict[int, list[Any]], set[int]]:
    """Return adapters by the id of their base layer, and ids of modules that no checkpoint contains."""
    if "peft" not in sys.modules:
        return {}, set()
    from groupwise.compat.peft import wrapper_types

    tuner_layer, saved_module = wrapper_types()
    adapters: dict[int, list[Any]] = {}
    absent: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, tuner_layer):
            adapters.setdefault(id(module.get_base_layer()), []).insert(0, module)  # innermost first
            absent += [child for name, child in module.named_children() if name != "base_layer"]
        elif isinstance(module, saved_module):
            in_use = module.active_adapters[0] if module.active_adapters else None
            absent += [child for name, child in module.modules_to_save.items() if name != in_use]
            absent += [module.original_module] if in_use else []
    return adapters, {id(part) for module in absent for part in module.modules()}


def _check(
    path: str,
    module: nn.Module,
    own: dict[str, torch.Tensor],
    tuners: list[Any],
    uses: Counter[int],
    *,
    summoned: bool,
) -> None:
    for name, tensor in own.items():
        sharded = summoned or is_partitioned(tensor) or hasattr(tensor, "full_tensor")
        if cannot_dequantize(module, tensor, sharded=sharded):
            raise BackendError(
                f"{path}.{name} is quantized to 8 bits, or to 4 bits and sharded, and cannot be sent to "
                "another engine; load the policy in 4 bits without FSDP and ZeRO-3, or set use_vllm=False"
            )
        if tuners and uses[id(tensor)] > 1:
            raise BackendError(
                f"{path}.{name} has an adapter and is tied to another layer without it, so it cannot be "
                "merged; leave it out of target_modules"
            )


def _merged(module: nn.Module, own: dict[str, torch.Tensor], tuners: list[Any]) -> dict[str, torch.Tensor]:
    """Merge the module's adapters into (dequantized) copies of its tensors, then restore its parameters."""
    from groupwise.compat.peft import merge_dequantized

    in_4_bits = any(map(is_quantized, own.values()))
    owners = [module, *(part for tuner in tuners for part in tuner.modules() if part is not module)]
    originals = {
        (owner, name): parameter
        for owner in owners
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
    }
    merged_before = [tuner.merged_adapters for tuner in tuners]
    try:
        with gathering(originals.values()):
            for (owner, name), parameter in originals.items():
                copy = whole_tensor(dequantized(parameter)).clone()
                set_parameter(owner, name, nn.Parameter(copy, requires_grad=False))
        for tuner in tuners:
            if not tuner.disable_adapters:
                tuner.merged_adapters = list(tuner.merged_adapters)
                if in_4_bits:
                    merge_dequantized(tuner)
                else:
                    tuner.merge()
        return {name: getattr(module, name).data for name in own}
    finally:
        for (owner, name), parameter in originals.items():
            set_parameter(owner, name, parameter)
        for tuner, merged in zip(tuners, merged_before, strict=True):
            tuner.merged_adapters = merged


def _gathered(own: dict[str, torch.Tensor], *, copy: bool) -> dict[str, torch.Tensor]:
    copy = copy or any(map(is_partitioned, own.values()))
    with gathering(own.values()):
        # FSDP and ZeRO free gathered tensors at the end of the context.
        whole = {name: whole_tensor(dequantized(tensor)) for name, tensor in own.items()}
        return {name: tensor.clone() for name, tensor in whole.items()} if copy else whole


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor sharded by ``fully_shard``; returns other tensors as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gathering(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[object]:
    """Context manager that gathers the parameters that ZeRO-3 partitions."""
    partitioned = [tensor for tensor in tensors if is_partitioned(tensor)]
    if not partitioned:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(partitioned)  # an attribute, which cannot be imported by name
