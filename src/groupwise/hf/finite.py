"""A ``transformers.Trainer`` that stops before an update of NaN; nothing in it is about GRPO."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from transformers import Trainer

from groupwise.errors import TrainingError


class FiniteTrainer(Trainer):
    """Looks at the norm of the gradients, which is the same on every rank.

    That is before the optimizer uses them, except with DeepSpeed; in any case it is before a checkpoint.
    """

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP2 shards it
        # In fp16 the scaler skips such a step and lowers its scale.
        if whole is not None and not math.isfinite(whole) and self.accelerator.mixed_precision != "fp16":
            raise TrainingError(
                f"the gradient norm of step {self.state.global_step + 1} is {float(whole)}; training ends "
                "before this step is saved. Usual causes: a learning rate that is too high "
                f"(learning_rate={self.args.learning_rate}), half-precision weights, a custom loss that "
                "divides by zero. train(resume_from_checkpoint=True) goes on from the last checkpoint"
            )
        return norm
