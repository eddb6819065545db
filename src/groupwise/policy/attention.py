"""Attention hook for stock transformers models.

A model whose attention implementation is ``IMPLEMENTATION`` computes exactly the results of "sdpa", except in
a forward pass with the argument ``attention_function``, which replaces the attention of every layer. The
function is an argument and not state of the model, because gradient checkpointing calls the layers again in
the backward pass.

Axes: B sequences, H query heads, J key-value heads, Q queries, K keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from groupwise.compat.torch import has_fused_gqa
from groupwise.compat.transformers import (
    attention_implementation,
    is_flash_attention,
    supports_attention_interface,
)
from groupwise.policy.introspection import without_adapter

IMPLEMENTATION = "groupwise_sdpa"

#: ``(query_BHQD, key_BJKD, value_BJKD, scale, sliding_window) -> (B, Q, H, D)``; ``sliding_window`` is the
#: number of visible keys, or None. A function with the attribute ``mask`` replaces only layers that receive
#: this mask unchanged and need no position bias or sinks; all other layers keep "sdpa".
AttentionFunction = Callable[..., torch.Tensor]


def install_attention_hook(model: nn.Module) -> bool:
    """Make forward passes of ``model`` accept ``attention_function=``.

    Returns:
        True if the hook is installed; False, with the model unchanged, unless the architecture uses
        transformers' attention interface with "sdpa".
    """
    base = without_adapter(model)
    if attention_implementation(base) == IMPLEMENTATION:
        return True
    if attention_implementation(base) != "sdpa" or not supports_attention_interface(base):
        return False
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    base.set_attn_implementation(IMPLEMENTATION)
    return True


def supports_packing(model: nn.Module, *, shared: bool) -> bool:
    """Return True if the model's attention can separate packed sequences; installs the hook if possible.

    Flash and flex attention separate them through ``position_ids``: in one row without a mask, a sequence
    begins where the positions restart.

    Args:
        shared: with prompts that are computed once per group, which only the hook can separate.
    """
    base = without_adapter(model)
    by_position = is_flash_attention(base) or attention_implementation(base) == "flex_attention"
    by_position = by_position and supports_attention_interface(base)
    return install_attention_hook(model) or (by_position and not shared)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    attention_function: AttentionFunction | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention function registered with transformers; like "sdpa" it ignores a softcap of the scores."""
    unknown = [name for name in ("position_bias", "s_aux") if kwargs.get(name) is not None]
    own_mask = attention_mask is not getattr(attention_function, "mask", attention_mask)
    if attention_function is None or own_mask or (unknown and hasattr(attention_function, "mask")):
        queries, keys = query.shape[2], key.shape[2]
        if attention_mask is None and 1 < queries < keys:  # of the last tokens: sdpa aligns them at the first
            attention_mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(
                keys - queries
            )
        return AttentionInterface()["sdpa"](
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if dropout or unknown:
        raise NotImplementedError(f"attention_function with {', '.join(unknown) or 'dropout'}")
    return attention_function(query, key, value, scaling, _sliding_window(module, kwargs)), None


def _sliding_window(module: nn.Module, kwargs: dict[str, object]) -> int | None:
    """Return the number of visible keys of a layer; Qwen2-MoE and PhiMoE pass it in the mask alone."""
    config: Any = module.config
    kinds = getattr(config, "layer_types", None)  # None: all layers are alike
    if "sliding_window" in kwargs or (kinds and kinds[cast(int, module.layer_idx)] != "sliding_attention"):
        return cast("int | None", kwargs.get("sliding_window"))
    return getattr(config, "sliding_window", None)


def grouped_query_attention(
    query_BHQD: torch.Tensor,
    key_BJKD: torch.Tensor,
    value_BJKD: torch.Tensor,
    mask_B1GK: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute masked attention with H / J query heads per key-value head, in a fused kernel.

    With a mask, the query heads of a key-value head are reshaped to further queries of it, so that every
    kernel accepts them. Without one, keys are copied only where no kernel takes groups of heads.

    Args:
        query_BHQD, key_BJKD, value_BJKD: projections.
        mask_B1GK: 0 or -inf, with H / J · Q queries; None: causal attention with Q = K.
        scale: factor of the scores; None: 1 / sqrt(D).

    Returns:
        (B, H, Q, D of the values), dtype of the query.
    """
    batch, heads, length, size = query_BHQD.shape
    kv_heads = key_BJKD.shape[1]
    if mask_B1GK is None:
        dtype = attention_dtype(query_BHQD)  # as sdpa would: it decides which kernels take the tensors
        query_BHQD, key_BJKD, value_BJKD = (x.to(dtype) for x in (query_BHQD, key_BJKD, value_BJKD))
        if heads != kv_heads and not has_fused_gqa(query_BHQD, key_BJKD, value_BJKD):
            # Memory-efficient attention, for float32 and GPUs before Ampere, takes no groups of heads.
            key_BJKD, value_BJKD = (x.repeat_interleave(heads // kv_heads, 1) for x in (key_BJKD, value_BJKD))
            kv_heads = heads
        return scaled_dot_product_attention(
            query_BHQD, key_BJKD, value_BJKD, scale=scale, is_causal=True, enable_gqa=heads != kv_heads
        )
    grouped = query_BHQD.reshape(batch, kv_heads, -1, size)  # (B, J, H / J · Q, D)
    out = scaled_dot_product_attention(grouped, key_BJKD, value_BJKD, attn_mask=mask_B1GK, scale=scale)
    return out.view(batch, heads, length, -1)  # values may be narrower than keys: latent attention


def attention_dtype(query_BHQD: torch.Tensor) -> torch.dtype:
    """Return the dtype that attention is computed in: that of autocast where it is on."""
    device = query_BHQD.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query_BHQD.dtype
