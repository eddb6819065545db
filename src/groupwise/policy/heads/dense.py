"""Log-probs and entropy from materialized logits; precision of the projection and of the statistics.

Axes: N rows (one predicted token each), V vocabulary.
"""

from __future__ import annotations

import torch

from groupwise.records.sampling_mask import EXCLUDED_LOGIT, SamplingMask, SamplingMaskTiles


def projection_dtype(hidden: torch.Tensor, fp32: bool) -> torch.dtype:
    """Return the dtype of the projection: float32 if ``fp32``, else autocast's, else the hidden states'."""
    if hidden.dtype == torch.float64:
        return torch.float64
    if fp32:
        return torch.float32
    device_type = hidden.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of logits, log-probs and entropy: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def logps_from_logits(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float = 1.0,
    with_entropy: bool = True,
    kept: SamplingMask | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the log-prob of each target and the entropy of softmax(logits / temperature).

    Args:
        logits_NV: finite logits, any float dtype; any number of leading axes, equal to those of `targets_N`.
        targets_N: token ids in [0, V).
        temperature: positive divisor of the logits.
        with_entropy: also return `-Σ p log p`, in nats.
        kept: tokens of the truncated distribution at each position, in row-major order; None: all tokens.

    Returns:
        Log-probs and entropy (or None), shaped like `targets_N`, float32 (float64 for float64 logits).
    """
    logits_NV = logits_NV.to(statistics_dtype(logits_NV.dtype))
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    if kept is not None:
        tiles = SamplingMaskTiles.on(logits_NV.device, kept)
        mask_NV = tiles.tile(slice(0, len(kept)), slice(0, logits_NV.shape[-1]))
        logits_NV = logits_NV.masked_fill(~mask_NV.view(logits_NV.shape), EXCLUDED_LOGIT)
    all_logps_NV = torch.log_softmax(logits_NV, dim=-1)
    del logits_NV  # frees N x V values before the entropy allocates as many
    logps_N = all_logps_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)
    return logps_N, -(all_logps_NV.exp() * all_logps_NV).sum(-1) if with_entropy else None
