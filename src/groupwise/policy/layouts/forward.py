"""One forward of a causal LM that returns log-probs of given tokens instead of logits."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel

from groupwise.policy.heads import HEADS, head_weights, logps_from_logits
from groupwise.policy.heads.capture import Head, score_at_head


@dataclass(frozen=True)
class HeadSettings:
    """How hidden states become log-probs.

    name: "dense" takes the model's own logits; every other name in ``HEADS``, or a function like those there,
        replaces the output layer.
    temperature: divisor of the logits.
    fp32: project in float32.
    """

    name: str | Head = "chunked"
    temperature: float = 1.0
    fp32: bool = False


def score_forward(
    model: torch.nn.Module,
    inputs: dict[str, Any],
    targets_BK: torch.Tensor,
    head: HeadSettings,
    *,
    with_entropy: bool,
    with_aux_loss: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Log-probs and entropies at the K positions that ``inputs`` keep, and the balancing loss of experts.

    The model is called, not its parts, so that wrappers (DDP, accelerate, DeepSpeed) see every forward pass.

    Args:
        model: the causal LM, wrapped or not.
        inputs: arguments of its forward.
        targets_BK: the token predicted at each kept position.

    Returns:
        log-probs (B, K) and entropies (B, K), float32, and a scalar; the latter two are None unless asked
        for.
    """
    inputs = {**inputs, "use_cache": False}
    if with_aux_loss:
        inputs["output_router_logits"] = True
    if head.name == "dense":
        output = model(**inputs)
        logps, entropy = logps_from_logits(output.logits, targets_BK, head.temperature, with_entropy)
    else:
        inner = unwrapped(model)
        weights = head_weights(inner, fp32=head.fp32)
        function = HEADS[head.name] if isinstance(head.name, str) else head.name
        with score_at_head(inner, function, weights, targets_BK, head.temperature, with_entropy) as captured:
            output = model(**inputs)
        logps, entropy = captured.read(output.logits)
    return logps, entropy, output.aux_loss if with_aux_loss else None


def unwrapped(model: Any) -> Any:
    """The model below DDP, compilation and the like; mixed precision stays."""
    return extract_model_from_parallel(model, keep_torch_compile=False)


def base_model(model: Any) -> Any:
    """The causal LM below wrappers and adapters."""
    inner = unwrapped(model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def accepted_arguments(model: Any) -> set[str]:
    """Parameter names of the causal LM's own forward."""
    return set(inspect.signature(type(base_model(model)).forward).parameters)


def has_own_positions(model: Any) -> bool:
    """Whether the model itself finds the positions of image tokens, in more than one dimension."""
    base = base_model(model)
    return hasattr(getattr(base, "model", base), "get_rope_index")


def takes_text_alone(model: Any) -> bool:
    """Whether the model has no other part than that which reads tokens."""
    config = base_model(model).config
    return config.get_text_config(decoder=True) is config
