"""Liger's fused linear GRPO loss: hidden states to the loss, without log-probs in between.

Liger divides by counts of the micro-batch it is given; our token weights are those of the whole accumulation
window. Under each normaliser the two differ by one factor per micro-batch, which is known before the forward.
What Liger cannot express is refused when the configuration is built (``config_liger``).

Axis suffixes: B sequences, C completion tokens, K scored positions, N = B K, H hidden size, X is C or 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from groupwise.core.metrics import Mean, Metrics
from groupwise.core.objectives import OBJECTIVES, ObjectiveSettings, ObjectiveTerms, correction
from groupwise.errors import ConfigError
from groupwise.policy.heads import HeadWeights
from groupwise.policy.heads.dense import projection_dtype
from groupwise.policy.layouts import HeadSettings, compute_padded_logprobs
from groupwise.records import LogprobOutput, LossOutput, MicroBatch

#: Our weight of a token over Liger's, by normaliser. Liger's mean over the tokens of a micro-batch is turned
#: off by telling it that there is one token.
FACTORS: dict[str, Callable[[MicroBatch], torch.Tensor]] = {
    "sequence_mean": lambda batch: (
        batch.sequence_weight_B1.sum()
    ),  # Liger: mean over the rows of the micro-batch
    "constant_length": lambda batch: batch.sequence_weight_B1.sum(),
    "sequence_sum": lambda batch: batch.sequence_weight_B1.sum(),
    "local_token_mean": lambda batch: batch.token_weights_BT.sum(),  # Liger: mean over its tokens
    "token_mean": lambda batch: batch.token_weights_BT.amax(),  # Liger: sum; all our weights are equal
}

_CLIP_METRICS = {"clipped": "clip_ratio/region_mean", "cispo": "cispo_clip_ratio"}  # by surrogate


def liger_loss(
    model: torch.nn.Module,
    batch: MicroBatch,
    settings: ObjectiveSettings,
    head: HeadSettings,
    max_completion_length: int,
    *,
    with_aux_loss: bool = False,
) -> LogprobOutput:
    """The loss of one micro-batch from Liger, in place of log-probs.

    It is computed inside the model's forward, by its head, so that wrappers that shard or move the head's
    weights see an ordinary call.

    Args:
        batch: with advantages and weights.
        max_completion_length: divisor of dr_grpo.

    Returns:
        scores that hold `fused` and no log-probs.

    Raises:
        ConfigError: the advantages differ within a sequence.
    """
    loss_head = _LossHead(batch, settings, max_completion_length)
    scores = compute_padded_logprobs(
        model, batch, replace(head, name=loss_head), with_entropy=False, with_aux_loss=with_aux_loss
    )
    # One of them is the loss, the others are zero.
    fused = LossOutput(scores.logps_BT.sum(), metrics=loss_head.metrics)
    return LogprobOutput(logps_BT=None, aux_loss=scores.aux_loss, fused=fused)


class _LossHead:
    """A head whose "log-probs" are zeros and, at a completion token of the first row, the loss."""

    def __init__(self, batch: MicroBatch, settings: ObjectiveSettings, max_completion_length: int):
        if batch.advantages_BX.shape[1] > 1:
            raise ConfigError(
                "use_liger_kernel=True takes one advantage per sequence, but a reward function returned step "
                "rewards; set use_liger_kernel=False"
            )
        self.batch, self.settings = batch, settings
        self.max_completion_length = max_completion_length
        self.metrics: Metrics = {}

    def __call__(
        self,
        hidden_NH: torch.Tensor,
        head: HeadWeights,
        targets_N: torch.Tensor,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> tuple[torch.Tensor, None]:
        batch, settings = self.batch, self.settings
        count, width = batch.completion_ids_BT.shape
        hidden_BKH = hidden_NH.view(count, -1, hidden_NH.shape[-1])
        mask_BT = batch.loss_mask_BT.float()
        off_BT = mask_BT == 0
        # Liger multiplies by the mask at the end, where ∞ · 0 would be NaN. A hidden state of zeros gives all
        # tokens about the same probability, and so do the old policy and the reference there.
        even = -math.log(head.weight_VH.shape[0])
        hidden_BTH = hidden_BKH[:, -(width + 1) : -1].masked_fill(off_BT.unsqueeze(-1), 0.0)
        is_on_policy = bool((batch.old_logps_BT.isnan() | off_BT).all())
        old_BT, ref_BT = (
            None if logps is None else logps.masked_fill(off_BT, even)
            for logps in (None if is_on_policy else batch.old_logps_BT, batch.ref_logps_BT)
        )
        correction_BX = self._correction(mask_BT, off_BT)
        loss, metrics = self._make_loss(temperature / head.scale, hidden_BTH.is_cuda)(
            hidden_BTH.to(projection_dtype(hidden_BTH, head.fp32)),
            head.weight_VH,
            batch.completion_ids_BT,
            mask_BT,
            batch.advantages_BX.squeeze(1),
            bias=head.bias_V,
            ref_per_token_logps=ref_BT,
            old_per_token_logps=old_BT,
            vllm_is_ratio=correction_BX,
            num_items_in_batch=_world_size(),  # Liger divides by it over the number of ranks
        )
        self._note(metrics, mask_BT.sum())
        values_N = torch.zeros(len(hidden_NH), dtype=loss.dtype, device=loss.device)
        # Row 0, at the position that scores its last completion token.
        values_N[hidden_BKH.shape[1] - 2] = loss * FACTORS[OBJECTIVES[settings.objective].normalizer](batch)
        return values_N, None

    def _make_loss(self, temperature: float, compiled: bool) -> Any:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        settings, surrogate = self.settings, self.settings.surrogate
        return LigerFusedLinearGRPOLoss(
            beta=settings.beta if settings.kl_in_loss and self.batch.ref_logps_BT is not None else 0.0,
            compiled=compiled,
            use_ref_model=self.batch.ref_logps_BT is not None,
            epsilon_low=surrogate.epsilon_low,
            epsilon_high=surrogate.epsilon_high,
            loss_type=settings.objective,
            max_completion_length=self.max_completion_length,
            importance_sampling_level=settings.ratio_level,
            sapo_temperature_pos=surrogate.sapo_temperature_pos,
            sapo_temperature_neg=surrogate.sapo_temperature_neg,
            temperature=temperature,
            delta=surrogate.delta,
            use_bias_correction_kl=settings.bias_correction_kl,
            vespo_k_pos=surrogate.vespo_k_pos,
            vespo_lambda_pos=surrogate.vespo_lambda_pos,
            vespo_k_neg=surrogate.vespo_k_neg,
            vespo_lambda_neg=surrogate.vespo_lambda_neg,
        )

    def _correction(self, mask_BT: torch.Tensor, off_BT: torch.Tensor) -> torch.Tensor | None:
        batch = self.batch
        if batch.sampler_logps_BT is None:
            return None
        terms = ObjectiveTerms(
            logps_BT=batch.old_logps_BT,
            advantages_BX=batch.advantages_BX,
            mask_BT=batch.loss_mask_BT,
            weights_BT=batch.token_weights_BT,
            sampler_logps_BT=batch.sampler_logps_BT,
        )
        factor_BX, self.metrics = correction(terms, self.settings, batch.old_logps_BT, mask_BT)
        if factor_BX is None or factor_BX.shape[1] == 1:
            return factor_BX
        return factor_BX.masked_fill(off_BT, 1.0)  # vespo takes its log and sums that over all columns

    def _note(self, metrics: tuple[torch.Tensor, ...], tokens: torch.Tensor) -> None:
        """Liger's metrics are means over the loss tokens: the KL if there is one, and the share clipped.

        With one ratio per sequence ours counts sequences, so that share is not reported.
        """
        *kl, clipped = metrics
        if kl:
            self.metrics["kl"] = Mean(kl[0] * tokens, tokens)
        name = _CLIP_METRICS.get(OBJECTIVES[self.settings.objective].surrogate.__name__)
        if name is not None and self.settings.ratio_level == "token":
            self.metrics[name] = Mean(clipped * tokens, tokens)


def _world_size() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
