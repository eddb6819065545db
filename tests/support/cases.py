"""Fixed inputs for the reference tests, and the bridge from the oracle's choices to the settings."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import torch

from groupwise.core.objectives import OBJECTIVES, ObjectiveSettings, ObjectiveTerms, evaluate
from groupwise.core.surrogates import SurrogateSettings
from groupwise.core.weights import NORMALIZERS, WindowCounts
from support.oracle import NORMALISER_OF, Batch, Choices, Rows, update_weights

# Holes are tool tokens, row 3 has no loss token at all, row 2 has one.
MASK: Rows = [
    [1, 1, 1, 1, 1, 1],
    [1, 1, 0, 1, 1, 0],
    [1, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 0],
    [1, 1, 1, 1, 0, 0],
    [0, 1, 1, 1, 0, 0],
    [1, 1, 1, 0, 0, 0],
    [1, 1, 1, 1, 1, 0],
]
ADVANTAGES = [1.3, -0.7, 0.9, 1.1, 0.0, -1.6, -0.4, 0.8]
# Mean of ℓ − ℓ_old by row: above and below both clip bounds for both signs of the advantage.
OFFSETS = [0.55, 0.62, -0.4, 0.3, 0.2, -0.5, 0.05, -0.02]
# Mean of ℓ_old − ℓ_samp by row: sequence factors above, below and within every bound used.
SAMPLER_OFFSETS = [0.25, -0.3, 0.1, 0.0, -0.05, -0.2, -0.02, 0.02]
WIDTH = 6
L_MAX = 9


def batch(*, per_token_advantages: bool = False, on_policy: bool = False, sampler: bool = True) -> Batch:
    rng = random.Random(7)

    def noise(scale: float) -> Rows:
        return [[rng.gauss(0, scale) for _ in range(WIDTH)] for _ in MASK]

    logps = [[-abs(x) - 0.05 for x in row] for row in noise(1.2)]
    old = [
        [lp - o - e for lp, e in zip(r, n, strict=True)]
        for r, n, o in zip(logps, noise(0.3), OFFSETS, strict=True)
    ]
    ref = [[lp + e for lp, e in zip(r, n, strict=True)] for r, n in zip(logps, noise(0.5), strict=True)]
    behaviour = logps if on_policy else old
    samp = [
        [lp - o - e for lp, e in zip(r, n, strict=True)]
        for r, n, o in zip(behaviour, noise(0.35), SAMPLER_OFFSETS, strict=True)
    ]
    samp[0][2] = samp[5][1] = samp[2][0] = math.nan
    signs = noise(1.0)
    signs[7][1] = 0.0
    rows = signs if per_token_advantages else [[a] * WIDTH for a in ADVANTAGES]
    return Batch(logps, rows, MASK, None if on_policy else old, ref, samp if sampler else None)


KEEP: Rows = [[float((3 * i + 2 * t) % 5 != 0) for t in range(WIDTH)] for i in range(len(MASK))]

# This micro-batch is the second of two on the first of two ranks.
OTHERS: Rows = [[1, 1, 0, 0, 0, 0]] * len(MASK)
WINDOW = [[OTHERS, MASK], [OTHERS, OTHERS]]


def counts() -> WindowCounts:
    flat = [row for rank in WINDOW for micro in rank for row in micro]
    return WindowCounts(len(flat), int(sum(map(sum, flat))), len(WINDOW[0]), len(WINDOW), L_MAX)


def oracle_weights(name: str) -> Rows:
    """The rank's own gradient: the update's weights times the number of ranks it will be divided by."""
    rows = update_weights(NORMALISER_OF[name], WINDOW, L_MAX)[0][1]
    return [[w * len(WINDOW) for w in row] for row in rows]


def core_settings(name: str, c: Choices) -> ObjectiveSettings:
    return ObjectiveSettings(
        objective=name,
        ratio_level=c.level,
        beta=c.beta,
        kl_estimator=c.kl,
        kl_in_loss=c.kl_in_loss,
        bias_correction_kl=c.bias_correction,
        off_policy_threshold=c.threshold,
        correction_mode=c.mode,
        correction_clip_min=c.c_min,
        correction_clip_max=c.c_max,
        surrogate=SurrogateSettings(
            epsilon_low=c.epsilon_low,
            epsilon_high=c.epsilon_high,
            delta=c.delta,
            sapo_temperature_pos=c.tau_pos,
            sapo_temperature_neg=c.tau_neg,
            vespo_k_pos=c.k_pos,
            vespo_lambda_pos=c.lambda_pos,
            vespo_k_neg=c.k_neg,
            vespo_lambda_neg=c.lambda_neg,
        ),
    )


def tensor(rows: Rows | None, dtype: torch.dtype = torch.float64) -> torch.Tensor | None:
    return None if rows is None else torch.tensor(rows, dtype=dtype)


def core_terms(name: str, b: Batch, dtype: torch.dtype = torch.float64) -> ObjectiveTerms:
    """Advantages go in as (B, 1) where they are the same along a row."""
    mask = tensor(b.mask, dtype)
    advantages = tensor(b.advantages, dtype)
    if all(len(set(row)) == 1 for row in b.advantages):
        advantages = advantages[:, :1]
    return ObjectiveTerms(
        logps_BT=tensor(b.logps, dtype).requires_grad_(),
        advantages_BX=advantages,
        mask_BT=mask,
        weights_BT=NORMALIZERS[OBJECTIVES[name].normalizer](mask, counts()),
        old_logps_BT=tensor(b.old, dtype),
        ref_logps_BT=tensor(b.ref, dtype),
        sampler_logps_BT=tensor(b.sampler, dtype),
        keep_BT=tensor(b.keep, dtype),
    )


def core_loss_and_gradient(name: str, terms: ObjectiveTerms, c: Choices) -> tuple[float, torch.Tensor]:
    loss, _ = evaluate(terms, core_settings(name, c))
    (gradient,) = torch.autograd.grad(loss, terms.logps_BT)
    return loss.item(), gradient


def rounded(b: Batch, dtype: torch.dtype) -> Batch:
    """The same batch with every number as that dtype holds it, so that only arithmetic differs."""

    def through(rows: Rows | None) -> Rows | None:
        return None if rows is None else torch.tensor(rows, dtype=dtype).double().tolist()

    fields = ("logps", "advantages", "old", "ref", "sampler")
    return replace(b, **{f: through(getattr(b, f)) for f in fields})
