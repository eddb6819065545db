"""Parameters and logit transform of a language-model head, read from a model.

Axes: V vocabulary, H hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from groupwise.errors import ConfigError

_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_MULTIPLIED_BY_LOGITS_SCALING = {"hyperclovax"}
# MPT ignores the field; MiniCPM3 divides the hidden states before the head.
_FIELDS_NOT_FOR_LOGITS = {"mpt", "minicpm3"}


@dataclass(frozen=True)
class HeadWeights:
    """Parameters of the head and the model's transform of its logits.

    `logits = cap(scale * (h Wᵀ + b))`, where `cap(x) = softcap * tanh(x / softcap)` if there is a softcap.

    Args:
        weight_VH: projection, the live parameter (not a copy), or its sum with that of an adapter.
        bias_V: bias, or None.
        softcap: bound of the logits (Gemma 2, arXiv 2408.00118, section 2), or None.
        scale: factor of the logits, before the softcap.
        fp32: project in float32, for any dtype of weights and hidden states.
    """

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    fp32: bool = False

    def shape_logits(self, raw: torch.Tensor) -> torch.Tensor:
        """Apply the model's transform to the projection `raw` (any shape). Returns its shape and dtype."""
        scaled = raw * self.scale if self.scale != 1.0 else raw
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


def output_head(model: PreTrainedModel) -> nn.Linear:
    """Return the module that projects hidden states to logits, also of a PEFT model.

    A head in ``modules_to_save`` is the copy of the active adapter, or the original while adapters are
    disabled.

    Raises:
        ConfigError: the model has no such module.
    """
    head = _in_use(model.get_output_embeddings())
    if head is None or getattr(head, "weight", None) is None:
        raise ConfigError(
            f"{type(model).__name__} has no language-model head with a weight (get_output_embeddings() "
            f"returned {type(head).__name__}); pass a causal language model, as from AutoModelForCausalLM"
        )
    return cast(nn.Linear, head)


def _in_use(head: nn.Module | None) -> nn.Module | None:
    """Return the module that PEFT's wrapper of ``modules_to_save`` calls; other modules unchanged."""
    copies = getattr(head, "modules_to_save", None)
    if head is None or not isinstance(copies, nn.ModuleDict):
        return head
    active = cast("list[str]", head.active_adapters)
    if head.disable_adapters or not active or any(name not in copies for name in active):
        return cast(nn.Module, head.original_module)
    return copies[active[0]]


def changes_head(model: PreTrainedModel) -> bool:
    """Return True if a LoRA layer or trained rows change the head's weight; a trained copy has its own."""
    head = model.get_output_embeddings()
    return hasattr(head, "base_layer") or hasattr(head, "token_adapter")


def is_tied(model: PreTrainedModel) -> bool:
    """Return True if the head in use computes with the embeddings' matrix, and adapters change both alike."""
    return _matrix(model.get_input_embeddings()) == _matrix(model.get_output_embeddings())


def _matrix(module: nn.Module | None) -> tuple[int, int]:
    """Return ids of the weight that a module in use computes with, and of the adapter that changes it."""
    used = _in_use(module)
    layer: Any = getattr(used, "token_adapter", used)
    adapter = None if not hasattr(layer, "base_layer") else getattr(layer, "tied_adapter", None) or layer
    return id(getattr(layer, "base_layer", layer).weight), id(adapter)


def check_head(model: PreTrainedModel) -> None:
    """Raise an error if an adapter changes the head otherwise than by adding to or replacing its weight.

    Raises:
        ConfigError: such an adapter; the message names its setting.
    """
    head = model.get_output_embeddings()
    if not changes_head(model):
        return
    from groupwise.compat.peft import head_adapter_problem

    problem = head_adapter_problem(head)
    if not problem:
        return
    path = next((name for name, module in model.named_modules() if module is head), "lm_head")
    name = path.rpartition(".")[2]
    raise ConfigError(
        f"the adapter of the language-model head {path!r} has {problem}, but log-probs are computed from "
        "the weight of the base plus the product of the adapter: use plain LoRA there, drop "
        f'{name!r} from target_modules of the PEFT config (target_modules="all-linear" excludes the head), '
        f'or set modules_to_save=["{name}"]'
    )


def head_weights(model: PreTrainedModel, fp32: bool = False) -> HeadWeights:
    """Read a causal language model's head: its live parameters with those of an adapter, scale and softcap.

    Raises:
        ConfigError: the model has no head, or an adapter changes it in another way.
    """
    check_head(model)
    head = output_head(model)
    config = model.config.get_text_config(decoder=True)
    weight_VH, bias_V = head.weight, cast("torch.Tensor | None", getattr(head, "bias", None))
    if changes_head(model):
        from groupwise.compat.peft import head_parameters

        weight_VH, bias_V = head_parameters(head)
    return HeadWeights(
        weight_VH=weight_VH,
        bias_V=bias_V,
        softcap=getattr(config, "final_logit_softcapping", None),
        scale=_logit_factor(config),
        fp32=fp32,
    )


def _logit_factor(config: PretrainedConfig) -> float:
    """Return the product of all factors that the architecture applies to its logits."""
    if config.model_type in _FIELDS_NOT_FOR_LOGITS:
        return 1.0
    factors = [float(value) for name in _MULTIPLIERS if (value := getattr(config, name, None)) is not None]
    scaling = getattr(config, "logits_scaling", None)
    if scaling is not None:
        factors.append(float(scaling) if config.model_type in _MULTIPLIED_BY_LOGITS_SCALING else 1 / scaling)
    return math.prod(factors)
