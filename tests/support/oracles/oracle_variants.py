"""GSPO-token, GMPO, DPPO, ScaleRL and MaxRL as scalar loops over plain floats, from the papers.

Derivatives are worked out by hand; nothing of the package is imported.
"""

from __future__ import annotations

import math

from support.oracles.oracle import Batch, Choices, Rows, loss_tokens, surrogate

Value = tuple[float, Rows]


def gspo_token(batch: Batch, weights: Rows, c: Choices) -> Value:
    """s_it = sg[s_i] π/sg[π] has the value s_i and the derivative s_i with respect to ℓ_it alone."""
    loss, gradient = 0.0, zeros(batch)
    for i, (lp, old, m) in enumerate(zip(batch.logps, batch.old_rows(), batch.mask, strict=True)):
        active = loss_tokens(m)
        s = math.exp(sum(lp[t] - old[t] for t in active) / max(len(active), 1))
        for t in active:
            value, d_rho, _ = surrogate("clipped", s, batch.advantages[i][t], lp[t], 0.0, c)
            loss += weights[i][t] * value
            gradient[i][t] += weights[i][t] * d_rho * s
    return loss, gradient


def gmpo(batch: Batch, sequences: int, epsilon_low: float, epsilon_high: float) -> Value:
    """−1/N Σ_i A_i exp( 1/|o_i| Σ_t min or max(log ρ_it, bound) ), for one advantage per sequence."""
    loss, gradient = 0.0, zeros(batch)
    for i, (lp, old, m) in enumerate(zip(batch.logps, batch.old_rows(), batch.mask, strict=True)):
        active, a = loss_tokens(m), batch.advantages[i][0]
        if not active:
            continue
        total, free = 0.0, []
        for t in active:
            log_rho = lp[t] - old[t]
            bounded = min(log_rho, epsilon_high) if a > 0 else max(log_rho, -epsilon_low)
            total += bounded
            if bounded == log_rho:
                free.append(t)
        mean = math.exp(total / len(active))
        loss -= a * mean / sequences
        for t in free:
            gradient[i][t] -= a * mean / len(active) / sequences
    return loss, gradient


def dppo(batch: Batch, weights: Rows, delta_low: float, delta_high: float) -> Value:
    """−M (π/μ) A, M = 0 where A > 0 and π − μ > δ_high, or A < 0 and μ − π > δ_low; μ is the sampler."""
    loss, gradient = 0.0, zeros(batch)
    for i, (lp, old, m) in enumerate(zip(batch.logps, batch.old_rows(), batch.mask, strict=True)):
        for t in loss_tokens(m):
            a, mu = batch.advantages[i][t], old[t]
            if batch.sampler is not None and math.isfinite(batch.sampler[i][t]):
                mu = batch.sampler[i][t]
            shift = math.exp(lp[t]) - math.exp(mu)
            if (a > 0 and shift > delta_high) or (a < 0 and -shift > delta_low):
                continue
            ratio = math.exp(lp[t] - mu)
            loss -= weights[i][t] * ratio * a
            gradient[i][t] -= weights[i][t] * ratio * a
    return loss, gradient


def prompt_mean(masks: list[list[Rows]], groups: list[list[list[int]]]) -> list[list[Rows]]:
    """Weights of one update for ``masks[rank][micro-batch]``: a mean over tokens, then over prompts."""
    tokens: dict[int, float] = {}
    for mask_rank, group_rank in zip(masks, groups, strict=True):
        for mask, group in zip(mask_rank, group_rank, strict=True):
            for row, g in zip(mask, group, strict=True):
                tokens[g] = tokens.get(g, 0.0) + sum(row)
    return [
        [
            [[x / (len(tokens) * max(tokens[g], 1)) for x in row] for row, g in zip(mask, group, strict=True)]
            for mask, group in zip(mask_rank, group_rank, strict=True)
        ]
        for mask_rank, group_rank in zip(masks, groups, strict=True)
    ]


def maxrl(rewards: list[float | None], size: int) -> list[float]:
    """(r − mean) / mean within each group of ``size``; 0 without a reward and where nothing succeeded."""
    out = []
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        known = [r for r in group if r is not None]
        mean = sum(known) / len(known) if known else 0.0
        out += [0.0 if r is None or mean == 0 else (r - mean) / mean for r in group]
    return out


def zeros(batch: Batch) -> Rows:
    return [[0.0] * len(row) for row in batch.logps]
