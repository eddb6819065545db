"""Frozen linear weights of an adapter's base, held in the dtype in which autocast multiplies them.

Autocast would cast a float32 weight in every forward pass and recomputation, and keep the copy for the
backward pass. Held are weights that are exact in its dtype, as published ones are in bfloat16: the products
are the same bits, and float32 comes back without loss.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from groupwise.compat.peft import wrapper_types
from groupwise.compat.transformers import is_stateful
from groupwise.cpu.linear import OneDNNLinear
from groupwise.distributed import is_sharded
from groupwise.policy.introspection import adapter_type, adapters_of, autocast_dtype, base_model, is_quantized
from groupwise.records.fast_paths import FastPath


class FrozenLinear(nn.Linear):
    """``nn.Linear`` that outside autocast multiplies in the dtype of its input, not of its weight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        autocast = torch.is_autocast_enabled(input.device.type)
        return F.linear(input, self.weight if autocast else self.weight.to(input.dtype), self.bias)


def hold_frozen_weights(policy: Any, accelerator: Accelerator) -> FastPath:
    """Convert frozen float32 weights of linear layers, but for the output layer, to autocast's dtype."""
    dtype, base, adapters = autocast_dtype(accelerator), base_model(policy), adapters_of(policy)
    reasons = {
        "nothing is cast": dtype is None,
        "FSDP and DeepSpeed have a precision of their own": is_sharded(accelerator),
        "the model is quantized": is_quantized(base),
        "runs of a sweep share them": hasattr(base, "shares_weights"),
        "kernels of linear attention read weights themselves": is_stateful(base),
        "adapters other than plain LoRA compute with the weights": any(
            adapter_type(one) != "LORA" or one.use_dora or getattr(one, "target_parameters", None)  # type: ignore[attr-defined]
            for one in adapters
        ),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    if dtype is None or reason:
        return FastPath("frozen weights", "as loaded", reason)
    layers = _frozen_linears(policy)
    held = {id(layer) for layer in layers if _hold(layer, dtype)}
    if len(held) < len(layers):
        reason = f"{len(layers) - len(held)} of {len(layers)} matrices are not exact in it"
    for module in policy.modules():
        if isinstance(module, wrapper_types()[0]) and id(module.get_base_layer()) in held:
            vars(module)["merge"] = partial(_merge_in_float32, module)
    return FastPath("frozen weights", str(dtype).removeprefix("torch.") if held else "as loaded", reason)


def _frozen_linears(policy: Any) -> list[nn.Linear]:
    """Return linear layers with a frozen float32 weight that is read by their forward alone."""
    apart = [
        policy.get_output_embeddings(),
        *(m for m in policy.modules() if isinstance(m, wrapper_types()[1])),
    ]
    excluded = {id(part) for module in apart if module is not None for part in module.modules()}
    return [
        module
        for module in policy.modules()
        if type(module) in (nn.Linear, OneDNNLinear)
        and not module.weight.requires_grad
        and module.weight.dtype == torch.float32
        and not (id(module) in excluded or "forward" in vars(module))  # hooks of accelerate
    ]


def _hold(layer: nn.Linear, dtype: torch.dtype) -> bool:
    """Convert the weight of a layer; return False, with the layer unchanged, if that would round it."""
    half = layer.weight.detach().to(dtype)
    if not torch.equal(half.float(), layer.weight):
        return False
    layer.weight.data = half
    vars(layer)["held"] = True
    if type(layer) is nn.Linear:
        layer.__class__ = FrozenLinear
    return True


def _merge_in_float32(tuner: Any, *args: Any, **kwargs: Any) -> None:
    """Merge an adapter; PEFT would round its product to the dtype of the base layer's weight."""
    layer = tuner.get_base_layer()
    layer.weight.data = layer.weight.data.float()
    type(tuner).merge(tuner, *args, **kwargs)


def restore_float32(model: nn.Module) -> None:
    """Convert back what an earlier run held: this one may train it, or initialise an adapter in its dtype."""
    for module in model.modules():
        if vars(module).pop("held", False):
            module.weight.data = module.weight.data.float()  # type: ignore[operator]
            if type(module) is FrozenLinear:
                module.__class__ = nn.Linear  # type: ignore[assignment]
