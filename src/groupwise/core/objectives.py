"""The table of objectives: every loss is a surrogate times token weights.

    L = Σ_{i,t} w_it · [ c_i(t) · ℓ(ρ_it, A_it) + β · KL_it ]

To add one, write a surrogate (or take one), choose a normaliser and call :func:`register_objective`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from groupwise.core import surrogates
from groupwise.core.corrections import sampler_correction, sampler_log_gap
from groupwise.core.kl import KL_ESTIMATORS
from groupwise.core.masks import off_policy_keep
from groupwise.core.metrics import Max, Mean, Metrics, Min, masked_mean
from groupwise.core.ratios import RATIO_LEVELS
from groupwise.core.surrogates import SurrogateSettings, SurrogateTerms
from groupwise.core.weights import NORMALIZERS

Surrogate = Callable[[SurrogateTerms, SurrogateSettings], torch.Tensor]
Diagnostics = Callable[[SurrogateTerms, SurrogateSettings], Metrics]


@dataclass(frozen=True)
class Objective:
    """A member of the family.

    surrogate: per-token loss before weights.
    normalizer: a name in ``NORMALIZERS``.
    diagnostics: extra metrics from the same inputs.
    applies_sampler_correction: the surrogate applies the sampler correction itself.
    zero_grad_at_zero_advantage: the surrogate has no gradient where the advantage is zero.
    """

    name: str
    surrogate: Surrogate
    normalizer: str
    diagnostics: Diagnostics | None = None
    applies_sampler_correction: bool = False
    zero_grad_at_zero_advantage: bool = False


@dataclass(frozen=True)
class ObjectiveSettings:
    """Choices that are independent of the objective's name."""

    objective: str = "dapo"
    ratio_level: str = "token"
    beta: float = 0.0
    kl_estimator: str = "k3"
    kl_in_loss: bool = True
    bias_correction_kl: bool = False
    off_policy_threshold: float | None = None
    correction_mode: str | None = "sequence_mask"
    correction_clip_min: float | None = None
    correction_clip_max: float | None = 3.0
    surrogate: SurrogateSettings = field(default_factory=SurrogateSettings)


@dataclass(frozen=True)
class ObjectiveTerms:
    """Inputs of one micro-batch.

    logps_BT: log π_θ at the sampling temperature, differentiable.
    old_logps_BT: log π_old; None when the data are exactly on-policy, which means sg(ℓ).
    ref_logps_BT, sampler_logps_BT: None when there is no reference, or no separate sampler.
    entropy_BT: token entropies, differentiable; needed for the entropy bonus.
    advantages_BX: (B, 1) or (B, T).
    mask_BT: loss mask, ones and zeros.
    weights_BT: token weights, zero off the mask.
    keep_BT: tokens whose surrogate is kept by the entropy quantile; None keeps all.
    entropy_weights_BT: weights of the entropy bonus, coefficient included; None means no bonus.
    """

    logps_BT: torch.Tensor
    advantages_BX: torch.Tensor
    mask_BT: torch.Tensor
    weights_BT: torch.Tensor
    old_logps_BT: torch.Tensor | None = None
    ref_logps_BT: torch.Tensor | None = None
    sampler_logps_BT: torch.Tensor | None = None
    entropy_BT: torch.Tensor | None = None
    keep_BT: torch.Tensor | None = None
    entropy_weights_BT: torch.Tensor | None = None


