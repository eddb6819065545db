"""Advantages as loops over plain floats; a missing reward is None. Nothing of the package is imported."""

from __future__ import annotations

import math


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def std(values: list[float]) -> float:
    """Unbiased; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.sqrt(sum((v - centre) ** 2 for v in values) / (len(values) - 1))


def present(values: list) -> list[float]:
    return [v for v in values if v is not None]


def weighted_sum(rewards: list, weights: list[float]) -> float | None:
    """Over the functions that answered; None when none did."""
    pairs = [(r, w) for r, w in zip(rewards, weights, strict=True) if r is not None]
    return sum(r * w for r, w in pairs) if pairs else None


def baselines(group: list, kind: str) -> list:
    """Baseline that is subtracted from each reward of a group."""
    out = []
    for i, reward in enumerate(group):
        others = present(group[:i] + group[i + 1 :])
        if reward is None:
            out.append(None)
        elif kind == "leave_one_out":
            out.append(mean(others) if others else reward)
        else:
            out.append(mean(present(group)))
    return out


def centred(group: list, kind: str) -> list:
    return [None if r is None else r - b for r, b in zip(group, baselines(group, kind), strict=True)]


def divided(values: list, deviation: float) -> list:
    return [None if v is None else v / (deviation + 1e-4) for v in values]


def grouped(values: list, size: int) -> list[list]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def advantages(
    rewards: list[list], weights: list[float], size: int, scale: str, aggregation: str, kind: str
) -> list:
    """One number per completion; ``rewards[i][f]``."""
    if aggregation == "normalize_then_sum":
        columns = []
        for column in zip(*rewards, strict=True):
            scaled = []
            for group in grouped(list(column), size):
                scaled += divided(centred(group, kind), std(present(group)))
            columns.append(scaled)
        total = [weighted_sum(list(row), weights) for row in zip(*columns, strict=True)]
        there = present(total)
        whitened = [None if v is None else v - mean(there) for v in total]
        return [0.0 if v is None else v for v in divided(whitened, std(there))]
    total = [weighted_sum(row, weights) for row in rewards]
    out = []
    for group in grouped(total, size):
        values = centred(group, kind)
        if scale == "group":
            values = divided(values, std(present(group)))
        if scale == "batch":
            values = divided(values, std(present(total)))
        out += values
    return [0.0 if v is None else v for v in out]


def process_advantages(
    steps: list[list[tuple[int, float]]],
    size: int,
    tokens: int,
    scale: str = "group",
    kind: str = "group_mean",
    turns: list[list[tuple[int, int]]] | None = None,
    own: bool = False,
) -> list[list[float]]:
    """A_it = Σ over steps ending at or after t, in the order of time, of the normalised step reward.

    ``turns`` are the spans of a completion's turns in the order of time; tokens outside of them get 0.
    """
    out = []
    batch = [r for sequence in steps for _, r in sequence]
    for g, group in enumerate(grouped(steps, size)):
        every = [r for sequence in group for _, r in sequence]
        deviation = {"group": std(every) + 1e-4, "batch": std(batch) + 1e-4, "none": 1.0}[scale]
        for i, sequence in enumerate(group):
            spans = turns[g * size + i] if turns else [(0, tokens)]
            order = [t for start, stop in spans for t in range(start, stop)]  # tokens as they were sampled
            turn = {t: n for n, (start, stop) in reversed([*enumerate(spans)]) for t in range(start, stop)}
            row = [0.0] * tokens
            for t in set(order):
                for end, r in sequence:
                    last = len(order) - 1 - order[::-1].index(end)  # a repeated token counts as sampled again
                    if order.index(t) > last or (own and (turn[t] != turn[end] or t > end)):
                        continue
                    others = [v for j, other in enumerate(group) if j != i for _, v in other]
                    centre = mean(every)
                    if kind == "leave_one_out":
                        centre = mean(others) if others else r
                    row[t] += (r - centre) / deviation if len(set(every)) > 1 else 0.0
            out.append(row)
    return out
