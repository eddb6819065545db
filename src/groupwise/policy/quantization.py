"""Quantized policies: the quantization before weights are loaded, unsupported combinations, 4-bit weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, cast

from transformers import PreTrainedModel
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from groupwise.compat.bitsandbytes import disable_cpu_packing
from groupwise.config.grpo_config import GRPOConfig
from groupwise.errors import ConfigError
from groupwise.policy.introspection import adapter_type, is_quantized, load_config

if TYPE_CHECKING:
    from peft import PeftConfig


def quantization_of(
    model: str | PreTrainedModel, config: GRPOConfig, given: QuantizationConfigMixin | None = None
) -> QuantizationConfigMixin | None:
    """Return the quantization of the policy, or None for full-precision weights.

    Args:
        model: Hub id, directory or a loaded model; of a name, only the config is loaded.
        given: the trainer's ``quantization_config``.
    """
    found: Any
    if isinstance(model, str):
        options = cast(dict[str, Any], config.model_init_kwargs or {})
        found = given or options.get("quantization_config")
        if found is None:
            found = getattr(load_config(model, config), "quantization_config", None)
    else:
        found = getattr(model.config, "quantization_config", None) if is_quantized(model) else None
    return AutoQuantizationConfig.from_dict(dict(found)) if isinstance(found, dict) else found


def check_quantized(
    quantization: QuantizationConfigMixin, adapters: Collection[PeftConfig], *, use_vllm: bool
) -> None:
    """Check that a quantized policy can be trained, and that vLLM can sample from it.

    Raises:
        ConfigError: the policy has no adapter; or vLLM cannot sample from it: its adapter is not LoRA, or its
            quantization not that of bitsandbytes to 4 bits.
    """
    method = str(getattr(quantization.quant_method, "value", quantization.quant_method))
    bits = next((bits for bits in (4, 8) if getattr(quantization, f"load_in_{bits}bit", False)), None)
    policy = f"the policy is quantized by {method}" + ("" if bits is None else f" to {bits} bits")
    if not adapters and (use_vllm or method == "bitsandbytes"):
        raise ConfigError(
            f"{policy} and has no adapter, but quantized weights can be neither trained nor sent to vLLM; "
            "pass peft_config=LoraConfig(...) (lora in a run file) to train an adapter on them, or load the "
            "model without quantization"
        )
    if not use_vllm:
        return
    if method != "bitsandbytes" or bits != 4:
        raise ConfigError(
            f"{policy}, and vLLM samples only from policies that bitsandbytes quantized to 4 bits; load it "
            "with BitsAndBytesConfig(load_in_4bit=True), or set use_vllm=False"
        )
    other = {adapter_type(adapter) for adapter in adapters} - {"LORA"}
    if other:
        raise ConfigError(
            f"{policy} and has an adapter of type {', '.join(sorted(other))}, but only LoRA can be sent to "
            "vLLM then; pass peft_config=LoraConfig(...), or set use_vllm=False"
        )


def keep_4bit_weights_unpacked(model: PreTrainedModel) -> None:
    """Stop bitsandbytes from repacking 4-bit weights at their first use for sampling on a CPU.

    Repacked weights propagate no gradient, and adapters would silently not train.

    Raises:
        ConfigError: an earlier forward has repacked some.
    """
    packed = [module for module in model.modules() if disable_cpu_packing(module)]
    if packed:
        raise ConfigError(
            f"{len(packed)} 4-bit layers were repacked by bitsandbytes in an earlier forward on a CPU, which "
            "rounds their scales and keeps adapters from training; load the model anew"
        )
