"""The reward on the progress bar."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback

#: Metrics beside the bar, in this order.
SHOWN = ("loss", "reward")


class RewardProgressCallback(ProgressCallback):
    """``ProgressCallback`` that also keeps the last loss and reward beside the training bar."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.shown: dict[str, str] = {}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().on_log(args, state, control, logs=logs, **kwargs)
        if self.training_bar is None:  # another process than the first, or an evaluation outside training
            return
        # logs of an evaluation carry neither: the last values of training stay
        self.shown.update({name: f"{logs[name]:.4g}" for name in SHOWN if logs and name in logs})
        if self.shown:
            self.training_bar.set_postfix({name: self.shown[name] for name in SHOWN if name in self.shown})


def show_rewards_in_progress(trainer: Trainer) -> None:
    """Put it in the place of the stock progress bar, if there is one."""
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(RewardProgressCallback)
