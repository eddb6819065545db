"""The loss family as scalar loops over plain floats, from the papers; nothing of the package is imported.

Tensors are lists of rows. Derivatives are worked out by hand: a token's loss is a function of its ratio ρ and
of its log-prob ℓ, so a term returns (value, d/dρ, d/dℓ); the chain rule through ρ comes once, at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Rows = list[list[float]]

NORMALISER_OF = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "bnpo": "local_token_mean",
    "dr_grpo": "constant_length",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "vespo": "token_mean",
    "luspo": "sequence_sum",
}
SURROGATE_OF = dict.fromkeys(("grpo", "bnpo", "dr_grpo", "dapo", "luspo"), "clipped") | {
    "cispo": "cispo",
    "sapo": "sapo",
    "vespo": "vespo",
}


@dataclass(frozen=True)
class Choices:
    """Everything one chooses besides the name of the objective."""

    level: str = "token"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.28
    delta: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0
    beta: float = 0.0
    kl: str = "k3"
    kl_in_loss: bool = True
    bias_correction: bool = False
    threshold: float | None = None
    mode: str | None = None
    c_min: float | None = None
    c_max: float | None = None


@dataclass(frozen=True)
class Batch:
    """Rows of B sequences by T tokens; ``old`` None means exactly on-policy."""

    logps: Rows
    advantages: Rows
    mask: Rows
    old: Rows | None = None
    ref: Rows | None = None
    sampler: Rows | None = None
    keep: Rows | None = None

    def old_rows(self) -> Rows:
        return self.logps if self.old is None else self.old


def clip(x: float, low: float, high: float) -> float:
    return low if x < low else high if x > high else x


def loss_tokens(mask_row: list[float]) -> list[int]:
    return [t for t, m in enumerate(mask_row) if m]


def finite_or_zero(x: float) -> float:
    return x if math.isfinite(x) else 0.0


def ratios(batch: Batch, level: str) -> Rows:
    """ρ_it on loss tokens, 1 elsewhere."""
    out = []
    for lp, old, m in zip(batch.logps, batch.old_rows(), batch.mask, strict=True):
        active = loss_tokens(m)
        row = [1.0] * len(lp)
        mean = sum(lp[t] - old[t] for t in active) / max(len(active), 1)
        for t in active:
            row[t] = math.exp(mean if level == "sequence" else lp[t] - old[t])
        out.append(row)
    return out


def corrections(batch: Batch, c: Choices) -> tuple[Rows, list[float]]:
    """Per token the factor of the surrogate, and per sequence the sum of its logs that VESPO folds into w."""
    factors, folded = [], []
    for old, samp, m in zip(batch.old_rows(), batch.sampler, batch.mask, strict=True):
        active = loss_tokens(m)
        gaps = {t: finite_or_zero(old[t] - samp[t]) for t in active}
        row, logs = [1.0] * len(old), 0.0
        if c.mode.startswith("sequence"):
            factor = bounded(math.exp(sum(gaps.values())), c)
            row = [factor] * len(old)
            logs = bounded_log(factor)
        else:
            for t in active:
                row[t] = bounded(math.exp(gaps[t]), c)
                logs += bounded_log(row[t])
        factors.append(row)
        folded.append(logs)
    return factors, folded


def bounded(factor: float, c: Choices) -> float:
    low = -math.inf if c.c_min is None else c.c_min
    high = math.inf if c.c_max is None else c.c_max
    if c.mode.endswith("truncate"):
        return clip(factor, low, high)
    return factor if low <= factor <= high else 0.0


def bounded_log(factor: float) -> float:
    """A masked factor is 0, and log 0 must stay a number: bounded like w itself, to [1e-8, e^20]."""
    return clip(math.log(max(factor, 1e-300)), math.log(1e-8), 20.0)


def gamma_gate(lp, old, active, advantage, folded_log, c: Choices) -> float:
    """φ(w) = e^λ w^k e^{−λw}."""
    log_w = sum(clip(lp[t] - old[t], -20.0, 20.0) for t in active) + folded_log
    w = math.exp(clip(log_w, math.log(1e-8), 20.0))
    k, lam = (c.k_pos, c.lambda_pos) if advantage >= 0 else (c.k_neg, c.lambda_neg)
    return math.exp(lam) * w**k * math.exp(-lam * w)


def surrogate(
    kind: str, rho: float, a: float, lp: float, gate: float, c: Choices
) -> tuple[float, float, float]:
    """(value, d/dρ, d/dℓ) of one token."""
    if kind == "cispo":
        weight = min(rho, c.epsilon_high)
        return -weight * a * lp, 0.0, -weight * a
    if kind == "vespo":
        return -gate * a * lp, 0.0, -gate * a
    if kind == "sapo":
        tau = c.tau_pos if a > 0 else c.tau_neg
        s = 1 / (1 + math.exp(-tau * (rho - 1)))
        return -4 / tau * s * a, -4 * s * (1 - s) * a, 0.0
    low, high = 1 - c.epsilon_low, 1 + c.epsilon_high
    free, d_free = (rho, 1.0) if c.delta is None or rho <= c.delta else (c.delta, 0.0)
    held, d_held = clip(rho, low, high), 1.0 if low <= rho <= high else 0.0
    if free * a <= held * a:
        return -free * a, -d_free * a, 0.0
    return -held * a, -d_held * a, 0.0


def kl_term(kind: str, lp: float, ref: float) -> tuple[float, float]:
    """(value, d/dℓ) of one token."""
    d = lp - ref
    k3 = math.exp(-d) + d - 1
    return {
        "k1": (d, 1.0),
        "k2": (0.5 * d * d, d),
        "k3": (k3, 1 - math.exp(-d)),
        "k3_k2grad": (k3, d),
    }[kind]


def dropped(batch: Batch, i: int, t: int, c: Choices) -> bool:
    """Off-policy mask: negative advantage and a mean gap from the behaviour policy above the threshold."""
    if c.threshold is None or batch.advantages[i][t] >= 0:
        return False
    behaviour = batch.old_rows() if batch.sampler is None else batch.sampler
    active = loss_tokens(batch.mask[i])
    drift = sum(finite_or_zero(behaviour[i][s] - batch.logps[i][s]) for s in active) / len(active)
    return drift > c.threshold


def loss_and_gradient(name: str, batch: Batch, weights: Rows, c: Choices) -> tuple[float, Rows]:
    """Σ w_it [c_it ℓ(ρ_it, A_it) + β KL_it] and its gradient with respect to every log-prob."""
    kind = SURROGATE_OF[name]
    rho = ratios(batch, c.level)
    corrected = batch.sampler is not None and c.mode is not None
    factors, folded = corrections(batch, c) if corrected else (None, [0.0] * len(batch.mask))
    loss, gradient = 0.0, [[0.0] * len(row) for row in batch.logps]
    for i, (lp, old, a_row) in enumerate(zip(batch.logps, batch.old_rows(), batch.advantages, strict=True)):
        active = loss_tokens(batch.mask[i])
        for t in active:
            gate = gamma_gate(lp, old, active, a_row[t], folded[i], c) if kind == "vespo" else 0.0
            value, d_rho, d_lp = surrogate(kind, rho[i][t], a_row[t], lp[t], gate, c)
            factor = factors[i][t] if corrected and kind != "vespo" else 1.0
            if dropped(batch, i, t, c) or (batch.keep is not None and not batch.keep[i][t]):
                factor = 0.0
            value, d_rho, d_lp = factor * value, factor * d_rho, factor * d_lp
            if batch.ref is not None and c.kl_in_loss:
                kl, d_kl = kl_term(c.kl, lp[t], batch.ref[i][t])
                if c.bias_correction:
                    d_rho += c.beta * kl
                    kl, d_kl = kl * rho[i][t], d_kl * rho[i][t]
                value, d_lp = value + c.beta * kl, d_lp + c.beta * d_kl
            w = weights[i][t]
            loss += w * value
            gradient[i][t] += w * d_lp
            # dρ/dℓ: ρ itself at token level; s_i / |o_i| to every token of the sequence at sequence level.
            for s in active if c.level == "sequence" else [t]:
                share = 1 / len(active) if c.level == "sequence" else 1.0
                gradient[i][s] += w * d_rho * rho[i][t] * share
    return loss, gradient


def update_weights(normaliser: str, masks: list[list[Rows]], l_max: int) -> list[list[Rows]]:
    """Weight of every token in one optimizer update, for ``masks[rank][micro-batch]``.

    Gradients of micro-batches add up, gradients of ranks are averaged: this is what remains after both. Where
    micro-batches differ in size, 1 / (N_acc · B · ranks) is read as one over all sequences of the window.
    """
    ranks = len(masks)
    sequences = sum(len(micro) for rank in masks for micro in rank)
    tokens = sum(sum(sum(row) for row in micro) for rank in masks for micro in rank)
    out = []
    for rank in masks:
        out_rank = []
        for micro in rank:
            micro_tokens = sum(sum(row) for row in micro)
            rows = []
            for row in micro:
                one = {
                    "sequence_mean": 1 / (sequences * max(sum(row), 1)),
                    "local_token_mean": 1 / (ranks * len(rank) * max(micro_tokens, 1)),
                    "constant_length": 1 / (sequences * l_max),
                    "token_mean": 1 / max(tokens, 1),
                    "sequence_sum": 1 / sequences,
                }[normaliser]
                rows.append([one * m for m in row])
            out_rank.append(rows)
        out.append(out_rank)
    return out


def quantile(values: list[float], q: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def top_entropy_mask(entropies: Rows, mask: Rows, top: float) -> Rows:
    tokens = [
        e
        for e_row, m_row in zip(entropies, mask, strict=True)
        for e, m in zip(e_row, m_row, strict=True)
        if m
    ]
    threshold = quantile(tokens, 1 - top)
    return [[1.0 if e >= threshold else 0.0 for e in row] for row in entropies]


def adaptive_entropy(coef: float, entropies, target: float, delta: float, low: float, high: float) -> list:
    """After each window: (coefficient kept, coefficient applied in the next window)."""
    out = []
    for entropy in entropies:
        coef = coef + delta if entropy <= target else coef - delta
        coef = clip(coef, low, high)
        out.append((coef, coef if entropy <= target else 0.0))
    return out
