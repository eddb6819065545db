"""Losses of papers as loops over plain numbers, each from its equation.

Nothing of torch or of the package is imported. Every entry of ``EQUATIONS`` maps :class:`Samples` to the
loss, with its gradient as a :class:`Dual`. The library adds 1e-4 to every standard deviation that it divides
by, as TRL does; so do the equations here, with ``TINY``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from support.fakes.duals import Dual, Number, clip, exp, log, minimum, sigmoid, stop, total
from support.oracles.paper_samples import Samples

TINY = 1e-4
PerToken = Callable[[int, int], Number]
Loss = Callable[[Samples], Dual]


@dataclass(frozen=True)
class Equation:
    """Loss of a paper and the data that it is about.

    loss: the loss as a function of the samples.
    rewards: kinds of rewards of :func:`support.oracles.paper_samples.samples`.
    columns: number of reward functions beside those of the recipe.
    stretch: reward functions of the recipe see completions this many times as long.
    solved_only: the recipe's functions compute the whole reward, from texts that are correct where the reward
        of the samples is 1.
    """

    loss: Loss
    rewards: tuple[str, ...] = ("binary", "real")
    columns: int = 1
    stretch: int = 1
    solved_only: bool = False


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


def mean_of_prompts(s: Samples, loss: PerToken) -> Dual:
    """1/P Σ_p 1/Σ_{i ∈ p}|o_i| Σ_{i ∈ p} Σ_t."""

    def prompt(group: list[int]) -> Number:
        terms = [loss(i, t) for i in group for t in s.tokens(i)]
        return total(terms) / max(len(terms), 1)

    return total(prompt(group) for group in s.groups()) / len(s.groups())


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
    a = per_group(s, first(s), centred)

    def phi(i: int) -> float:
        w = math.exp(sum(stop(s.log_ratio(i, t)) for t in s.tokens(i)))
        k, decay = (2.0, 3.0) if a[i] >= 0 else (3.0, 2.0)
        return w**k * math.exp(decay * (1 - w))

    return mean_of_tokens(s, lambda i, t: -phi(i) * a[i] * s.logps[i][t])


@paper("ce_gppo")
def ce_gppo(s: Samples) -> Dual:
    a = group_relative(s)

    def loss(i: int, t: int) -> Number:
        rho = s.ratio(i, t)
        if stop(rho) < 0.8 and a[i] < 0:
            return -0.75 * 0.8 / stop(rho) * rho * a[i]
        if stop(rho) > 1.2 and a[i] > 0:
            return -1.0 * 1.2 / stop(rho) * rho * a[i]
        return -a[i] * rho

    return mean_of_tokens(s, loss)


@paper("gppo")
def gppo(s: Samples) -> Dual:
    a = group_relative(s)

    def loss(i: int, t: int) -> Number:
        rho = s.ratio(i, t)
        bound = min(max(stop(rho), 0.8), 1.28) * rho / stop(rho)
        return -1.0 * minimum(rho * a[i], bound * a[i])

    return mean_of_tokens(s, loss)


@paper("aspo")
def aspo(s: Samples) -> Dual:
    a = group_relative(s)

    def weight(i: int, t: int) -> Number:
        rho, pi = s.ratio(i, t), exp(s.logps[i][t])
        if a[i] > 0:
            flipped = 1 / stop(rho)  # π_old / π
            return min(flipped, 3.0) * pi / stop(pi) if stop(rho) <= 1.28 else 0.0
        return minimum(rho, 3.0) if stop(rho) >= 0.8 else 0.0

    return mean_of_tokens(s, lambda i, t: -a[i] * weight(i, t))


@paper("dcpo")
def dcpo(s: Samples) -> Dual:
    a = group_relative(s)

    def loss(i: int, t: int) -> Number:
        q = math.exp(stop(s.logps[i][t]) if s.old is None else s.old[i][t])
        low = 0.5 + 0.5 * math.sqrt(max(1 - 4 * 0.16 / q, 0))
        high = min(0.5 + 0.5 * math.sqrt(1 + 4 * 0.2 / q), 10)
        rho = s.ratio(i, t)
        return -1.0 * minimum(minimum(rho, 10.0) * a[i], clip(rho, low, high) * a[i])

    return total(loss(i, t) / s.length(i) for i, t in pairs(s)) / len(s.groups())


@paper("dppo")
def dppo(s: Samples) -> Dual:
    a = group_relative(s)

    def loss(i: int, t: int) -> Number:
        pi = stop(exp(s.logps[i][t]))
        moved = pi - pi / stop(s.ratio(i, t))
        if (a[i] > 0 and moved > 0.15) or (a[i] <= 0 and -moved > 0.15):
            return 0.0
        return -a[i] * s.ratio(i, t)

    return mean_of_tokens(s, loss)


@paper("topr", rewards=("signed",))
def topr(s: Samples) -> Dual:
    r, terms = first(s), []
    for i in range(len(s)):
        pi_over_mu = math.exp(sum(stop(s.log_ratio(i, t)) for t in s.tokens(i)))
        taper = 1.0 if r[i] > 0 else min(pi_over_mu, 1.0)
        terms.append(taper * r[i] * total(s.logps[i][t] for t in s.tokens(i)))
    return -total(terms) / len(s)


@paper("asymre", rewards=("binary", "signed"))
def asymre(s: Samples) -> Dual:
    a = per_group(s, first(s), lambda group: [r - (mean(group) - 0.1) for r in group])
    return reinforce(s, a)


def reinforce(s: Samples, a: Sequence[float]) -> Dual:
    """−1/N Σ_i A_i log π(o_i)."""
    return -total(a[i] * s.logps[i][t] for i, t in pairs(s)) / len(s)


@paper("kimi_k1_5")
def kimi_k1_5(s: Samples) -> Dual:
    a = per_group(s, first(s), centred)
    squares = [total(s.log_ratio(i, t) for t in s.tokens(i)) ** 2 for i in range(len(s)) if s.tokens(i)]
    return reinforce(s, a) + 0.1 / 2 * total(squares) / len(s)


# Normalization


@paper("dr_grpo")
def dr_grpo(s: Samples) -> Dual:
    a = per_group(s, first(s), centred)
    return sum_over_tokens(s, lambda i, t: ppo_clip(s.ratio(i, t), a[i], 0.2, 0.2), len(s) * 3000)


@paper("scalerl")
def scalerl(s: Samples) -> Dual:
    raw = per_group(s, first(s), centred)
    a = [value / (std(raw) + TINY) for value in raw]
    return mean_of_prompts(s, lambda i, t: -min(stop(s.ratio(i, t)), 5.0) * a[i] * s.logps[i][t])


# Advantages


def default_loss(s: Samples, a: Sequence[float], high: float = 0.2) -> Dual:
    """Token mean of the clipped surrogate."""
    return mean_of_tokens(s, lambda i, t: ppo_clip(s.ratio(i, t), a[i], 0.2, high))


@paper("lite_ppo")
def lite_ppo(s: Samples) -> Dual:
    spread = std(first(s)) + TINY
    a = [value / spread for value in per_group(s, first(s), centred)]
    return mean_of_tokens(s, lambda i, t: ppo_clip(s.ratio(i, t), a[i], 0.2, 0.2))


@paper("two_grpo")
def two_grpo(s: Samples) -> Dual:
    r = first(s)

    def pair(group: list[int]) -> Number:
        better, worse = sorted(group, key=lambda i: -r[i])
        a = (r[better] - r[worse]) / 2 / (std([r[better], r[worse]]) + TINY)
        up = (minimum(rho * a, clip(rho, 0.8, 1.2) * a) for rho in ratios(better))
        down = (minimum(-rho * a, -clip(rho, 0.8, 1.2) * a) for rho in ratios(worse))
        return (total(up) / s.length(better) + total(down) / s.length(worse)) / 2

    def ratios(i: int) -> list[Dual]:
        return [Dual(1.0, {}) * s.ratio(i, t) for t in s.tokens(i)]

    return -total(pair(group) for group in s.groups()) / len(s.groups())


@paper("rloo")
def rloo(s: Samples) -> Dual:
    def log_ratio_to_reference(i: int) -> float:
        old = [stop(x) for x in s.logps[i]] if s.old is None else s.old[i]
        return sum(old[t] - s.ref[i][t] for t in s.tokens(i))

    charged = [r - 0.03 * log_ratio_to_reference(i) for i, r in enumerate(first(s))]
    return reinforce(s, per_group(s, charged, minus_the_others))


def minus_the_others(group: list[float]) -> list[float]:
    return [r - mean(group[:i] + group[i + 1 :]) for i, r in enumerate(group)]


def whitened(s: Samples) -> list[float]:
    raw = per_group(s, first(s), centred)
    return [(value - mean(raw)) / (std(raw) + TINY) for value in raw]


@paper("reinforce_plus_plus")
def reinforce_plus_plus(s: Samples) -> Dual:
    a = whitened(s)

    def loss(i: int, t: int) -> Number:
        k2 = (s.logps[i][t] - s.ref[i][t]) ** 2 / 2
        return ppo_clip(s.ratio(i, t), a[i], 0.2, 0.2) + 0.001 * k2

    return mean_of_tokens(s, loss)


@paper("magistral")
def magistral(s: Samples) -> Dual:
    a = whitened(s)
    return mean_of_prompts(s, lambda i, t: ppo_clip(s.ratio(i, t), a[i], 0.2, 0.28))


@paper("maxrl")
def maxrl(s: Samples) -> Dual:
    def relative(group: list[float]) -> list[float]:
        return [(r - mean(group)) / mean(group) if mean(group) else 0.0 for r in group]

    return default_loss(s, per_group(s, first(s), relative))


@paper("gdpo", columns=2)
def gdpo(s: Samples) -> Dual:
    columns = [per_group(s, list(column), standardized) for column in zip(*s.rewards, strict=True)]
    summed = [1.0 * x + 0.5 * y for x, y in zip(*columns, strict=True)]
    return default_loss(s, [(x - mean(summed)) / (std(summed) + TINY) for x in summed])


@paper("quantile_advantage")
def quantile_advantage(s: Samples) -> Dual:
    def above_the_quantile(group: list[float]) -> list[float]:
        share = {x: sum(r <= x for r in group) / len(group) for x in group}
        baseline = min(x for x in group if share[x] >= 0.4)
        return [(r - baseline) / (std(group) + TINY) for r in group]

    return default_loss(s, per_group(s, first(s), above_the_quantile), 0.28)


@paper("w_reinforce", rewards=("binary", "signed"))
def w_reinforce(s: Samples) -> Dual:
    return default_loss(s, [0.1 if r > 0 else -1.0 for r in first(s)])


@paper("pass_at_k", rewards=("binary",))
def pass_at_k(s: Samples) -> Dual:
    """Averages over all subsets of four completions, instead of the paper's closed form of them."""

    def over_subsets(group: list[float]) -> list[float]:
        subsets = list(itertools.combinations(range(len(group)), 4))
        rewards = [max(group[i] for i in subset) for subset in subsets]
        spread = math.sqrt(mean([(r - mean(rewards)) ** 2 for r in rewards]))
        if not spread:
            return [0.0] * len(group)
        relative = [(r - mean(rewards)) / spread for r in rewards]
        return [
            mean([x for x, subset in zip(relative, subsets, strict=True) if i in subset])
            for i in range(len(group))
        ]

    return default_loss(s, per_group(s, first(s), over_subsets), 0.28)


