"""Random completions as plain numbers, for equations of papers.

Nothing of torch or of the package is imported.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from support.fakes.duals import Dual, Number, exp, stop

#: Standard deviation of log π_θ − log π_old by row: within and beyond clip ranges from 3e-4 to 10.
SPREADS = (3e-4, 2e-3, 0.05, 0.5, 3.0)
#: Mean of log π_old − log π_samp by row: sequence factors above, below and within every bound in use.
SAMPLER_OFFSETS = (0.0, 0.3, -0.25, 0.05, 0.15, -0.05)


@dataclass(frozen=True)
class Samples:
    """N completions in groups of G adjacent rows; row i has n_i tokens.

    size: G.
    rewards: N rows, one number per reward function.
    masks: 1 for sampled tokens, 0 for tokens of tools.
    logps, entropies: log π_θ(o_it) and H_it, the variables of the gradient; their names are
        ("logp", i, t) and ("entropy", i, t).
    old: log π_old(o_it); None: exactly on-policy.
    ref: log π_ref(o_it).
    sampler: log π_samp(o_it).
    truncated: the length limit ended the completion.
    micro_batches: rows of each accumulation step; groups are spread over them.
    """

    size: int
    rewards: list[list[float]]
    masks: list[list[int]]
    logps: list[list[Dual]]
    entropies: list[list[Dual]]
    old: list[list[float]] | None
    ref: list[list[float]]
    sampler: list[list[float]]
    truncated: list[bool]
    micro_batches: list[list[int]]

    def __len__(self) -> int:
        return len(self.rewards)

    def tokens(self, i: int) -> list[int]:
        """Positions of the loss tokens of completion i."""
        return [t for t, m in enumerate(self.masks[i]) if m]

    def length(self, i: int) -> int:
        """|o_i|, at least 1."""
        return max(len(self.tokens(i)), 1)

    def log_ratio(self, i: int, t: int) -> Dual:
        """log ρ_it."""
        old = stop(self.logps[i][t]) if self.old is None else self.old[i][t]
        return self.logps[i][t] - old

    def ratio(self, i: int, t: int) -> Number:
        """ρ_it = π_θ / π_old."""
        return exp(self.log_ratio(i, t))

    def groups(self) -> list[list[int]]:
        """Rows of each prompt."""
        return [list(range(start, start + self.size)) for start in range(0, len(self), self.size)]

    def without_truncated(self) -> Samples:
        """Mask every token of the completions that the length limit ended."""
        masks = [[0] * len(m) if cut else m for m, cut in zip(self.masks, self.truncated, strict=True)]
        return replace(self, masks=masks)


def rewards_of(kind: str, count: int, size: int, rng: random.Random) -> list[float]:
    """One reward per completion: "binary" 0 or 1, "signed" -1 or 1, "real" in [0, 1)."""
    if kind == "real":
        return [rng.random() for _ in range(count)]
    values = [float(rng.random() < 0.4) for _ in range(count)]
    values[:size] = [0.0] * size  # one prompt that is never solved
    values[size : size + 2] = [0.0, 1.0]  # and one that sometimes is
    return values if kind == "binary" else [2 * value - 1 for value in values]


def samples(kind: str, columns: int, size: int, *, seed: int, on_policy: bool) -> Samples:
    rng = random.Random(seed)
    count = size * max(3, 12 // size)
    lengths = [rng.randint(1, 6) for _ in range(count)]
    values = [rewards_of(kind, count, size, rng) for _ in range(columns)]

    def rows(offset: float, spread: float | None = None) -> list[list[float]]:
        """Distances between two log-probs of a token."""
        return [
            [offset + rng.gauss(0, SPREADS[i % len(SPREADS)] if spread is None else spread) for _ in range(n)]
            for i, n in enumerate(lengths)
        ]

    def minus(left: list, right: list) -> list[list[float]]:
        return [[stop(x) - y for x, y in zip(a, b, strict=True)] for a, b in zip(left, right, strict=True)]

    logps = [[Dual(-0.05 - abs(x), {("logp", i, t): 1.0}) for t, x in enumerate(row)] for i, row in
             enumerate(rows(0.0, 1.2))]  # fmt: skip
    entropies = [[Dual(abs(x), {("entropy", i, t): 1.0}) for t, x in enumerate(row)] for i, row in
                 enumerate(rows(0.0, 1.0))]  # fmt: skip
    old = None if on_policy else minus(logps, rows(0.0))
    gaps = [
        [SAMPLER_OFFSETS[i % len(SAMPLER_OFFSETS)] + x for x in row] for i, row in enumerate(rows(0.0, 0.1))
    ]
    gaps[2][0], gaps[5][0] = 2.0, -1.5  # beyond the bounds of one token
    masks = [[int(rng.random() < 0.85) for _ in range(n)] for n in lengths]
    order = list(range(count))
    rng.shuffle(order)
    return Samples(
        size=size,
        rewards=[list(row) for row in zip(*values, strict=True)],
        masks=masks,
        logps=logps,
        entropies=entropies,
        old=old,
        ref=minus(logps, rows(0.1, 0.4)),
        sampler=minus(logps if old is None else old, gaps),
        truncated=[rng.random() < 0.2 for _ in range(count)],
        micro_batches=[order[: count // 2], order[count // 2 :]],
    )
