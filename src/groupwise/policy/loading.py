"""Loading the policy and preparing it for training."""

from __future__ import annotations

import difflib
import logging
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedModel,
)

from groupwise.compat.transformers import image_text_model_class, name_or_path
from groupwise.errors import ConfigError
from groupwise.policy.heads import check_head
from groupwise.policy.heads.weights import output_head

logger = logging.getLogger(__name__)

_DTYPES = ("bfloat16", "float16", "float32")

#: Of the loading options, those that say which configuration is meant.
_WHICH_CONFIG = ("trust_remote_code", "revision", "token", "subfolder", "cache_dir", "gguf_file")


def load_policy(
    model: str | PreTrainedModel, config: Any, quantization_config: Any = None
) -> PreTrainedModel:
    """The policy from a hub id, a directory or a ready model.

    Weights given by name are loaded in float32 unless ``model_init_kwargs`` say otherwise: small updates
    would be lost in half precision.
    """
    options = dict(config.model_init_kwargs or {})
    if not isinstance(model, str):
        if options or quantization_config is not None:
            raise ConfigError(
                "model_init_kwargs and quantization_config apply only when the model is given by name; the "
                f"model given is already a {type(model).__name__}: drop them, or pass its name"
            )
        return model
    old_name = options.pop("torch_dtype", None)
    options["dtype"] = _dtype(options.get("dtype") or old_name or torch.float32)
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    options.setdefault("trust_remote_code", config.trust_remote_code)
    named = {name: options[name] for name in _WHICH_CONFIG if name in options}
    config_of_model = AutoConfig.from_pretrained(model, **named)
    return auto_class(config_of_model).from_pretrained(model, **options)


def _dtype(given: Any) -> Any:
    name = str(given).removeprefix("torch.")
    dtype = name if name == "auto" else getattr(torch, name, None)
    if dtype != "auto" and not isinstance(dtype, torch.dtype):
        known = [*_DTYPES, "auto"]
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
        raise ConfigError(
            f"model_init_kwargs has dtype={given!r}; allowed: {', '.join(known)}; nearest valid: {nearest!r}"
        )
    return dtype


def auto_class(config: Any) -> Any:
    """The auto class of a checkpoint: with the vision part of the models that have one.

    A checkpoint of the language part alone names an architecture of its own.
    """
    kind = image_text_model_class(config)
    if kind is None or (config.architectures and kind.__name__ not in config.architectures):
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def load_processing_class(processing_class: Any, model: str | PreTrainedModel, config: Any) -> Any:
    """The tokenizer or processor, padding on the left, with a pad token."""
    if processing_class is None:
        name = model if isinstance(model, str) else name_or_path(model.config)
        if not name:
            raise ConfigError(
                f"processing_class is missing, and the {type(model).__name__} was not loaded from anywhere "
                "that could have a tokenizer; pass the tokenizer or processor as processing_class"
            )
        processing_class = AutoProcessor.from_pretrained(
            name, trust_remote_code=config.trust_remote_code, padding_side="left"
        )
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return processing_class


def disable_dropout(model: nn.Module) -> None:
    """Set the probability of every dropout to zero, also where attention keeps it as a plain number."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def cast_head_to_fp32(model: PreTrainedModel) -> None:
    """Keep the head's parameters, its inputs and its outputs in float32 (ScaleRL, section 3.2).

    A tied embedding shares the parameter, so its output is cast back to the dtype the rest of the model works
    in.
    """
    head, embedding = output_head(model), model.get_input_embeddings()
    activation_dtype = embedding.weight.dtype
    tied = head.weight is embedding.weight
    head.float()
    head.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))
    if tied:
        embedding.register_forward_hook(lambda _, __, output: output.to(activation_dtype))


def apply_peft(model: PreTrainedModel, peft_config: Any) -> PreTrainedModel:
    """Wrap the model in an adapter, if one is asked for.

    Raises:
        ConfigError: PEFT is missing, the model already has an adapter, or an adapter sits on the head.
    """
    if peft_config is not None:
        try:
            from peft import PeftModel, get_peft_model
        except ImportError as missing:
            raise ConfigError("peft_config needs PEFT: pip install 'groupwise[peft]'") from missing
        if isinstance(model, PeftModel):
            raise ConfigError(
                "peft_config was given for a model that already has an adapter; drop peft_config to continue "
                "that adapter, or merge it first (model = model.merge_and_unload())"
            )
        model = get_peft_model(model, peft_config)
    check_head(model)
    return model
