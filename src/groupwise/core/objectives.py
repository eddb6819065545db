"""The table of objectives: every loss is a surrogate times token weights.

    L = Σ_{i,t} w_it · [ c_it · ℓ(ρ_it, A_it) + β · KL_it ]

:func:`register_objective` adds a row: a surrogate (``groupwise.core.surrogates``), a normalizer
(``groupwise.core.weights``) and, if it has hyperparameters of its own, a dataclass of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from groupwise.core import surrogates
from groupwise.core.kl import KL_ESTIMATORS
from groupwise.core.metrics import Max, Mean, Metrics, Min, masked_mean
from groupwise.core.ratios import RATIO_LEVELS, off_policy_keep, sampler_correction, sampler_log_gap
from groupwise.core.surrogates import SurrogateInputs, SurrogateSettings
from groupwise.core.weights import NORMALIZERS
from groupwise.registry import Registry

if TYPE_CHECKING:
    from groupwise.records import MicroBatch

#: The second argument is the objective's own settings, or :class:`SurrogateSettings` if it has none.
Surrogate = Callable[[SurrogateInputs, Any], torch.Tensor]
Diagnostics = Callable[[SurrogateInputs, Any], Metrics]


@dataclass(frozen=True)
class Objective:
    """Entry of ``OBJECTIVES``; see :func:`register_objective` for the fields."""

    surrogate: Surrogate
    normalizer: str
    settings: type | None = None
    diagnostics: Diagnostics | None = None
    applies_sampler_correction: bool = False
    zero_grad_at_zero_advantage: bool = False

    def surrogate_settings(self, built_in: SurrogateSettings, loss_kwargs: Mapping[str, Any]) -> object:
        """Return the second argument of the surrogate: the objective's own settings, else ``built_in``.

        Raises:
            TypeError: ``loss_kwargs`` has a name that the dataclass lacks.
        """
        return built_in if self.settings is None else self.settings(**loss_kwargs)


@dataclass(frozen=True)
class ObjectiveSettings:
    """Settings of the loss in one optimizer step, named as their ``GRPOConfig`` fields.

    vllm_importance_sampling_mode: None: the loss has no sampler correction.
    truncation_unknown: sampler log-probs are of a truncated distribution, all others of the full one.
    surrogate: second argument of the surrogate, from :meth:`Objective.surrogate_settings`.
    """

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    beta: float = 0.0
    kl_estimator: str = "k3"
    kl_in_reward: bool = False
    use_bias_correction_kl: bool = False
    off_policy_mask_threshold: float | None = None
    vllm_importance_sampling_mode: str | None = "sequence_mask"
    vllm_importance_sampling_clip_min: float | None = None
    vllm_importance_sampling_clip_max: float | None = 3.0
    truncation_unknown: bool = False
    surrogate: Any = field(default_factory=SurrogateSettings)


def policy_loss(
    batch: MicroBatch, logps_BT: torch.Tensor, entropy_BT: torch.Tensor | None, settings: ObjectiveSettings
) -> tuple[torch.Tensor, Metrics]:
    """Compute the loss of one micro-batch.

    The losses of the micro-batches of a window add up to the loss of the window: the token weights hold every
    normalization.

    Args:
        batch: advantages, masks, log-probs and weights of the micro-batch.
        logps_BT: log π_θ of the completion tokens at the sampling temperature, differentiable.
        entropy_BT: token entropies, differentiable; None: no entropy metric and no entropy bonus.

    Returns:
        loss: scalar, differentiable.
        metrics: typed reductions.
    """
    objective = OBJECTIVES[settings.loss_type]
    mask_BT = batch.loss_mask_BT.to(logps_BT.dtype)  # (B, T) of ones and zeros
    # NaN: the behaviour policy is the current one, ℓ_old = sg(ℓ), and the ratio is exactly 1.
    old_logps_BT = torch.where(batch.old_logps_BT.isnan(), logps_BT.detach(), batch.old_logps_BT)
    # π_old / π_sampler, bounded.
    correction_BX, metrics = correction(old_logps_BT, batch.sampler_logps_BT, mask_BT, settings)
    if batch.correction_BX is not None:  # computed before the window
        correction_BX = batch.correction_BX
    inputs = _surrogate_inputs(batch, logps_BT, old_logps_BT, mask_BT, correction_BX, settings)
    per_token_BX = objective.surrogate(inputs, settings.surrogate)  # (B, T) or (B, 1)
    if settings.off_policy_mask_threshold is not None:
        # The policy that sampled.
        behaviour_BT = old_logps_BT if batch.sampler_logps_BT is None else batch.sampler_logps_BT
        per_token_BX = per_token_BX * off_policy_keep(  # (B, X), 0 on drifted rows with A < 0
            batch.advantages_BX, logps_BT, behaviour_BT, mask_BT, settings.off_policy_mask_threshold
        )
    per_token_BX = per_token_BX * batch.entropy_mask_BT  # (B, T), 1 on tokens of high entropy, all by default
    if correction_BX is not None and not objective.applies_sampler_correction:
        per_token_BX = per_token_BX * correction_BX
    loss = (per_token_BX * batch.token_weights_BT).sum()  # weights hold mask and divisor; 0 on padding
    if inputs.ref_logps_BT is not None:
        # (B, T), 0 while the policy is the reference.
        kl_BT = KL_ESTIMATORS[settings.kl_estimator](inputs.logps_BT, inputs.ref_logps_BT)
        if settings.use_bias_correction_kl:
            kl_BT = kl_BT * inputs.ratio_BX  # samples are of π_old, the KL is under π_θ
        if not settings.kl_in_reward:
            # The same weights: β is per token of the objective.
            loss = loss + settings.beta * (kl_BT * batch.token_weights_BT).sum()
        metrics["kl"] = masked_mean(kl_BT, mask_BT)
    if entropy_BT is not None:
        if batch.entropy_weights_BT is not None:
            metrics["policy_loss"] = Mean(loss.detach())  # without the bonus
            loss = loss - (entropy_BT * batch.entropy_weights_BT).sum()  # coefficient / tokens of the window
        metrics["entropy"] = masked_mean(entropy_BT, mask_BT)
    if objective.diagnostics is not None:
        metrics.update(objective.diagnostics(inputs, settings.surrogate))
    return loss, metrics


def _surrogate_inputs(
    batch: MicroBatch,
    logps_BT: torch.Tensor,
    old_logps_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    correction_BX: torch.Tensor | None,
    settings: ObjectiveSettings,
) -> SurrogateInputs:
    # Padding may hold any number: zeros there keep every exp() finite and the gradient exactly zero.
    off_BT = mask_BT == 0
    # ℓ - ℓ_old, 0 in value on the first pass.
    log_ratio_BT = (logps_BT - old_logps_BT).masked_fill(off_BT, 0.0)
    ref_BT, sampler_BT = batch.ref_logps_BT, batch.sampler_logps_BT
    if sampler_BT is not None:
        sampler_BT = torch.where(sampler_BT.isfinite(), sampler_BT, old_logps_BT).masked_fill(off_BT, 0.0)
    log_correction_BX = None
    if correction_BX is not None and OBJECTIVES[settings.loss_type].applies_sampler_correction:
        log_correction_BX = correction_BX.log()  # -inf where the mask modes drop a factor
        if log_correction_BX.shape == off_BT.shape:
            # Bounds that exclude 1 give a padded token a factor other than 1, whose log a sum would contain.
            log_correction_BX = log_correction_BX.masked_fill(off_BT, 0.0)
    return SurrogateInputs(
        logps_BT=logps_BT.masked_fill(off_BT, 0.0),
        old_logps_BT=old_logps_BT.masked_fill(off_BT, 0.0),
        ref_logps_BT=None if ref_BT is None else ref_BT.masked_fill(off_BT, 0.0),
        sampler_logps_BT=sampler_BT,
        log_ratio_BT=log_ratio_BT,
        # (B, T), or (B, 1) for GSPO.
        ratio_BX=RATIO_LEVELS[settings.importance_sampling_level](log_ratio_BT, mask_BT).exp(),
        log_correction_BX=log_correction_BX,
        advantages_BX=batch.advantages_BX,
        loss_mask_BT=mask_BT,
        group_ids_B=batch.group_ids_B,
    )


def correction(
    old_logps_BT: torch.Tensor,
    sampler_logps_BT: torch.Tensor | None,
    mask_BT: torch.Tensor,
    settings: ObjectiveSettings,
) -> tuple[torch.Tensor | None, Metrics]:
    """Compute the sampler correction and the ``sampling/`` metrics.

    Returns:
        correction_BX: (B, T) or (B, 1), no gradient; None without a separate sampler or a correction mode.
        metrics: empty without a separate sampler.
    """
    if sampler_logps_BT is None:
        return None, {}
    # ℓ_old - ℓ_sampler, 0 where not reported.
    gap_BT = sampler_log_gap(old_logps_BT.detach(), sampler_logps_BT, mask_BT)
    reported_BT = mask_BT * ~sampler_logps_BT.isnan()  # (B, T)
    metrics: Metrics = {
        "sampling/sampling_logp_difference/mean": masked_mean(gap_BT.abs(), reported_BT),
        "sampling/sampling_logp_difference/max": Max(gap_BT.abs().max()),
    }
    if settings.truncation_unknown:  # the sampler divided probabilities by the kept mass: d = log(kept mass)
        truncated_BT = -torch.expm1(gap_BT.clamp(max=0.0))  # 1 - kept mass, seen at the sampled token
        metrics["sampling/truncated_mass/mean"] = masked_mean(truncated_BT, reported_BT)
        metrics["sampling/truncated_mass/max"] = Max(truncated_BT.max())
    if (mode := settings.vllm_importance_sampling_mode) is None:
        return None, metrics
    low, high = settings.vllm_importance_sampling_clip_min, settings.vllm_importance_sampling_clip_max
    correction_BX = sampler_correction(gap_BT, mode, low, high)
    # Padded tokens, and rows without loss tokens, have factor 1 and are left out of the metrics.
    present_BX = mask_BT if correction_BX.shape[1] > 1 else mask_BT.amax(-1, keepdim=True)
    absent_BX = present_BX == 0
    name = "sampling/importance_sampling_ratio"
    metrics[f"{name}/mean"] = Mean((correction_BX * present_BX).sum(), present_BX.sum())
    metrics[f"{name}/min"] = Min(correction_BX.masked_fill(absent_BX, torch.inf).min())
    metrics[f"{name}/max"] = Max(correction_BX.masked_fill(absent_BX, -torch.inf).max())
    return correction_BX, metrics


def clip_metrics(inputs: SurrogateInputs, settings: SurrogateSettings) -> Metrics:
    """Share of tokens (sequences, at sequence level) whose gradient the clip removes, by side."""
    ratio_BX, mask_BT = inputs.ratio_BX.detach(), inputs.loss_mask_BT  # (B, T) or (B, 1)
    # A < 0 pushes ρ down: clipped below.
    low_BX = ((ratio_BX < 1 - settings.epsilon_low) & (inputs.advantages_BX < 0)).float()
    # A > 0 pushes ρ up: clipped above.
    high_BX = ((ratio_BX > 1 + settings.epsilon_high) & (inputs.advantages_BX > 0)).float()
    low_B, high_B = _per_sequence(low_BX, mask_BT), _per_sequence(high_BX, mask_BT)  # share of each row
    return {
        "clip_ratio/low_mean": masked_mean(low_BX, mask_BT),
        "clip_ratio/low_min": Min(low_B.min()),
        "clip_ratio/high_mean": masked_mean(high_BX, mask_BT),
        "clip_ratio/high_max": Max(high_B.max()),
        "clip_ratio/region_mean": masked_mean(low_BX + high_BX, mask_BT),
    }


def _per_sequence(values_BX: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    if values_BX.shape[1] == 1:
        return values_BX.squeeze(1)  # a sequence ratio is clipped whole
    return (values_BX * mask_BT).sum(-1) / mask_BT.sum(-1).clamp(min=1)  # mean over loss tokens


def cispo_metrics(inputs: SurrogateInputs, settings: SurrogateSettings) -> Metrics:
    """Share of tokens with a positive advantage whose weight is clipped."""
    clipped_BX = (inputs.ratio_BX.detach() > settings.epsilon_high) & (inputs.advantages_BX > 0)
    return {"cispo_clip_ratio": masked_mean(clipped_BX.float(), inputs.loss_mask_BT)}


def vespo_metrics(inputs: SurrogateInputs, settings: SurrogateSettings) -> Metrics:
    """Mean gate φ(w_i)."""
    return {"vespo/phi_seq_mean": masked_mean(surrogates.vespo_gate(inputs, settings), inputs.loss_mask_BT)}


OBJECTIVES: Registry[Objective] = Registry("objective")


def register_objective(
    name: str,
    surrogate: Surrogate,
    normalizer: str,
    *,
    settings: type | None = None,
    diagnostics: Diagnostics | None = None,
    applies_sampler_correction: bool = False,
    zero_grad_at_zero_advantage: bool = False,
) -> None:
    """Make ``loss_type=name`` available.

    Args:
        surrogate: ``(SurrogateInputs, settings) -> (B, T) or (B, 1)`` per-token loss, to be minimised. It
            must treat rows independently: micro-batches are rebalanced, and rows of one prompt may be apart.
        normalizer: a built-in one (``sequence_mean``, ``local_token_mean``, ``constant_length``,
            ``token_mean``, ``sequence_sum``) or one of :func:`register_normalizer`.
        settings: dataclass of the surrogate's own hyperparameters, set with ``GRPOConfig.loss_kwargs``; the
            surrogate gets an instance as its second argument. None: it gets :class:`SurrogateSettings`.
        diagnostics: ``(SurrogateInputs, settings) -> {name: reduction}``, metrics to log.
        applies_sampler_correction: the surrogate corrects for the sampler itself, from ``log_correction_BX``
            or ``sampler_logps_BT``; otherwise its output is multiplied by the correction.
        zero_grad_at_zero_advantage: the gradient is zero where the advantage is zero; such rows are skipped.

    Raises:
        ConfigError: the name is taken, or the normalizer is unknown.
    """
    NORMALIZERS[normalizer]  # an unknown name fails here, not in the first step
    objective = Objective(
        surrogate,
        normalizer,
        settings,
        diagnostics,
        applies_sampler_correction,
        zero_grad_at_zero_advantage,
    )
    OBJECTIVES.register(name, objective)


# loss_type, surrogate, normalizer, metrics. Every surrogate is a factor times the advantage: no gradient
# where it is 0.
for _name, _surrogate, _normalizer, _metrics in (
    ("grpo", surrogates.clipped, "sequence_mean", clip_metrics),
    ("bnpo", surrogates.clipped, "local_token_mean", clip_metrics),
    ("dr_grpo", surrogates.clipped, "constant_length", clip_metrics),
    ("dapo", surrogates.clipped, "token_mean", clip_metrics),
    ("luspo", surrogates.clipped, "sequence_sum", clip_metrics),
    ("cispo", surrogates.cispo, "token_mean", cispo_metrics),
    ("sapo", surrogates.sapo, "sequence_mean", None),
    ("vespo", surrogates.vespo, "token_mean", vespo_metrics),
):
    register_objective(
        _name,
        _surrogate,
        _normalizer,
        diagnostics=_metrics,
        applies_sampler_correction=_name == "vespo",
        zero_grad_at_zero_advantage=True,
    )
