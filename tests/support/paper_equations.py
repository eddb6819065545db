"""Losses of papers as loops over plain numbers, each from its equation.

Nothing of torch or of the package is imported. Every entry of ``EQUATIONS`` maps :class:`Samples` to the loss,
a :class:`Dual` with its gradient. The library adds 1e-4 to every standard deviation that it divides by, as TRL
does; so do the equations here, with ``TINY``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from support.duals import Dual, Number, clip, exp, log, minimum, sigmoid, stop, total
from support.paper_samples import Samples

TINY = 1e-4
PerToken = Callable[[int, int], Number]
Loss = Callable[[Samples], Dual]


@dataclass(frozen=True)
class Equation:
    """Loss of a paper and the data that it is about.

    loss: the loss as a function of the samples.
    rewards: kinds of rewards that the method is defined for, of :func:`support.paper_samples.samples`.
    columns: number of reward functions beside those of the recipe.
    stretch: reward functions of the recipe see completions this many times as long.
    """

    loss: Loss
    rewards: tuple[str, ...] = ("binary", "real")
    columns: int = 1
    stretch: int = 1


EQUATIONS: dict[str, Equation] = {}


def paper(name: str, **about: object) -> Callable[[Loss], Loss]:
    """Add the loss of the recipe ``name``."""

    def add(loss: Loss) -> Loss:
        EQUATIONS[name] = Equation(loss, **about)  # type: ignore[arg-type]
        return loss

    return add


# Statistics of rewards


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def std(values: Sequence[float]) -> float:
    """Unbiased standard deviation."""
    centre = mean(values)
    return math.sqrt(sum((v - centre) ** 2 for v in values) / (len(values) - 1))


def per_group(
    s: Samples, rewards: Sequence[float], rule: Callable[[list[float]], Sequence[float]]
) -> list[float]:
    """Apply a rule to the rewards of each prompt."""
    return [a for group in s.groups() for a in rule([rewards[i] for i in group])]


def standardized(group: list[float]) -> list[float]:
    """(r_i − mean) / std."""
    return [(r - mean(group)) / (std(group) + TINY) for r in group]


def centred(group: list[float]) -> list[float]:
    """r_i − mean."""
    return [r - mean(group) for r in group]


def first(s: Samples) -> list[float]:
    """Rewards of the first function."""
    return [row[0] for row in s.rewards]


def group_relative(s: Samples) -> list[float]:
    """Advantages of GRPO."""
    return per_group(s, first(s), standardized)


# Aggregations of token losses


def pairs(s: Samples) -> list[tuple[int, int]]:
    return [(i, t) for i in range(len(s)) for t in s.tokens(i)]


def mean_of_sequences(s: Samples, loss: PerToken) -> Dual:
    """1/N Σ_i 1/|o_i| Σ_t."""
    return total(loss(i, t) / s.length(i) for i, t in pairs(s)) / len(s)


def mean_of_tokens(s: Samples, loss: PerToken) -> Dual:
    """1/Σ_i|o_i| Σ_i Σ_t."""
    return total(loss(i, t) for i, t in pairs(s)) / max(len(pairs(s)), 1)


def sum_over_tokens(s: Samples, loss: PerToken, divisor: float) -> Dual:
    return total(loss(i, t) for i, t in pairs(s)) / divisor


# Terms of a token


def ppo_clip(rho: Number, a: float, low: float, high: float) -> Number:
    """−min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A)."""
    return -1.0 * minimum(rho * a, clip(rho, 1 - low, 1 + high) * a)


def k3(s: Samples, i: int, t: int) -> Number:
    """π_ref/π_θ − log π_ref/π_θ − 1."""
    log_ratio = s.ref[i][t] - s.logps[i][t]
    return exp(log_ratio) - log_ratio - 1.0


def sequence_ratio(s: Samples, i: int) -> Number:
    """s_i = (π_θ(o_i) / π_old(o_i))^(1/|o_i|)."""
    return exp(total(s.log_ratio(i, t) for t in s.tokens(i)) / s.length(i))


# Clipping


@paper("grpo")
def grpo(s: Samples) -> Dual:
    a = group_relative(s)
    return mean_of_sequences(s, lambda i, t: ppo_clip(s.ratio(i, t), a[i], 0.2, 0.2) + 0.04 * k3(s, i, t))


@paper("deepseek_r1")
def deepseek_r1(s: Samples) -> Dual:
    a = group_relative(s)
    return mean_of_sequences(s, lambda i, t: ppo_clip(s.ratio(i, t), a[i], 10, 10) + 0.001 * k3(s, i, t))


def soft_overlong(length: int, limit: int, cache: int) -> float:
    if length <= limit - cache:
        return 0.0
    return (limit - cache - length) / cache if length <= limit else -1.0


#: Six tokens stand for 6 · 3,500 = 21,000, beyond DAPO's limit of 20,480; five for 17,500, in the last 4,096.
DAPO_STRETCH = 3500


@paper("dapo", stretch=DAPO_STRETCH)
def dapo(s: Samples) -> Dual:
    shaped = [
        r + soft_overlong(len(row) * DAPO_STRETCH, 20480, 4096)
        for r, row in zip(first(s), s.logps, strict=True)
    ]
    a = per_group(s, shaped, standardized)
    kept = s.without_truncated()
    return mean_of_tokens(kept, lambda i, t: ppo_clip(s.ratio(i, t), a[i], 0.2, 0.28))


@paper("gspo")
def gspo(s: Samples) -> Dual:
    a, rows = group_relative(s), [i for i in range(len(s)) if s.tokens(i)]
    return total(ppo_clip(sequence_ratio(s, i), a[i], 3e-4, 4e-4) for i in rows) / len(s)


@paper("gspo_token")
def gspo_token(s: Samples) -> Dual:
    a = group_relative(s)

    def s_it(i: int, t: int) -> Number:
        return stop(sequence_ratio(s, i)) * exp(s.logps[i][t]) / stop(exp(s.logps[i][t]))

    return mean_of_sequences(s, lambda i, t: ppo_clip(s_it(i, t), a[i], 3e-4, 4e-4))


@paper("gmpo")
def gmpo(s: Samples) -> Dual:
    a = group_relative(s)

    def bounded(i: int, t: int) -> Number:
        sign = math.copysign(1.0, a[i])
        powered = exp(s.log_ratio(i, t) * sign)  # ρ^sgn(A)
        return log(minimum(powered, clip(powered, math.exp(-0.4), math.exp(0.4)))) * sign

    rows = [i for i in range(len(s)) if s.tokens(i)]
    means = {i: exp(total(bounded(i, t) for t in s.tokens(i)) / s.length(i)) for i in rows}
    return -total(means[i] * a[i] for i in rows) / len(s)


@paper("cispo")
def cispo(s: Samples) -> Dual:
    a = group_relative(s)
    return mean_of_tokens(s, lambda i, t: -min(stop(s.ratio(i, t)), 5.0) * a[i] * s.logps[i][t])


@paper("intellect_2")
def intellect_2(s: Samples) -> Dual:
    a = group_relative(s)

    def two_sided(rho: Number, a: float) -> Number:
        return -1.0 * minimum(minimum(rho, 4.0) * a, clip(rho, 0.8, 1.2) * a)

    return mean_of_tokens(s, lambda i, t: two_sided(s.ratio(i, t), a[i]) + 0.001 * k3(s, i, t))


@paper("sapo")
def sapo(s: Samples) -> Dual:
    a = group_relative(s)

    def gate(rho: Number, tau: float) -> Number:
        return 4 / tau * sigmoid(tau * (rho - 1.0))

    return mean_of_sequences(s, lambda i, t: -a[i] * gate(s.ratio(i, t), 1.0 if a[i] > 0 else 1.05))


@paper("luspo")
def luspo(s: Samples) -> Dual:
    a, rows = group_relative(s), [i for i in range(len(s)) if s.tokens(i)]
    terms = (s.length(i) * ppo_clip(sequence_ratio(s, i), a[i], 2e-3, 2.5e-3) for i in rows)
    return total(terms) / len(s)


@paper("vespo")
def vespo(s: Samples) -> Dual:
    a = group_relative(s)

    def phi(i: int) -> float:
        w = math.exp(sum(stop(s.log_ratio(i, t)) for t in s.tokens(i)))
        k, decay = (2.0, 3.0) if a[i] >= 0 else (3.0, 2.0)
        return w**k * math.exp(decay * (1 - w))

    return mean_of_tokens(s, lambda i, t: -phi(i) * a[i] * s.logps[i][t])


# Normalization


@paper("dr_grpo")
def dr_grpo(s: Samples) -> Dual:
    a = per_group(s, first(s), centred)
    return sum_over_tokens(s, lambda i, t: ppo_clip(s.ratio(i, t), a[i], 0.2, 0.2), len(s) * 3000)


# Advantages


@paper("lite_ppo")
def lite_ppo(s: Samples) -> Dual:
    spread = std(first(s)) + TINY
    a = [value / spread for value in per_group(s, first(s), centred)]
    return mean_of_tokens(s, lambda i, t: ppo_clip(s.ratio(i, t), a[i], 0.2, 0.2))


# Entropy


@paper("high_entropy_tokens")
def high_entropy_tokens(s: Samples) -> Dual:
    kept = s.without_truncated()
    a = group_relative(s)
    ordered = sorted(stop(s.entropies[i][t]) for i, t in pairs(kept))
    position = 0.8 * (len(ordered) - 1)  # linear interpolation between order statistics
    below, share = int(position), position - int(position)
    threshold = ordered[below] + share * (ordered[below + 1] - ordered[below])

    def loss(i: int, t: int) -> Number:
        if stop(s.entropies[i][t]) < threshold:
            return 0.0
        return ppo_clip(s.ratio(i, t), a[i], 0.2, 0.28)

    return mean_of_tokens(kept, loss)
