"""Multinomial sampling from a large vocabulary: on a CPU, and without a wait on other devices.

Axes: R rows, V vocabulary, N blocks of it, W tokens of a block.
"""

from __future__ import annotations

import math

import torch

from groupwise.errors import BackendError

#: Token of a row whose logits are NaN or infinite.
NO_TOKEN = -1
INVALID_LOGITS = "the policy's logits are NaN or infinite, so no token can be sampled; check its weights"


def multinomial(probabilities_RV: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Sample one token per row: a block of the vocabulary first, then a token of the block.

    ``torch.multinomial`` draws a random number per token of the vocabulary, sequentially on a CPU: a quarter
    of a decoding step. Here a row takes two random numbers, and float64 cumulative sums of its block sums and
    of one block only (of whole rows they cost several times the softmax).

    Returns:
        (R,) token ids.

    Raises:
        BackendError: a row contains NaN.
    """
    size = math.gcd(probabilities_RV.shape[1], 256)
    blocks_RNW = probabilities_RV.unflatten(1, (-1, size))
    sums_RN = blocks_RNW.sum(-1)
    if sums_RN.isnan().any():
        raise BackendError(INVALID_LOGITS)
    block_R = _inverse_cdf(sums_RN, generator)
    rows_R = torch.arange(len(block_R), device=block_R.device)
    return block_R * size + _inverse_cdf(blocks_RNW[rows_R, block_R], generator)


def unchecked_multinomial(
    probabilities_RV: torch.Tensor, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Sample one token per row as ``torch.multinomial``, which also waits for two checks: (R,).

    For other devices than a CPU. Changes ``probabilities_RV``; a row with NaN gets ``NO_TOKEN``.
    """
    noise_RV = torch.empty_like(probabilities_RV).exponential_(generator=generator)
    noise_RV.clamp_(min=torch.finfo(noise_RV.dtype).tiny)  # 0 / 0 would be a token without probability
    best_R, tokens_R = probabilities_RV.div_(noise_RV).max(-1)  # argmax p / Exp(1)
    return tokens_R.masked_fill(best_R.isnan(), NO_TOKEN)


def _inverse_cdf(weights_RN: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Sample an index per row, in proportion to its weights, from one uniform random number per row: (R,)."""
    sums_RN = weights_RN.cumsum(-1, dtype=torch.float64)
    total_R1 = sums_RN[:, -1:]
    uniform_R1 = torch.rand(total_R1.shape, dtype=total_R1.dtype, generator=generator) * total_R1
    # Rounding may give the total itself, which would be past the last index. With right=True an index of
    # weight zero is never the first whose cumulative sum exceeds the number.
    below_R1 = torch.nextafter(total_R1, torch.zeros_like(total_R1))
    return torch.searchsorted(sums_RN, torch.minimum(uniform_R1, below_R1), right=True).squeeze(1)