def evaluate(terms: ObjectiveTerms, settings: ObjectiveSettings) -> tuple[torch.Tensor, Metrics]:
    """The scalar loss of one micro-batch and its metrics.

    The losses of the micro-batches of a window add up to the loss of the window: the weights already hold
    every normalisation, so nothing is divided afterwards.

    Returns:
        loss: scalar, differentiable.
        metrics: typed reductions.
    """
    objective = OBJECTIVES[settings.objective]
    mask_BT = terms.mask_BT.to(terms.logps_BT.dtype)
    old_logps_BT = terms.logps_BT.detach() if terms.old_logps_BT is None else terms.old_logps_BT
    # Padding may hold any number: zeros there keep every exp() finite and the gradient exactly zero.
    off_BT = mask_BT == 0
    logps_BT = terms.logps_BT.masked_fill(off_BT, 0.0)
    log_ratio_BT = (terms.logps_BT - old_logps_BT).masked_fill(off_BT, 0.0)
    ratio_BX = RATIO_LEVELS[settings.ratio_level](log_ratio_BT, mask_BT).exp()
    correction_BX, metrics = correction(terms, settings, old_logps_BT, mask_BT)
    folded = objective.applies_sampler_correction and correction_BX is not None
    surrogate_terms = SurrogateTerms(
        ratio_BX=ratio_BX,
        advantages_BX=terms.advantages_BX,
        logps_BT=logps_BT,
        log_ratio_BT=log_ratio_BT,
        mask_BT=mask_BT,
        log_correction_BX=_log_correction(correction_BX, off_BT) if folded else None,  # type: ignore[arg-type]
    )
    per_token_BX = objective.surrogate(surrogate_terms, settings.surrogate)
    if settings.off_policy_threshold is not None:
        behaviour_BT = old_logps_BT if terms.sampler_logps_BT is None else terms.sampler_logps_BT
        per_token_BX = per_token_BX * off_policy_keep(
            terms.advantages_BX, terms.logps_BT, behaviour_BT, mask_BT, settings.off_policy_threshold
        )
    if terms.keep_BT is not None:
        per_token_BX = per_token_BX * terms.keep_BT
    if correction_BX is not None and not folded:
        per_token_BX = per_token_BX * correction_BX
    loss = (per_token_BX * terms.weights_BT).sum()
    if terms.ref_logps_BT is not None:
        kl_BT = KL_ESTIMATORS[settings.kl_estimator](logps_BT, terms.ref_logps_BT.masked_fill(off_BT, 0.0))
        if settings.bias_correction_kl:
            kl_BT = kl_BT * ratio_BX
        if settings.kl_in_loss:
            loss = loss + settings.beta * (kl_BT * terms.weights_BT).sum()
        metrics["kl"] = masked_mean(kl_BT, mask_BT)
    if terms.entropy_weights_BT is not None and terms.entropy_BT is not None:
        metrics["policy_loss"] = Mean(loss.detach())
        loss = loss - (terms.entropy_BT * terms.entropy_weights_BT).sum()
    if terms.entropy_BT is not None:
        metrics["entropy"] = masked_mean(terms.entropy_BT, mask_BT)
    if objective.diagnostics is not None:
        metrics.update(objective.diagnostics(surrogate_terms, settings.surrogate))
    return loss, metrics


def correction(
    terms: ObjectiveTerms, settings: ObjectiveSettings, old_logps_BT: torch.Tensor, mask_BT: torch.Tensor
) -> tuple[torch.Tensor | None, Metrics]:
    """The sampler correction, if there is a separate sampler, and how far that sampler is off."""
    if terms.sampler_logps_BT is None:
        return None, {}
    gap_BT = sampler_log_gap(old_logps_BT.detach(), terms.sampler_logps_BT, mask_BT)
    reported_BT = mask_BT * ~terms.sampler_logps_BT.isnan()
    metrics: Metrics = {
        "sampling/sampling_logp_difference/mean": masked_mean(gap_BT.abs(), reported_BT),
        "sampling/sampling_logp_difference/max": Max(gap_BT.abs().max()),
    }
    if settings.correction_mode is None:
        return None, metrics
    correction_BX = sampler_correction(
        gap_BT, settings.correction_mode, settings.correction_clip_min, settings.correction_clip_max
    )
    # A row without loss tokens has no ratio worth reporting; a padded token has none either.
    present_BX = mask_BT if correction_BX.shape[1] > 1 else mask_BT.amax(-1, keepdim=True)
    absent_BX = present_BX == 0
    metrics["sampling/importance_sampling_ratio/mean"] = Mean(
        (correction_BX * present_BX).sum(), present_BX.sum()
    )
    metrics["sampling/importance_sampling_ratio/min"] = Min(
        correction_BX.masked_fill(absent_BX, torch.inf).min()
    )
    metrics["sampling/importance_sampling_ratio/max"] = Max(
        correction_BX.masked_fill(absent_BX, -torch.inf).max()
    )
    return correction_BX, metrics


def _log_correction(correction_BX: torch.Tensor, off_BT: torch.Tensor) -> torch.Tensor:
    """Bounds that exclude 1 give a padded token a factor other than 1, whose log would count in the sum."""
    log_BX = correction_BX.log()
    return log_BX if log_BX.shape != off_BT.shape else log_BX.masked_fill(off_BT, 0.0)


