"""Fixed inputs for the reference tests, and the bridge from the oracle's choices to the settings."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch

from groupwise.core.metrics import Metrics
from groupwise.core.objectives import OBJECTIVES, ObjectiveSettings, policy_loss
from groupwise.core.surrogates import SurrogateInputs, SurrogateSettings
from groupwise.core.weights import NORMALIZERS, WindowCounts
from support.oracles.oracle import NORMALISER_OF, Batch, Choices, Rows, update_weights

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
# Two completions per prompt; the rows of the other micro-batches are those of prompts 4 and 5.
GROUPS = [0, 0, 1, 1, 2, 2, 3, 3]
WIDTH = 6
L_MAX = 9


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The fields of a ``MicroBatch`` that the loss reads, and outputs of the policy.

    The defaults are those of an on-policy micro-batch.
    """

    logps_BT: torch.Tensor
    advantages_BX: torch.Tensor
    loss_mask_BT: torch.Tensor
    token_weights_BT: torch.Tensor
    old_logps_BT: torch.Tensor | None = None
    ref_logps_BT: torch.Tensor | None = None
    sampler_logps_BT: torch.Tensor | None = None
    entropy_BT: torch.Tensor | None = None
    entropy_mask_BT: torch.Tensor | None = None
    entropy_weights_BT: torch.Tensor | None = None
    correction_BX: torch.Tensor | None = None
    group_ids_B: torch.Tensor | None = None

    def __post_init__(self) -> None:
        defaults = {
            "old_logps_BT": torch.full_like(self.logps_BT, math.nan, requires_grad=False),
            "entropy_mask_BT": self.loss_mask_BT,
            "group_ids_B": torch.zeros(len(self.loss_mask_BT), dtype=torch.long),
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)


def evaluate(terms: Terms, settings: ObjectiveSettings) -> tuple[torch.Tensor, Metrics]:
    return policy_loss(terms, terms.logps_BT, terms.entropy_BT, settings)


def surrogate_inputs(log_ratio_BT: torch.Tensor, **fields: torch.Tensor | None) -> SurrogateInputs:
    """Inputs of one surrogate at token level; fields that are not given have neutral values."""
    defaults = {
        "logps_BT": torch.full_like(log_ratio_BT, -0.5, requires_grad=False),
        "old_logps_BT": torch.full_like(log_ratio_BT, -0.5, requires_grad=False),
        "ratio_BX": log_ratio_BT.exp(),
        "loss_mask_BT": torch.ones_like(log_ratio_BT, requires_grad=False),
        "group_ids_B": torch.zeros(len(log_ratio_BT), dtype=torch.long),
    }
    return SurrogateInputs(log_ratio_BT=log_ratio_BT, **{**defaults, **fields})


def weights(
    normalizer: str, mask_BT: torch.Tensor, counts: WindowCounts, group_ids_B: torch.Tensor | None = None
) -> torch.Tensor:
    groups = torch.zeros(len(mask_BT), dtype=torch.long) if group_ids_B is None else group_ids_B
    return NORMALIZERS[normalizer](mask_BT, groups, counts)


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
    tokens = dict.fromkeys(GROUPS, 0)
    for group, row in zip(GROUPS, MASK, strict=True):
        tokens[group] += sum(row)
    # The rows of the three other micro-batches belong to prompts 4 and 5.
    tokens |= {4: 12 * sum(OTHERS[0]), 5: 12 * sum(OTHERS[0])}
    return WindowCounts(len(flat), int(sum(map(sum, flat))), len(WINDOW[0]), len(WINDOW), L_MAX, tokens)


def oracle_weights(name: str) -> Rows:
    """The rank's own gradient: the update's weights times the number of ranks it will be divided by."""
    rows = update_weights(NORMALISER_OF[name], WINDOW, L_MAX)[0][1]
    return [[w * len(WINDOW) for w in row] for row in rows]


def core_settings(name: str, c: Choices) -> ObjectiveSettings:
    return ObjectiveSettings(
        loss_type=name,
        importance_sampling_level=c.level,
        beta=c.beta,
        kl_estimator=c.kl,
        kl_in_reward=not c.kl_in_loss,
        use_bias_correction_kl=c.bias_correction,
        off_policy_mask_threshold=c.threshold,
        vllm_importance_sampling_mode=c.mode,
        vllm_importance_sampling_clip_min=c.c_min,
        vllm_importance_sampling_clip_max=c.c_max,
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


def core_terms(name: str, b: Batch, dtype: torch.dtype = torch.float64) -> Terms:
    """Advantages go in as (B, 1) where they are the same along a row."""
    mask = tensor(b.mask, dtype)
    advantages = tensor(b.advantages, dtype)
    if all(len(set(row)) == 1 for row in b.advantages):
        advantages = advantages[:, :1]
    groups = torch.tensor(GROUPS[: len(mask)])
    return Terms(
        logps_BT=tensor(b.logps, dtype).requires_grad_(),
        advantages_BX=advantages,
        loss_mask_BT=mask,
        token_weights_BT=weights(OBJECTIVES[name].normalizer, mask, counts(), groups),
        group_ids_B=groups,
        old_logps_BT=tensor(b.old, dtype),
        ref_logps_BT=tensor(b.ref, dtype),
        sampler_logps_BT=tensor(b.sampler, dtype),
        entropy_mask_BT=tensor(b.keep, dtype),
    )


def core_loss_and_gradient(name: str, terms: Terms, c: Choices) -> tuple[float, torch.Tensor]:
    loss, _ = evaluate(terms, core_settings(name, c))
    (gradient,) = torch.autograd.grad(loss, terms.logps_BT)
    return loss.item(), gradient


def rounded(b: Batch, dtype: torch.dtype) -> Batch:
    """The same batch with every number as that dtype holds it, so that only arithmetic differs."""

    def through(rows: Rows | None) -> Rows | None:
        return None if rows is None else torch.tensor(rows, dtype=dtype).double().tolist()

    fields = ("logps", "advantages", "old", "ref", "sampler")
    return replace(b, **{f: through(getattr(b, f)) for f in fields})
