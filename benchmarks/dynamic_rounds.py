"""Simulate rounds of dynamic sampling, sized by the groups of the same batch or by older solve rates.

PYTHONPATH=src python benchmarks/dynamic_rounds.py

The first round is a batch of prompts with either rule. By rates, a later round has as many prompts as are
expected to fill the batch: a prompt that was solved k times of G gives variance with the probability
1 - r^G - (1 - r)^G, r = (k + 1) / (G + 2).
"""

from __future__ import annotations

import math
import random
from statistics import fmean
from typing import Any, cast

from common import write_results

from groupwise.data.dynamic_sampling import round_size

PROMPTS, BATCH, GROUP, EPOCHS, MAX_ROUNDS, SEEDS = 512, 8, 8, 8, 8, 4


class Config:
    """Settings that `round_size` reads."""

    world_size, num_generations, prompts_per_batch = 1, GROUP, BATCH


def simulate(spread: float, drift: float, seed: int, *, by_rates: bool) -> tuple[float, float]:
    """Return rounds and sampled groups of a batch; solve probabilities are Beta(spread, spread) at first.

    Args:
        drift: growth of every log-odds per step, which makes rates old.
    """
    draw, rates, order = random.Random(seed), dict[int, float](), list[int]()
    logits = [math.log(p / (1 - p)) for p in (_probability(draw, spread) for _ in range(PROMPTS))]
    rounds, sampled, steps = 0, 0, EPOCHS * PROMPTS // BATCH
    for _ in range(steps):
        found = seen = number = 0
        while found < BATCH and number < MAX_ROUNDS:
            while len(order) < BATCH:
                order += draw.sample(range(PROMPTS), PROMPTS)
            share = found / seen if seen else 1.0
            size = round_size(BATCH - found, share, cast("Any", Config))
            if by_rates and number:
                expected, size = 0.0, 0
                while expected < BATCH - found and size < BATCH:
                    rate = rates.get(order[size])
                    expected += share if rate is None else 1 - rate**GROUP - (1 - rate) ** GROUP
                    size += 1
            for prompt in order[:size]:
                solved = sum(draw.random() < 1 / (1 + math.exp(-logits[prompt])) for _ in range(GROUP))
                rates[prompt], found = (solved + 1) / (GROUP + 2), found + (0 < solved < GROUP)
            del order[:size]
            seen, number = seen + size, number + 1
        rounds, sampled = rounds + number, sampled + seen
        logits = [logit + drift for logit in logits]
    return rounds / steps, sampled / steps


def _probability(draw: random.Random, spread: float) -> float:
    return min(max(draw.betavariate(spread, spread), 1e-4), 1 - 1e-4)


def main() -> None:
    results = {}
    for spread in (0.2, 0.5, 1.0):
        for drift in (0.0, 0.005):
            runs = {
                rule: [simulate(spread, drift, seed, by_rates=rule == "rates") for seed in range(SEEDS)]
                for rule in ("batch", "rates")
            }
            rounds, sampled = (
                fmean(run[i] for run in runs["rates"]) / fmean(run[i] for run in runs["batch"])
                for i in (0, 1)
            )
            results[f"beta {spread}, drift {drift}"] = {"rounds": rounds, "sampled_groups": sampled}
            print(f"Beta({spread}, {spread}), drift {drift}: {rounds:.3f} rounds, {sampled:.3f} groups")
    write_results("dynamic_rounds", {"rates_over_batch": results})


if __name__ == "__main__":
    main()
