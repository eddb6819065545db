"""A ``transformers.Trainer`` that stops before an update of NaN; nothing in it is about GRPO."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from transformers import Trainer

from groupwise.errors import TrainingError


class FiniteTrainer(Trainer):
    """Looks at the norm of the gradients, which is the same on every rank, before the optimizer uses them."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        # In fp16 the scaler skips such a step and lowers its scale.
        if norm is not None and not math.isfinite(norm) and self.accelerator.mixed_precision != "fp16":
            step = self.state.global_step
            raise TrainingError(
                f"the gradient norm of step {step + 1} is {float(norm)}; the weights are still those of step "
                f"{step} and no checkpoint holds this one. Usual causes: a learning rate that is too high "
                f"(learning_rate={self.args.learning_rate}), half-precision weights, a custom loss that "
                "divides by zero. train(resume_from_checkpoint=True) goes on from the last checkpoint"
            )
        return norm
