"""Micro-batches to losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.entropy import EntropyControl
from groupwise.core.metrics import Mean, Metrics, masked_mean
from groupwise.core.objectives import OBJECTIVES, ObjectiveSettings, ObjectiveTerms, evaluate
from groupwise.core.surrogates import SurrogateSettings
from groupwise.core.weights import NORMALIZERS, WindowCounts
from groupwise.records import Experience, LogprobOutput, LossOutput, MicroBatch


class LossMixin:
    """Owns the objective's settings and the state of the entropy bonus."""

    args: GRPOConfig
    accelerator: Accelerator
    objective_settings: ObjectiveSettings
    entropy_control: EntropyControl
    router_aux_loss_coef: float

    def set_token_weights(
        self,
        window: Sequence[Experience],
        entropy_masks: Sequence[torch.Tensor],
        num_padding_rows: int = 0,
    ) -> list[MicroBatch]:
        """Weigh every loss token of an accumulation window, from exact counts over all ranks.

        Args:
            window: experience of this rank, one entry per micro-batch.
            entropy_masks: one mask (B, T) per entry, from ``compute_entropy_masks``.
            num_padding_rows: rows of this rank that only pad an evaluation batch.
        """
        local = [
            sum(len(batch) for batch in window) - num_padding_rows,
            sum(int(batch.loss_mask_BT.sum()) for batch in window),
            sum(int(mask_BT.sum()) for mask_BT in entropy_masks),
        ]
        totals = self.accelerator.reduce(torch.tensor(local, device=self.accelerator.device), "sum").tolist()
        sequences, tokens, bonus_tokens = totals
        world_size = self.accelerator.num_processes
        counts = WindowCounts(sequences, tokens, len(window), world_size, self.args.max_completion_length)
        normalizer = NORMALIZERS[OBJECTIVES[self.args.loss_type].normalizer]
        target = self.args.entropy_target if self.args.use_adaptive_entropy else None
        coef = self.entropy_control.applied(target) if self._has_entropy_bonus() else None
        # The bonus is a mean over the selected tokens of all ranks; gradients are averaged over ranks.
        bonus_weight = None if coef is None else coef * world_size / max(bonus_tokens, 1)
        return [
            MicroBatch(
                **vars(batch),
                token_weights_BT=normalizer(batch.loss_mask_BT.float(), counts),
                entropy_mask_BT=mask_BT,
                entropy_weights_BT=None if bonus_weight is None else mask_BT.float() * bonus_weight,
                sequence_weight_B1=torch.full((len(batch), 1), world_size / sequences, device=mask_BT.device),
            )
            for batch, mask_BT in zip(window, entropy_masks, strict=True)
        ]

    def compute_policy_loss(self, batch: MicroBatch, scores: LogprobOutput) -> LossOutput:
        """The loss of one micro-batch; the losses of a window add up to the loss of the window.

        Override it to train on your own objective, or register one (``groupwise.register_objective``).

        Args:
            batch: with advantages and weights.
            scores: the current policy's log-probs, differentiable; with ``use_liger_kernel`` the fused loss.
        """
        if scores.fused is None:
            loss, metrics = evaluate(_terms(batch, scores), self.objective_settings)
        else:
            loss, metrics = scores.fused.loss, dict(scores.fused.metrics)
        policy_loss = metrics.get("policy_loss")
        if isinstance(policy_loss, Mean):  # counted by window, as the loss is
            metrics["policy_loss"] = Mean(policy_loss.total, batch.sequence_weight_B1.sum())
        if scores.aux_loss is not None:
            loss = loss + self.router_aux_loss_coef * scores.aux_loss * batch.sequence_weight_B1.sum()
            metrics["aux_loss"] = Mean(scores.aux_loss.detach())
        bonus_entropy = None
        if batch.entropy_weights_BT is not None:
            bonus_entropy = masked_mean(scores.entropy_BT, batch.entropy_mask_BT)
        return LossOutput(loss, bonus_entropy, metrics)

    def update_entropy_coef(self, window_entropy: Mean) -> Metrics:
        """Move the adaptive entropy coefficient by what the window showed on all ranks; metrics to log."""
        if not self._has_entropy_bonus():
            return {}
        args = self.args
        if args.use_adaptive_entropy:
            local = torch.stack(
                [torch.as_tensor(v, dtype=torch.float32) for v in vars(window_entropy).values()]
            )
            total, count = self.accelerator.reduce(local.to(self.accelerator.device), "sum").tolist()
            self.entropy_control = self.entropy_control.step(
                total / max(count, 1.0),
                args.entropy_target,
                args.entropy_coef_delta,
                args.entropy_coef_min,
                args.entropy_coef_max,
            )
        return {"entropy_coef": Mean(self.entropy_control.coef)}

    def _has_entropy_bonus(self) -> bool:
        return self.args.use_adaptive_entropy or self.args.entropy_coef != 0.0


def _terms(batch: MicroBatch, scores: LogprobOutput) -> ObjectiveTerms:
    return ObjectiveTerms(
        logps_BT=scores.logps_BT,
        entropy_BT=scores.entropy_BT,
        advantages_BX=batch.advantages_BX,
        mask_BT=batch.loss_mask_BT,
        weights_BT=batch.token_weights_BT,
        old_logps_BT=torch.where(batch.old_logps_BT.isnan(), scores.logps_BT.detach(), batch.old_logps_BT),
        ref_logps_BT=batch.ref_logps_BT,
        sampler_logps_BT=batch.sampler_logps_BT,
        keep_BT=batch.entropy_mask_BT,
        entropy_weights_BT=batch.entropy_weights_BT,
    )


def objective_settings(args: GRPOConfig) -> ObjectiveSettings:
    """What the objective needs to know of the configuration."""
    return ObjectiveSettings(
        objective=args.loss_type,
        ratio_level=args.importance_sampling_level,
        beta=args.beta,
        kl_estimator=args.kl_estimator,
        kl_in_loss=not args.kl_in_reward,
        bias_correction_kl=args.use_bias_correction_kl,
        off_policy_threshold=args.off_policy_mask_threshold,
        correction_mode=args.vllm_importance_sampling_mode
        if args.vllm_importance_sampling_correction
        else None,
        correction_clip_min=args.vllm_importance_sampling_clip_min,
        correction_clip_max=args.vllm_importance_sampling_clip_max,
        surrogate=SurrogateSettings(
            epsilon_low=args.epsilon,
            epsilon_high=args.epsilon_high,
            delta=args.delta,
            sapo_temperature_pos=args.sapo_temperature_pos,
            sapo_temperature_neg=args.sapo_temperature_neg,
            vespo_k_pos=args.vespo_k_pos,
            vespo_lambda_pos=args.vespo_lambda_pos,
            vespo_k_neg=args.vespo_k_neg,
            vespo_lambda_neg=args.vespo_lambda_neg,
        ),
    )