def _clip_diagnostics(terms: SurrogateTerms, settings: SurrogateSettings) -> Metrics:
    """Share of tokens (sequences, at sequence level) whose gradient the clip removes, by side."""
    ratio_BX = terms.ratio_BX.detach()
    low_BX = ((ratio_BX < 1 - settings.epsilon_low) & (terms.advantages_BX < 0)).float()
    high_BX = ((ratio_BX > 1 + settings.epsilon_high) & (terms.advantages_BX > 0)).float()
    low_B, high_B = _per_sequence(low_BX, terms.mask_BT), _per_sequence(high_BX, terms.mask_BT)
    return {
        "clip_ratio/low_mean": masked_mean(low_BX, terms.mask_BT),
        "clip_ratio/low_min": Min(low_B.min()),
        "clip_ratio/high_mean": masked_mean(high_BX, terms.mask_BT),
        "clip_ratio/high_max": Max(high_B.max()),
        "clip_ratio/region_mean": masked_mean(low_BX + high_BX, terms.mask_BT),
    }


def _per_sequence(values_BX: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    if values_BX.shape[1] == 1:
        return values_BX.squeeze(1)
    return (values_BX * mask_BT).sum(-1) / mask_BT.sum(-1).clamp(min=1)


def _cispo_diagnostics(terms: SurrogateTerms, settings: SurrogateSettings) -> Metrics:
    cut_BX = (terms.ratio_BX.detach() > settings.epsilon_high) & (terms.advantages_BX > 0)
    return {"cispo_clip_ratio": masked_mean(cut_BX.float(), terms.mask_BT)}


def _vespo_diagnostics(terms: SurrogateTerms, settings: SurrogateSettings) -> Metrics:
    return {"vespo/phi_seq_mean": masked_mean(surrogates.vespo_gate(terms, settings), terms.mask_BT)}


OBJECTIVES: dict[str, Objective] = {}


def register_objective(
    name: str,
    surrogate: Surrogate,
    normalizer: str,
    *,
    diagnostics: Diagnostics | None = None,
    applies_sampler_correction: bool = False,
    zero_grad_at_zero_advantage: bool = False,
) -> None:
    """Make ``loss_type=name`` available.

    Args:
        surrogate: ``(SurrogateTerms, SurrogateSettings) -> (B, T) or (B, 1)`` per-token loss, to be
            minimised.
        normalizer: one of ``sequence_mean``, ``local_token_mean``, ``constant_length``, ``token_mean``,
            ``sequence_sum``.
        diagnostics: optional ``(SurrogateTerms, SurrogateSettings) -> {name: reduction}``.
        applies_sampler_correction: the surrogate reads ``log_correction_BX`` itself.
        zero_grad_at_zero_advantage: the gradient is zero where the advantage is zero, so that such rows
            need not be computed.

    Raises:
        ValueError: the name is taken, or the normaliser is unknown.
    """
    if name in OBJECTIVES:
        raise ValueError(
            f"objective {name!r} is already registered; registered: {', '.join(sorted(OBJECTIVES))}"
        )
    if normalizer not in NORMALIZERS:
        raise ValueError(f"normalizer={normalizer!r} is unknown; allowed: {', '.join(sorted(NORMALIZERS))}")
    OBJECTIVES[name] = Objective(
        name, surrogate, normalizer, diagnostics, applies_sampler_correction, zero_grad_at_zero_advantage
    )


#: Every surrogate of the family is a factor times the advantage.
_BUILT_IN: dict[str, Any] = {"zero_grad_at_zero_advantage": True}
for _name, _normalizer in {
    "grpo": "sequence_mean",
    "bnpo": "local_token_mean",
    "dr_grpo": "constant_length",
    "dapo": "token_mean",
    "luspo": "sequence_sum",
}.items():
    register_objective(_name, surrogates.clipped, _normalizer, diagnostics=_clip_diagnostics, **_BUILT_IN)
register_objective("cispo", surrogates.cispo, "token_mean", diagnostics=_cispo_diagnostics, **_BUILT_IN)
register_objective("sapo", surrogates.sapo, "sequence_mean", **_BUILT_IN)
register_objective(
    "vespo",
    surrogates.vespo,
    "token_mean",
    diagnostics=_vespo_diagnostics,
    applies_sampler_correction=True,
    **_BUILT_IN,
)
