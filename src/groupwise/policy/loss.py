"""Loss of a micro-batch: one interface for log-probs with an objective and for Liger's fused loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from groupwise.core.metrics import Mean
from groupwise.records import LogprobOutput, LossOutput, MicroBatch


@dataclass(frozen=True)
class PolicyLoss(ABC):
    """Loss of one micro-batch. The losses of an accumulation window add up to the loss of the update.

    Implementations: :class:`ObjectiveLoss`, and ``groupwise.policy.liger.LigerLoss``.

    router_aux_loss_coef: weight of the balancing loss of a mixture-of-experts model.
    """

    router_aux_loss_coef: float

    @abstractmethod
    def __call__(self, model: nn.Module, batch: MicroBatch) -> LossOutput:
        """Compute the loss of ``batch`` under ``model``, a differentiable scalar with metrics."""

    def add_aux_loss(
        self, output: LossOutput, aux_loss: torch.Tensor | None, batch: MicroBatch
    ) -> LossOutput:
        """Add the balancing loss of the micro-batch, weighted by its share of the window's sequences."""
        if aux_loss is None:
            return output
        loss = output.loss + self.router_aux_loss_coef * aux_loss * batch.sequence_weight_B1.sum()
        return replace(output, loss=loss, metrics={**output.metrics, "aux_loss": Mean(aux_loss.detach())})


@dataclass(frozen=True)
class ObjectiveLoss(PolicyLoss):
    """Policy loss from log-probs of the completion tokens, by the objective that ``loss_type`` selects.

    compute_logprobs: ``LogprobMixin.compute_logprobs``.
    compute_policy_loss: ``LossMixin.compute_policy_loss``.
    """

    compute_logprobs: Callable[..., LogprobOutput]
    compute_policy_loss: Callable[[MicroBatch, LogprobOutput], LossOutput]

    def __call__(self, model: nn.Module, batch: MicroBatch) -> LossOutput:
        logprobs = self.compute_logprobs(model, batch, with_entropy=True)
        return self.add_aux_loss(self.compute_policy_loss(batch, logprobs), logprobs.aux_loss, batch)
