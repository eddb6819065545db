"""What Liger's fused loss (``use_liger_kernel``) cannot express, as one rule over a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from groupwise.config.rules import Rule, join_lines

LIGER_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
# What Liger's fused loss cannot express: (refused, what was given, what is allowed, why, the nearest valid)
LIGER_LIMITS: tuple[tuple[Callable[[Any], bool], str, str, str, str], ...] = (
    (
        lambda c: c.loss_type not in LIGER_LOSSES,
        "loss_type={c.loss_type!r}",
        "one of " + ", ".join(LIGER_LOSSES),
        "Liger has its own surrogates",
        "use_liger_kernel=False",
    ),
    (
        lambda c: c.importance_sampling_level == "sequence" and c.loss_type in ("cispo", "sapo", "vespo"),
        "importance_sampling_level='sequence' with loss_type={c.loss_type!r}",
        "'token' for cispo, sapo and vespo",
        "Liger has no sequence ratio there",
        "importance_sampling_level='token'",
    ),
    (
        lambda c: c.loss_type == "luspo" and (c.importance_sampling_level != "sequence" or _kl_in_loss(c)),
        "loss_type='luspo' with importance_sampling_level={c.importance_sampling_level!r} and beta={c.beta}",
        "'sequence' without a KL in the loss",
        "Liger averages the terms of single tokens over padding too",
        "use_liger_kernel=False",
    ),
    (
        lambda c: _kl_in_loss(c) and c.kl_estimator != "k3",
        "kl_estimator={c.kl_estimator!r}",
        "'k3'",
        "Liger has no other",
        "kl_estimator='k3'",
    ),
    (
        lambda c: c.off_policy_mask_threshold is not None,
        "off_policy_mask_threshold={c.off_policy_mask_threshold}",
        "None",
        "Liger masks no sequence by its log-probs",
        "off_policy_mask_threshold=None",
    ),
    (
        lambda c: c.top_entropy_quantile < 1,
        "top_entropy_quantile={c.top_entropy_quantile}",
        "1.0",
        "Liger has one mask for policy loss and KL",
        "top_entropy_quantile=1.0",
    ),
    (
        lambda c: c.entropy_coef != 0 or c.use_adaptive_entropy,
        "entropy_coef={c.entropy_coef} with use_adaptive_entropy={c.use_adaptive_entropy}",
        "0.0 and False",
        "Liger computes no entropy",
        "use_liger_kernel=False",
    ),
    (
        lambda c: c.sequence_layout not in ("auto", "padded"),
        "sequence_layout={c.sequence_layout!r}",
        "'auto' or 'padded'",
        "Liger takes rectangular batches",
        "sequence_layout='padded'",
    ),
)


def _kl_in_loss(config: Any) -> bool:
    return config.beta != 0 and not config.kl_in_reward


def _beyond_liger(config: Any) -> dict[str, str]:
    if not config.use_liger_kernel:
        return {}
    return {
        given: f"use_liger_kernel=True with {given.format(c=config)}: {reason}; allowed: {allowed}; "
        f"nearest valid: {nearest}"
        for refused, given, allowed, reason, nearest in LIGER_LIMITS
        if refused(config)
    }


LIGER_RULES = (
    Rule(
        "beyond_liger",
        lambda c: bool(_beyond_liger(c)),
        lambda c: join_lines(_beyond_liger(c)),
        {"use_liger_kernel": True, "entropy_coef": 0.1},
    ),
)
