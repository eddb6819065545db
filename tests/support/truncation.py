"""Truncated distributions as scalar loops over plain floats; nothing of the package is imported."""

from __future__ import annotations

import math
from collections.abc import Sequence


def kept_by_top_p(logits: Sequence[float], temperature: float, top_p: float) -> list[int]:
    """Return the ids of the smallest set of most probable tokens with a mass of at least ``top_p``."""
    weights = [math.exp(value / temperature) for value in logits]
    mass, kept = 0.0, []
    for token in sorted(range(len(logits)), key=lambda j: -weights[j]):
        kept.append(token)
        mass += weights[token] / sum(weights)
        if mass >= top_p:
            break
    return sorted(kept)


def logp_and_entropy(
    logits: Sequence[float], temperature: float, kept: Sequence[int], target: int
) -> tuple[float, float]:
    """Return the log-prob of ``target`` and the entropy of softmax(logits / temperature) on ``kept``."""
    top = max(logits[v] / temperature for v in kept)
    log_sum = top + math.log(sum(math.exp(logits[v] / temperature - top) for v in kept))
    logps = {v: logits[v] / temperature - log_sum for v in kept}
    return logps[target], -sum(math.exp(logps[v]) * logps[v] for v in kept)


def slopes(
    logits: Sequence[float], temperature: float, kept: Sequence[int], target: int
) -> tuple[list[float], list[float]]:
    """Return the derivatives of both with respect to every logit.

    d logp / d z_j = ([j = a] - p_j) / T and d H / d z_j = -p_j (log p_j + H) / T on kept tokens, else 0.
    """
    d_logp, d_entropy = [0.0] * len(logits), [0.0] * len(logits)
    _, entropy = logp_and_entropy(logits, temperature, kept, target)
    for j in kept:
        logp_j, _ = logp_and_entropy(logits, temperature, kept, j)
        d_logp[j] = ((1.0 if j == target else 0.0) - math.exp(logp_j)) / temperature
        d_entropy[j] = -math.exp(logp_j) * (logp_j + entropy) / temperature
    return d_logp, d_entropy
