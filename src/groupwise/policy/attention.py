"""A door for our own attention in stock transformers models.

A model whose implementation is ``IMPLEMENTATION`` computes exactly what it computes with "sdpa", except in
a forward that is given ``attend=...``: then that callable replaces the attention of every layer. It travels
as an argument of the forward, not as state, because gradient checkpointing calls the layers again in the
backward.

Axes: B sequences, H query heads, K key-value heads, T queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from groupwise.compat.transformers import (
    attention_implementation,
    sdpa_attention_forward,
    supports_attention_interface,
)

IMPLEMENTATION = "groupwise_sdpa"

#: Of transformers: in one row without a mask they tell sequences apart by positions that restart.
BY_POSITION = ("flash_attention_2", "flash_attention_3", "flex_attention")

#: ``(query_BHTD, key_BKSD, value_BKSD, scale, window) -> (B, T, H, D)``; the window is the number of keys
#: seen, or None. One with an attribute ``mask`` need not serve every layer: those that make a mask of their
#: own of it, or ask for what it does not know, keep the attention they have.
Attend = Callable[..., torch.Tensor]


def install_attention_hook(model: Any) -> bool:
    """Let forwards of ``model`` take ``attend=``; False, and nothing changed, where that cannot be right.

    It takes an architecture that uses transformers' attention interface with "sdpa".
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if attention_implementation(base) == IMPLEMENTATION:
        return True
    if attention_implementation(base) != "sdpa" or not supports_attention_interface(base):
        return False
    _register()
    base.set_attn_implementation(IMPLEMENTATION)
    return True


def has_varlen_attention(model: Any) -> bool:
    """Whether the attention that ``model`` was loaded with keeps sequences of one row apart by itself."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    known = attention_implementation(base) in BY_POSITION
    return known and supports_attention_interface(base)


@contextmanager
def own_attention_closed(model: Any) -> Iterator[None]:
    """A context in which ``model`` has the plain "sdpa", for what knows implementations by name."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    is_open = attention_implementation(base) == IMPLEMENTATION
    if is_open:
        base.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if is_open:
            base.set_attn_implementation(IMPLEMENTATION)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    attend: Attend | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls; what "sdpa" ignores (a softcap of the scores) is ignored here too."""
    unknown = [name for name in ("position_bias", "s_aux") if kwargs.get(name) is not None]
    own_mask = attention_mask is not getattr(attend, "mask", attention_mask)
    if attend is None or own_mask or (unknown and hasattr(attend, "mask")):
        return sdpa_attention_forward()(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if dropout or unknown:
        raise NotImplementedError(f"attention with {', '.join(unknown) or 'dropout'}")
    return attend(query, key, value, scaling, kwargs.get("sliding_window")), None


def grouped_query_attention(
    query_BHTD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSD: torch.Tensor,
    mask_B1TS: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Masked attention with H / K query heads to a key-value head, whose keys are not copied: (B, H, T, D).

    The query heads of a key-value head become further queries of it, so that every fused kernel takes the
    mask; None is causal attention over T = S.
    """
    batch, heads, width, size = query_BHTD.shape
    kv_heads = key_BKSD.shape[1]
    if mask_B1TS is None:
        return scaled_dot_product_attention(
            query_BHTD, key_BKSD, value_BKSD, scale=scale, is_causal=True, enable_gqa=heads != kv_heads
        )
    per_head = heads // kv_heads
    folded = query_BHTD.reshape(batch, kv_heads, per_head * width, size)
    mask = mask_B1TS.repeat(1, 1, per_head, 1)
    out = scaled_dot_product_attention(folded, key_BKSD, value_BKSD, attn_mask=mask, scale=scale)
    return out.view(batch, heads, width, size)
