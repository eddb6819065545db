"""Questions about a model: what it is below wrappers and adapters, and what it supports."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

from torch import nn
from transformers import PreTrainedModel

#: Causal language model, plain or PEFT; transformers has no type for it.
CausalLM: TypeAlias = Any


def without_adapter(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model below a PEFT adapter, or ``model`` itself."""
    return cast(PreTrainedModel, getattr(model, "get_base_model", lambda: model)())
