"""Loss and reward on the progress bar."""

from __future__ import annotations

from transformers import ProgressCallback, Trainer, TrainerControl, TrainerState, TrainingArguments

#: Metrics in the postfix of the bar, in this order.
SHOWN = ("loss", "reward")


class RewardProgressCallback(ProgressCallback):
    """``ProgressCallback`` with the latest loss and reward in the postfix of the training bar."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.shown: dict[str, str] = {}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        super().on_log(args, state, control, logs=logs, **kwargs)
        if self.training_bar is None:  # not the main process, or an evaluation outside training
            return
        # an evaluation log has neither metric; the postfix keeps the last values of training
        self.shown.update({name: f"{logs[name]:.4g}" for name in SHOWN if logs and name in logs})
        if self.shown:
            self.training_bar.set_postfix({name: self.shown[name] for name in SHOWN if name in self.shown})


def show_rewards_in_progress(trainer: Trainer) -> None:
    """Replace the ``ProgressCallback`` of the trainer, if it has one, by :class:`RewardProgressCallback`."""
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(RewardProgressCallback)
