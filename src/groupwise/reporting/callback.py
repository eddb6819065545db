"""Callback with the events inside a GRPO step, and files of its own in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from groupwise.config.grpo_config import GRPOConfig
from groupwise.records import MicroBatch, RewardBatch, RolloutBatch


class GRPOCallback(TrainerCallback):
    """Callback of a run, with the events of ``TrainerCallback``, three within a step, and two of checkpoints.

    An optimizer step calls, in this order, ``on_step_begin``; for each generation that begins in it
    :meth:`on_generation_end`; :meth:`on_window_begin`; for each micro-batch :meth:`on_loss`;
    ``on_pre_optimizer_step`` and ``on_step_end``. Each rank calls its own callbacks, with what it holds; the
    records are those of the trainer, to be read and not changed; they are passed by name. Evaluations call
    none of the three, and the step of ``groupwise.trl_hooks`` calls :meth:`on_generation_end` alone.

    A callback with a state writes it in :meth:`on_checkpoint` and restores it in :meth:`on_run_begin`.
    """

    def on_run_begin(
        self, args: GRPOConfig, state: TrainerState, control: TrainerControl, directory: Path | None
    ) -> None:
        """Called when ``train`` has restored the state of the run; ``state`` and the policy's weights follow.

        Args:
            directory: checkpoint that the run resumes from; None: a new run.
        """

    def on_checkpoint(
        self, args: GRPOConfig, state: TrainerState, control: TrainerControl, directory: Path
    ) -> None:
        """Called when the trainer has written its files of a checkpoint, before the manifest.

        Args:
            directory: receives files of the callback; write on ranks with ``args.should_save`` alone.
        """

    def on_generation_end(
        self,
        args: GRPOConfig,
        state: TrainerState,
        control: TrainerControl,
        rollouts: RolloutBatch,
        rewards: RewardBatch,
    ) -> None:
        """Called when a generation batch is rewarded, before the policy is trained on it.

        Args:
            rollouts: B completions of this rank.
            rewards: rewards of all ranks, (N, F).
        """

    def on_window_begin(
        self, args: GRPOConfig, state: TrainerState, control: TrainerControl, window: Sequence[MicroBatch]
    ) -> None:
        """Called when the tokens of an accumulation window are weighed, before rows move between ranks.

        Args:
            window: micro-batches as this rank sampled them; ``rows_B`` are the positions of their rows.
        """

    def on_loss(
        self,
        args: GRPOConfig,
        state: TrainerState,
        control: TrainerControl,
        batch: MicroBatch,
        logps_BT: torch.Tensor | None,
        loss: torch.Tensor,
    ) -> None:
        """Called when the loss of a micro-batch is computed, before its backward pass.

        After an out-of-memory error the rows of a window come again, in smaller micro-batches.

        Args:
            batch: rows that are computed; ``rows_B`` are their positions in the window.
            logps_BT: log-probs that the loss is computed from, with gradient; None with Liger's loss.
            loss: scalar; the losses of a window add up to its loss.
        """
