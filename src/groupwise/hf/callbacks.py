"""Trainer callbacks."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from groupwise.config.grpo_config import GRPOConfig
from groupwise.cpu import save_matmul_outputs
from groupwise.policy.reference import Reference


class SyncRefModelCallback(TrainerCallback):
    """Mix the policy into the reference model every ``ref_model_sync_steps`` steps (TR-DPO, eq. 3)."""

    def __init__(self, reference: Reference, args: GRPOConfig, accelerator: Accelerator) -> None:
        self.reference = reference
        self.alpha = args.ref_model_mixup_alpha
        self.sync_steps = args.ref_model_sync_steps
        self.accelerator = accelerator

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        if state.global_step % self.sync_steps == 0:
            self.reference.mix(self.accelerator.unwrap_model(model), self.alpha)


class MatmulOutputsCallback(TrainerCallback):
    """Call :func:`save_matmul_outputs` once ``Trainer.train`` has enabled gradient checkpointing."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.gradient_checkpointing:
            save_matmul_outputs(kwargs["model"])
