"""Multinomial sampling from a large vocabulary: on a CPU, and without a wait on other devices.

Axes: R rows, V vocabulary, N blocks of it, W tokens of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch

from groupwise.errors import BackendError

#: Token of a row whose logits are NaN or infinite.
NO_TOKEN = -1
INVALID_LOGITS = "the policy's logits are NaN or infinite, so no token can be sampled; check its weights"

#: Uniform random numbers: a generator (None: torch's global one), or a function that returns (R, 1).
Draws: TypeAlias = "torch.Generator | Callable[[], torch.Tensor] | None"


class RowStreams:
    """Uniform random numbers of rows: a function of a row's seed and of how many it has drawn (SplitMix64).

    They do not depend on the other rows of the batch. The seeds of rows may be consecutive numbers.

    Args:
        seeds: of B rows, below 2**63.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.seeds_B = torch.tensor(seeds, dtype=torch.int64, device=device)
        self.num_drawn = 0

    def draw(self, rows_R: torch.Tensor | None = None) -> torch.Tensor:
        """Return the next number below 1 of each row, of all by default: (R, 1) of :func:`_sum_dtype`."""
        self.num_drawn += 1
        seeds_R = self.seeds_B if rows_R is None else self.seeds_B[rows_R]
        bits_R = seeds_R + _int64(0x9E3779B97F4A7C15 * self.num_drawn)  # int64 wraps around
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits_R = (bits_R ^ _shifted(bits_R, shift)) * _int64(factor)
        dtype = _sum_dtype(bits_R)
        digits = 53 if dtype == torch.float64 else 24
        bits_R = _shifted(bits_R ^ _shifted(bits_R, 31), 64 - digits)
        return bits_R.to(dtype).unsqueeze(1) * 2.0**-digits

    def sample(self, probabilities_RV: torch.Tensor, rows_R: torch.Tensor | None = None) -> torch.Tensor:
        """Sample one token of each row: (R,); see :func:`multinomial`."""
        return multinomial(probabilities_RV, partial(self.draw, rows_R))


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift to the right without the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def multinomial(probabilities_RV: torch.Tensor, draws: Draws = None) -> torch.Tensor:
    """Sample one token per row: a block of the vocabulary first, then a token of the block.

    ``torch.multinomial`` draws a random number per token of the vocabulary, sequentially on a CPU: a quarter
    of a decoding step. Here a row takes two random numbers, and float64 cumulative sums of its block sums and
    of one block only (of whole rows they cost several times the softmax).

    Returns:
        (R,) token ids; ``NO_TOKEN`` for a row with NaN on other devices than a CPU.

    Raises:
        BackendError: a row on a CPU contains NaN.
    """
    size = math.gcd(probabilities_RV.shape[1], 256)
    blocks_RNW = probabilities_RV.unflatten(1, (-1, size))
    sums_RN = blocks_RNW.sum(-1)
    invalid_R = sums_RN.isnan().any(-1)
    if invalid_R.device.type == "cpu" and invalid_R.any():
        raise BackendError(INVALID_LOGITS)
    block_R = _inverse_cdf(sums_RN, draws).clamp(max=sums_RN.shape[1] - 1)  # beyond it: NaN
    rows_R = torch.arange(len(block_R), device=block_R.device)
    tokens_R = block_R * size + _inverse_cdf(blocks_RNW[rows_R, block_R], draws)
    return tokens_R.masked_fill(invalid_R, NO_TOKEN)


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


def _sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return float64, but float32 on other devices than a CPU: some lack it, and all are slow in it."""
    return torch.float64 if tensor.device.type == "cpu" else torch.float32


def _inverse_cdf(weights_RN: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Sample an index per row, in proportion to its weights, from one uniform random number per row: (R,)."""
    sums_RN = weights_RN.cumsum(-1, dtype=_sum_dtype(weights_RN))
    total_R1 = sums_RN[:, -1:]
    rand = partial(torch.rand, total_R1.shape, dtype=total_R1.dtype)
    drawn_R1 = draws() if callable(draws) else rand(generator=draws)
    uniform_R1 = drawn_R1 * total_R1
    # Rounding may give the total itself, which would be past the last index. With right=True an index of
    # weight zero is never the first whose cumulative sum exceeds the number.
    below_R1 = torch.nextafter(total_R1, torch.zeros_like(total_R1))
    return torch.searchsorted(sums_RN, torch.minimum(uniform_R1, below_R1), right=True).squeeze(1)
