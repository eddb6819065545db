"""One forward pass of a causal LM that computes log-probs of given tokens instead of logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from groupwise.policy.heads import HEADS, head_weights, logps_from_logits
from groupwise.policy.heads.capture import HeadComputation, Outputs, compute_at_head, logprob_computation
from groupwise.policy.introspection import unwrapped
from groupwise.records.sampling_mask import SamplingMask

#: Arguments of a causal LM's forward.
ModelInputs = dict[str, Any]


@dataclass(frozen=True)
class HeadSettings:
    """Settings of the log-prob head.

    name: key of ``HEADS``; "dense" uses the model's own logits, "chunked" replaces the output projection.
    temperature: divisor of the logits.
    fp32: project in float32.
    """

    name: str = "chunked"
    temperature: float = 1.0
    fp32: bool = False


def forward_logprobs(
    model: nn.Module,
    inputs: ModelInputs,
    targets_BK: torch.Tensor,
    head: HeadSettings,
    *,
    with_entropy: bool,
    with_aux_loss: bool = False,
    kept: SamplingMask | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Compute log-probs and entropies at the K positions that ``inputs["logits_to_keep"]`` selects.

    The model is called as a whole, so that wrappers (DDP, accelerate, DeepSpeed) see every forward pass.

    Args:
        model: the causal LM, wrapped or not.
        inputs: arguments of its forward.
        targets_BK: the token predicted at each kept position, int64.
        with_aux_loss: also return the balancing loss of a mixture-of-experts model.
        kept: tokens of the truncated distribution at the B · K positions; None: all tokens.

    Returns:
        log-probs (B, K) and entropies (B, K), float32, and the balancing loss, a scalar; the latter two are
        None unless requested.
    """
    if head.name == "dense":
        output = model(**_arguments(inputs, with_aux_loss))
        logps, entropy = logps_from_logits(output.logits, targets_BK, head.temperature, with_entropy, kept)
        return logps, entropy, output.aux_loss if with_aux_loss else None
    compute = logprob_computation(HEADS[head.name], targets_BK, head.temperature, with_entropy, kept)
    outputs, aux_loss = forward_at_head(model, inputs, head, compute, with_aux_loss=with_aux_loss)
    return cast(torch.Tensor, outputs[0]), outputs[1], aux_loss


def forward_at_head(
    model: nn.Module,
    inputs: ModelInputs,
    head: HeadSettings,
    compute: HeadComputation,
    *,
    with_aux_loss: bool = False,
) -> tuple[Outputs, torch.Tensor | None]:
    """Run one forward pass in which the head runs ``compute`` on the hidden states of the kept positions.

    Args:
        model, inputs, with_aux_loss: as in :func:`forward_logprobs`.
        head: settings of the head; the precision is read.
        compute: function of the hidden states (B, K, H) and the head's weights.

    Returns:
        outputs of ``compute``, differentiable, and the balancing loss or None.
    """
    inner = unwrapped(model)
    with compute_at_head(inner, head_weights(inner, fp32=head.fp32), compute) as captured:
        output = model(**_arguments(inputs, with_aux_loss))
    return captured.read(output.logits), output.aux_loss if with_aux_loss else None


def _arguments(inputs: ModelInputs, with_aux_loss: bool) -> ModelInputs:
    return {**inputs, "use_cache": False, **({"output_router_logits": True} if with_aux_loss else {})}


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context manager that disables dropout and restores the mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
