"""Liger's fused linear GRPO loss: hidden states to the loss, without log-probs in between.

Liger normalizes over one micro-batch; our token weights normalize over the whole accumulation window. For
each normalizer the two differ by one factor per micro-batch, known before the forward pass. The configuration
rejects options that Liger does not support (``groupwise.config.conditions``).

Axes: B sequences, T completion tokens, K positions that the head receives, H hidden size, X is T or 1.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from groupwise.compat import check_version
from groupwise.compat.liger import layer_problem
from groupwise.core import surrogates
from groupwise.core.metrics import Mean, Metrics
from groupwise.core.objectives import OBJECTIVES, ObjectiveSettings, correction
from groupwise.errors import ConfigError
from groupwise.policy.heads.capture import LogprobHead, Outputs, forward_at_head
from groupwise.policy.heads.dense import projection_dtype
from groupwise.policy.heads.weights import HeadWeights
from groupwise.policy.introspection import adapters_of, load_config, text_config
from groupwise.policy.layouts.padded import padded_inputs
from groupwise.records import LossOutput, MicroBatch

if TYPE_CHECKING:
    from peft import PeftConfig

    from groupwise.config.grpo_config import GRPOConfig


def _row_weight(batch: MicroBatch) -> torch.Tensor:
    return len(batch) * batch.sequence_weight_B1.amax()  # rows that do not count have 0, all others the same


#: Ratio of our token weight to Liger's, by normalizer. Liger divides by a count of the micro-batch, or by
#: ``num_items_in_batch``, for which ``_fused_loss`` passes a value that makes the divisor 1.
FACTORS: dict[str, Callable[[MicroBatch], torch.Tensor]] = {
    "sequence_mean": _row_weight,  # Liger: mean over all rows of the micro-batch
    "constant_length": _row_weight,
    "sequence_sum": _row_weight,
    "local_token_mean": lambda batch: batch.token_weights_BT.sum(),  # Liger: mean over its tokens
    "token_mean": lambda batch: batch.token_weights_BT.amax(),  # Liger: sum; all our weights are equal
}

#: The first version whose loss has the arguments that ``LigerLoss`` passes; the extra in pyproject.toml.
_OLDEST_LIGER = "0.8.1"

_CLIP_METRICS = {surrogates.clipped: "clip_ratio/region_mean", surrogates.cispo: "cispo_clip_ratio"}


@dataclass(frozen=True)
class LigerLoss:
    """Policy loss by liger-kernel, computed at the head inside the model's forward.

    with_aux_loss: the model has a balancing loss (mixture of experts), which training adds.
    head: settings of the head; the precision is read.
    max_completion_length: divisor of ``dr_grpo``.
    """

    with_aux_loss: bool
    head: LogprobHead
    max_completion_length: int

    def __call__(
        self, model: nn.Module, batch: MicroBatch, settings: ObjectiveSettings
    ) -> tuple[LossOutput, torch.Tensor | None]:
        """Compute the loss of ``batch``, and the balancing loss of a mixture of experts, if there is one.

        Raises:
            ConfigError: the advantages differ within a sequence, or its tokens follow several contexts.
        """
        if batch.contexts is not None:
            raise ConfigError(
                "use_liger_kernel=True takes one sequence per rollout, but a rollout has rows that do not "
                "continue each other (rollout_ids, or a rewritten history); set use_liger_kernel=False"
            )
        if batch.advantages_BX.shape[1] > 1:
            raise ConfigError(
                "use_liger_kernel=True takes one advantage per sequence, but a reward function returned step "
                "rewards; set use_liger_kernel=False"
            )
        metrics: Metrics = {}

        def compute(hidden_BKH: torch.Tensor, weights: HeadWeights) -> Outputs:
            loss, found = self._fused_loss(hidden_BKH, weights, batch, settings)
            metrics.update(found)
            return (loss,)

        inputs, _ = padded_inputs(model, batch)
        with_aux_loss = self.with_aux_loss and model.training
        (loss,), aux_loss = forward_at_head(model, inputs, self.head, compute, with_aux_loss=with_aux_loss)
        assert loss is not None
        return LossOutput(loss, metrics=metrics), aux_loss

    def _fused_loss(
        self,
        hidden_BKH: torch.Tensor,
        weights: HeadWeights,
        batch: MicroBatch,
        settings: ObjectiveSettings,
    ) -> tuple[torch.Tensor, Metrics]:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        width = batch.completion_ids_BT.shape[1]
        mask_BT = batch.loss_mask_BT.float()
        off_BT = mask_BT == 0
        # Liger multiplies by the mask last, and ∞ · 0 is NaN. Zero hidden states outside the mask give every
        # token probability 1 / V (up to the bias); old and reference log-probs are set to the same value.
        uniform = -math.log(weights.weight_VH.shape[0])
        hidden_BTH = hidden_BKH[:, -(width + 1) : -1].masked_fill(off_BT.unsqueeze(-1), 0.0)
        is_on_policy = bool((batch.old_logps_BT.isnan() | off_BT).all())
        old_BT, ref_BT = (
            None if logps_BT is None else logps_BT.masked_fill(off_BT, uniform)
            for logps_BT in (None if is_on_policy else batch.old_logps_BT, batch.ref_logps_BT)
        )
        correction_BX, metrics = correction(batch.old_logps_BT, batch.sampler_logps_BT, mask_BT, settings)
        if correction_BX is not None and correction_BX.shape[1] > 1:
            correction_BX = correction_BX.masked_fill(off_BT, 1.0)  # vespo sums log-ratios over all columns
        has_reference = batch.ref_logps_BT is not None
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        fused = LigerFusedLinearGRPOLoss(
            beta=settings.beta if has_reference and not settings.kl_in_reward else 0.0,
            compiled=hidden_BTH.is_cuda,
            use_ref_model=has_reference,
            loss_type=settings.loss_type,
            max_completion_length=self.max_completion_length,
            importance_sampling_level=settings.importance_sampling_level,
            temperature=batch.sampler.temperature / weights.scale,
            use_bias_correction_kl=settings.use_bias_correction_kl,
            **vars(settings.surrogate),
        )
        loss, (*kl, clipped) = fused(
            hidden_BTH.to(projection_dtype(hidden_BTH, weights.fp32)),
            weights.weight_VH,
            batch.completion_ids_BT,
            mask_BT,
            batch.advantages_BX.squeeze(1),
            bias=weights.bias_V,
            ref_per_token_logps=ref_BT,
            old_per_token_logps=old_BT,
            vllm_is_ratio=correction_BX,
            # Liger divides by num_items_in_batch / world size.
            num_items_in_batch=torch.distributed.get_world_size() if is_distributed else 1,
        )
        objective = OBJECTIVES[settings.loss_type]
        # Liger's metrics are means over loss tokens. Our clip ratio counts sequences for sequence-level
        # ratios, so it is not reported there.
        tokens = mask_BT.sum()
        if kl:
            metrics["kl"] = Mean(kl[0] * tokens, tokens)
        if objective.surrogate in _CLIP_METRICS and settings.importance_sampling_level == "token":
            metrics[_CLIP_METRICS[objective.surrogate]] = Mean(clipped * tokens, tokens)
        return loss * FACTORS[objective.normalizer](batch), metrics


def check_liger(
    model: str | PreTrainedModel, config: GRPOConfig, peft_config: PeftConfig | None = None
) -> None:
    """Check that Liger's loss supports the model and its adapter.

    Raises:
        ConfigError: liger-kernel is not installed or too old, or patches another transformers; the model
            bounds its logits by a softcap, or an adapter adds virtual tokens.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError(
            "use_liger_kernel=True needs liger-kernel, which is not installed; run pip install "
            "'groupwise[liger]', or set use_liger_kernel=False"
        )
    softcap = getattr(text_config(model, config), "final_logit_softcapping", None)
    if softcap is not None:
        raise ConfigError(
            f"use_liger_kernel=True, but the model bounds its logits (final_logit_softcapping={softcap}), "
            "which Liger's loss does not; set use_liger_kernel=False"
        )
    for adapter in adapters_of(model, peft_config):
        if adapter.is_prompt_learning:
            raise ConfigError(
                f"use_liger_kernel=True with a {type(adapter).__name__}, whose virtual tokens Liger's fused "
                "loss would count as tokens of the prompt; set use_liger_kernel=False, or use LoRA"
            )
    check_version(
        "liger-kernel",
        _OLDEST_LIGER,
        "use_liger_kernel=True",
        "whose loss lacks arguments; upgrade it, or set use_liger_kernel=False",
    )
    model_type = (load_config(model, config) if isinstance(model, str) else model.config).model_type
    if problem := layer_problem(model_type):
        raise ConfigError(
            f"use_liger_kernel=True, but Liger cannot patch the layers of {model_type}: {problem}; upgrade "
            "liger-kernel, or set use_liger_kernel=False"
        )
