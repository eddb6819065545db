"""Undocumented symbols of PEFT, seen in 0.18 to 0.21."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper


def wrapper_types() -> tuple[type[BaseTunerLayer], type[ModulesToSaveWrapper]]:
    """Return the base class of adapter layers and the wrapper of ``modules_to_save``."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    return BaseTunerLayer, ModulesToSaveWrapper


def head_parameters(head: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight and bias that a head computes with: those of its base layer plus the active adapters.

    The sum is differentiable with respect to both.

    Args:
        head: the LoRA layer of a linear layer, or its wrapper of ``trainable_token_indices``.
    """
    layer = getattr(head, "token_adapter", head)
    weight, bias = layer.base_layer.weight, getattr(layer.base_layer, "bias", None)
    if layer.disable_adapters or layer.merged:
        return weight, bias
    if layer is not head:
        return layer.get_merged_weights(layer.active_adapters), bias  # trained rows replace those of the base
    for name in layer.active_adapters:
        if name in layer.lora_A:
            weight = weight + layer.get_delta_weight(name)
    return weight, bias


def head_adapter_problem(head: Any) -> str:
    """Return the property of a head's adapter with which it is no sum of matrices; "" if it is one."""
    if hasattr(head, "token_adapter") or not hasattr(head, "base_layer"):
        return ""
    from peft.tuners.lora import Linear

    if type(head) is not Linear:
        return f"a {type(head).__module__.split('.')[-2]} layer ({type(head).__name__})"
    if head.lora_variant:
        return "use_dora or another variant of LoRA"
    if any(head.lora_bias.values()):
        return "lora_bias"
    return "lora_dropout" if any(getattr(drop, "p", 0.0) for drop in head.lora_dropout.values()) else ""


def merge_dequantized(tuner: Any) -> None:
    """Merge a LoRA layer of 4 bits into its base layer, whose weight was replaced by a full matrix.

    The layer's own ``merge`` would quantize the sum.
    """
    from peft.tuners.lora import Linear

    Linear.merge(tuner)


@contextmanager
def without_checkpointing_warning() -> Iterator[None]:
    """Context manager without a warning that PEFT 0.21 causes and no user can act on.

    It reads ``is_gradient_checkpointing``, which transformers 5.24 calls ``is_activation_checkpointing``.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


@contextmanager
def virtual_tokens_once(model: Any) -> Iterator[None]:
    """Context manager in which ``generate`` adds virtual tokens once, before the prompt.

    PEFT 0.21 reads and replaces the cache of a decoding step under its old name, ``past_key_values``. With
    transformers 5.24, which has it under ``cache``, it would add virtual tokens before every token, and the
    keys and values of prefix tuning would be ignored. A PEFT that uses the new name is not changed.
    """
    own, base = model.prepare_inputs_for_generation, model.base_model_prepare_inputs_for_generation

    def with_old_name(*args: Any, **kwargs: Any) -> Any:
        inputs = base(*args, **kwargs)
        return {**inputs, "past_key_values": inputs["cache"]} if "cache" in inputs else inputs

    def prepare(*args: Any, **kwargs: Any) -> Any:
        inputs = own(*args, **kwargs)
        if "cache" in inputs:
            old_name = inputs.pop("past_key_values")
            inputs["cache"] = inputs["cache"] if old_name is kwargs.get("cache") else old_name
        return inputs

    model.base_model_prepare_inputs_for_generation, model.prepare_inputs_for_generation = (
        with_old_name,
        prepare,
    )
    try:
        yield
    finally:
        model.base_model_prepare_inputs_for_generation = base
        model.base_model.prepare_inputs_for_generation = base  # generate left the wrapper there
        del model.prepare_inputs_for_generation