@paper("opo", stretch=3)
def opo(s: Samples) -> Dual:
    lengths, a = [len(row) for row in s.logps], []
    for group in s.groups():
        weighted = sum(lengths[i] * s.rewards[i][0] for i in group)
        baseline = weighted / sum(lengths[i] for i in group)
        a += [s.rewards[i][0] - baseline for i in group]
    return default_loss(s, a)


@paper("gfpo")
def gfpo(s: Samples) -> Dual:
    r, a = first(s), [0.0] * len(s)
    for group in s.groups():
        kept = sorted(group, key=lambda i: (len(s.logps[i]), i))[: len(group) // 2]
        centre = mean([r[i] for i in kept])
        spread = math.sqrt(mean([(r[i] - centre) ** 2 for i in kept]))
        for i in kept:
            a[i] = (r[i] - centre) / (spread + TINY)

    def loss(i: int, t: int) -> Number:
        return ppo_clip(s.ratio(i, t), a[i], 0.2, 0.2) + 0.001 * k3(s, i, t) - 0.001 * s.entropies[i][t]

    return mean_of_tokens(s, loss)


@paper("kimi_length", rewards=("binary",), stretch=10)
def kimi_length(s: Samples) -> Dual:
    shaped = []
    for group in s.groups():
        lengths = [len(s.logps[i]) for i in group]
        low, high = min(lengths), max(lengths)
        for i, n in zip(group, lengths, strict=True):
            bonus = 0.5 - (n - low) / (high - low) if high > low else 0.0
            shaped.append(s.rewards[i][0] + (bonus if s.rewards[i][0] == 1 else min(0.0, bonus)))
    return default_loss(s, per_group(s, shaped, standardized))


#: Six tokens stand for 1,200, beyond the limit of 1,024.
COSINE_STRETCH = 200


@paper("demystifying_long_cot", rewards=("binary",), stretch=COSINE_STRETCH, solved_only=True)
def demystifying_long_cot(s: Samples) -> Dual:
    def reward(solved: float, length: int) -> float:
        at_zero, at_limit = (1.0, 0.5) if solved else (-1.0, -0.5)
        falling = 1 + math.cos(math.pi * min(length, 1024) / 1024)
        ids = [k % 7 for k in range(length)]
        trigrams = [tuple(ids[k : k + 3]) for k in range(length - 2)]
        repeated = (len(trigrams) - len(set(trigrams))) / len(trigrams)
        return at_limit + (at_zero - at_limit) / 2 * falling - repeated

    lengths = [len(row) * COSINE_STRETCH for row in s.logps]
    shaped = [reward(solved, n) for solved, n in zip(first(s), lengths, strict=True)]
    return default_loss(s, per_group(s, shaped, standardized))


# Entropy and KL


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


@paper("skywork_or1")
def skywork_or1(s: Samples) -> Dual:
    a, coefficient = group_relative(s), 0.0
    coefficient += 0.005  # the entropy of the step before was 0.1, below the target of 0.2
    return mean_of_tokens(
        s, lambda i, t: ppo_clip(s.ratio(i, t), a[i], 0.2, 0.2) - coefficient * s.entropies[i][t]
    )


@paper("deepseek_v3_2_kl")
def deepseek_v3_2_kl(s: Samples) -> Dual:
    a = group_relative(s)

    def loss(i: int, t: int) -> Number:
        return ppo_clip(s.ratio(i, t), a[i], 0.2, 0.2) + 0.001 * s.ratio(i, t) * k3(s, i, t)

    return mean_of_sequences(s, loss)


# Off-policy data


@paper("deepseek_v3_2_mask")
def deepseek_v3_2_mask(s: Samples) -> Dual:
    a = group_relative(s)

    def kept(i: int) -> bool:
        drift = -sum(stop(s.log_ratio(i, t)) for t in s.tokens(i)) / s.length(i)
        return not (a[i] < 0 and drift > 0.5)

    return mean_of_sequences(s, lambda i, t: ppo_clip(s.ratio(i, t), a[i], 0.2, 0.2) * float(kept(i)))


def mismatch(s: Samples, i: int, t: int) -> float:
    """π_old / π_samp of a token."""
    old = stop(s.logps[i][t]) if s.old is None else s.old[i][t]
    return math.exp(old - s.sampler[i][t])


def sequence_mismatch(s: Samples, i: int) -> float:
    return math.prod(mismatch(s, i, t) for t in s.tokens(i))


def corrected(s: Samples, weight: Callable[[int, int], float]) -> Dual:
    a = group_relative(s)
    return mean_of_tokens(s, lambda i, t: weight(i, t) * ppo_clip(s.ratio(i, t), a[i], 0.2, 0.2))


@paper("tis")
def tis(s: Samples) -> Dual:
    return corrected(s, lambda i, t: min(mismatch(s, i, t), 2.0))


@paper("icepop")
def icepop(s: Samples) -> Dual:
    def popped(k: float) -> float:
        return k if 0.5 <= k <= 5.0 else 0.0

    a = group_relative(s)
    return mean_of_sequences(
        s, lambda i, t: popped(mismatch(s, i, t)) * ppo_clip(s.ratio(i, t), a[i], 0.2, 0.2)
    )


@paper("sequence_tis")
def sequence_tis(s: Samples) -> Dual:
    return corrected(s, lambda i, t: min(sequence_mismatch(s, i), 2.0))


@paper("sequence_mis")
def sequence_mis(s: Samples) -> Dual:
    def masked(w: float) -> float:
        return w if w <= 2.0 else 0.0

    return corrected(s, lambda i, t: masked(sequence_mismatch(s, i)))
