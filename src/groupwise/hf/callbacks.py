"""Trainer callbacks."""

from __future__ import annotations

import logging
import signal
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import reduce
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from groupwise.config.grpo_config import GRPOConfig
from groupwise.policy.reference import Reference

logger = logging.getLogger(__name__)

#: Flags of ``TrainerControl`` that decide which collectives a rank calls next.
_FLAGS = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")


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


class FlagAgreementCallback(TrainerCallback):
    """Set the flags of ``TrainerControl`` on every rank that an earlier callback, or SIGTERM, set on one."""

    _signal = 0  # received SIGTERM, with enable_jit_checkpoint

    def on_train_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        if args.enable_jit_checkpoint and args.world_size > 1:
            # Trainer's handler saves on this rank alone, which then waits for the others, maybe forever.
            signal.signal(signal.SIGTERM, lambda number, _: setattr(self, "_signal", number))

    def on_step_end(self, args: TrainingArguments, state: Any, control: TrainerControl, **given: Any) -> None:
        if self._signal:
            control.should_save = control.should_training_stop = True
            logger.warning("rank %d received SIGTERM: the run saves this step and ends", args.process_index)
            self._signal = 0
        self._agree(args, state, control, **given)

    def _agree(self, args: TrainingArguments, state: Any, control: TrainerControl, **given: Any) -> None:
        # Logs without a learning rate are not Trainer's, and may be those of one rank.
        if args.world_size > 1 and "learning_rate" in given.get("logs", ("learning_rate",)):
            flags = torch.tensor([float(getattr(control, flag)) for flag in _FLAGS], device=args.device)
            for flag, count in zip(_FLAGS, reduce(flags).tolist(), strict=True):
                setattr(control, flag, count > 0)

    on_substep_end = on_epoch_end = on_log = on_evaluate = on_save = _agree
