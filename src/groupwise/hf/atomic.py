"""A ``transformers.Trainer`` whose checkpoints are whole or not there; nothing in it is about GRPO."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from groupwise.hf import checkpointing as checkpoint_files

logger = logging.getLogger(__name__)


class AtomicTrainer(Trainer):
    """Writes a checkpoint aside and renames it when everything is on disk; restores random states early."""

    staging = False
    pending_rng_checkpoint: str | None = None

    def save_rollout_state(self, directory: str) -> None:
        """Add to a checkpoint what ``Trainer`` does not save; nothing here."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # Trainer restores it after the first window was fetched, which here means after generating: too late.
        if self.pending_rng_checkpoint is not None:
            super()._load_rng_state(checkpoint)
            self.pending_rng_checkpoint = None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        target = self.model if model is None else model
        if self._is_converted(resume_from_checkpoint, target):
            checkpoint_files.load_converted(resume_from_checkpoint, target)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        if self._is_converted(best, self.model):
            checkpoint_files.load_converted(best, self.model)
        else:
            super()._load_best_model()

    def _is_converted(self, directory: str, model: Any) -> bool:
        """Whether ``Trainer`` would find no weight by its name there, say so and go on without them."""
        own_format = self.is_fsdp_enabled or self.is_deepspeed_enabled
        is_plain = isinstance(model, PreTrainedModel) and not own_format
        return is_plain and checkpoint_files.has_other_names(directory, model)

    def _get_output_dir(self, trial: Any) -> str:
        run_dir = super()._get_output_dir(trial)
        return str(checkpoint_files.staging_dir(run_dir)) if self.staging else run_dir

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        run_dir = self._get_output_dir(trial)
        staged, final = checkpoint_files.staging_dir(run_dir) / name, os.path.join(run_dir, name)
        if self.args.should_save:
            checkpoint_files.clear_staging(run_dir)
        self.accelerator.wait_for_everyone()
        self.staging = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.staging = False
        if not self.args.save_only_model:
            self.save_rollout_state(str(staged))
        if self.state.best_model_checkpoint == str(staged):
            self.state.best_model_checkpoint = final
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self.state.save_to_json(str(staged / TRAINER_STATE_NAME))
            checkpoint_files.publish(staged, Path(final))
            checkpoint_files.rotate(Path(final), self.args.save_total_limit, self.state.best_model_checkpoint)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            super()._push_from_checkpoint(final)

    def save_last_completed_step(self) -> None:
        """Leave a checkpoint of the last optimizer step, unless there is one or none are wanted."""
        step = self.state.global_step
        final = Path(self._get_output_dir(None), f"{PREFIX_CHECKPOINT_DIR}-{step}")
        if step == 0 or self.args.save_strategy == SaveStrategy.NO:
            return
        if not final.exists():
            self._save_checkpoint(self.model, None)
        logger.warning(
            "step %d is saved in %s; train(resume_from_checkpoint=True) goes on from there", step, final
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self.staging:  # while staging, the folder does not have its name yet
            super()._push_from_checkpoint(checkpoint_folder)
