"""Log-prob heads by name: the chunked one, and a reference that materializes all logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from groupwise.policy.heads.chunked import chunked_head
from groupwise.policy.heads.dense import logps_from_logits, projection_dtype, statistics_dtype
from groupwise.policy.heads.weights import HeadWeights
from groupwise.records.sampling_mask import SamplingMask


def dense_head(
    hidden_NH: torch.Tensor,
    head: HeadWeights,
    targets_N: torch.Tensor,
    temperature: float = 1.0,
    with_entropy: bool = True,
    *,
    kept: SamplingMask | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute log-probs and entropy from hidden states, with all N x V logits in memory.

    Args:
        hidden_NH: final hidden states, one row per predicted token.
        head: projection and logit transform.
        targets_N: token ids in [0, V).
        temperature: positive divisor of the logits, applied after the model's own scale and softcap.
        with_entropy: also return the entropy.
        kept: tokens of the truncated distribution at each of the N positions; None: all tokens.

    Returns:
        Log-probs and entropy (or None), shape (N,), float32 (float64 for float64 hidden states), in nats.
    """
    dtype = projection_dtype(hidden_NH, head.fp32)
    bias_V = None if head.bias_V is None else head.bias_V.to(dtype)
    with torch.autocast(hidden_NH.device.type, enabled=False):
        # The logits are no variable here: a second reference would keep them while the entropy is computed.
        return logps_from_logits(
            head.shape_logits(
                F.linear(hidden_NH.to(dtype), head.weight_VH.to(dtype), bias_V).to(statistics_dtype(dtype))
            ),
            targets_N,
            temperature,
            with_entropy,
            kept,
        )


HEADS = {"dense": dense_head, "chunked": chunked_head}
