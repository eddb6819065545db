"""Limits of Liger's fused loss (``use_liger_kernel``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from groupwise.config.sampling import truncating

if TYPE_CHECKING:
    from groupwise.config.grpo_config import GRPOConfig

LIGER_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


class LigerLimit(NamedTuple):
    """Combination that Liger's fused loss cannot compute; ``given`` is a format string over the config c."""

    exceeded: Callable[[GRPOConfig], bool]
    given: str
    allowed: str
    reason: str
    nearest: str


def _kl_in_loss(c: GRPOConfig) -> bool:
    return c.beta != 0 and not c.kl_in_reward


LIGER_LIMITS = (
    LigerLimit(
        lambda c: c.loss_type not in LIGER_LOSSES,
        "loss_type={c.loss_type!r}",
        "one of " + ", ".join(LIGER_LOSSES),
        "Liger has its own surrogates",
        "use_liger_kernel=False",
    ),
    LigerLimit(
        lambda c: c.importance_sampling_level == "sequence" and c.loss_type in ("cispo", "sapo", "vespo"),
        "importance_sampling_level='sequence' with loss_type={c.loss_type!r}",
        "'token' for cispo, sapo and vespo",
        "Liger has no sequence ratio there",
        "importance_sampling_level='token'",
    ),
    LigerLimit(
        lambda c: c.loss_type == "luspo" and (c.importance_sampling_level != "sequence" or _kl_in_loss(c)),
        "loss_type='luspo' with importance_sampling_level={c.importance_sampling_level!r} and beta={c.beta}",
        "'sequence' without a KL in the loss",
        "Liger includes padding in the mean of token terms",
        "use_liger_kernel=False",
    ),
    LigerLimit(
        lambda c: _kl_in_loss(c) and c.kl_estimator != "k3",
        "kl_estimator={c.kl_estimator!r}",
        "'k3'",
        "Liger has no other estimator",
        "kl_estimator='k3'",
    ),
    LigerLimit(
        lambda c: c.off_policy_mask_threshold is not None,
        "off_policy_mask_threshold={c.off_policy_mask_threshold}",
        "None",
        "Liger has no off-policy sequence mask",
        "off_policy_mask_threshold=None",
    ),
    LigerLimit(
        lambda c: c.top_entropy_quantile < 1,
        "top_entropy_quantile={c.top_entropy_quantile}",
        "1.0",
        "Liger has one mask for policy loss and KL",
        "top_entropy_quantile=1.0",
    ),
    LigerLimit(
        lambda c: c.entropy_coef != 0 or c.use_adaptive_entropy,
        "entropy_coef={c.entropy_coef} with use_adaptive_entropy={c.use_adaptive_entropy}",
        "0.0 and False",
        "Liger computes no entropy",
        "use_liger_kernel=False",
    ),
    LigerLimit(
        lambda c: bool(truncating(c)),
        "top_p={c.top_p}, top_k={c.top_k}, min_p={c.min_p} and generation_kwargs={c.generation_kwargs}",
        "settings that do not truncate the sampling distribution",
        "Liger's log-probs are of the full distribution",
        "use_liger_kernel=False",
    ),
    LigerLimit(
        lambda c: c.sequence_layout not in ("auto", "padded"),
        "sequence_layout={c.sequence_layout!r}",
        "'auto' or 'padded'",
        "Liger requires rectangular batches",
        "sequence_layout='padded'",
    ),
    LigerLimit(
        lambda c: c.logprob_head != "auto",
        "logprob_head={c.logprob_head!r}",
        "'auto'",
        "Liger's fused loss has its own head",
        "logprob_head='auto'",
    ),
)
