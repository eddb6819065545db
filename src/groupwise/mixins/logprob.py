"""Completions to tensors and log-probs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.kl import KL_ESTIMATORS
from groupwise.core.masks import entropy_threshold
from groupwise.core.padding import length_mask, pad_sequences
from groupwise.errors import ConfigError
from groupwise.mixins.loss import objective_settings
from groupwise.policy.liger import liger_loss
from groupwise.policy.logprobs import LogprobComputer
from groupwise.policy.reference import Reference
from groupwise.records import LogprobOutput, MicroBatch, RewardBatch, RolloutBatch


class LogprobMixin:
    """Owns the reference and the scorer of completions."""

    args: GRPOConfig
    accelerator: Accelerator
    processing_class: Any
    reference: Reference
    scorer: LogprobComputer
    aux_loss_enabled: bool

    def collate(self, rollout: RolloutBatch) -> MicroBatch:
        """Padded tensors of a rollout on the training device, without log-probs and advantages."""
        completions = rollout.completions
        tokens = [completion.token_ids for completion in completions]
        pad = {"multiple_of": self.args.pad_to_multiple_of, "device": self.accelerator.device}
        pad_token = getattr(self.processing_class, "tokenizer", self.processing_class).pad_token_id
        prompt_ids_BL = pad_sequences(rollout.prompt_ids, pad_token, left=True, **pad)
        completion_ids_BT = pad_sequences(tokens, pad_token, **pad)
        lengths = [len(ids) for ids in rollout.prompt_ids]
        loss_mask = [self._loss_mask(completion) for completion in completions]

        def known(logps: list[list[float] | None]) -> torch.Tensor | None:
            """NaN where a completion has none; None where all have none."""
            if all(entry is None for entry in logps):
                return None
            filled = [
                [math.nan] * len(ids) if entry is None else entry
                for entry, ids in zip(logps, tokens, strict=True)
            ]
            return pad_sequences(filled, 0.0, dtype=torch.float32, **pad)

        return MicroBatch(
            prompt_ids_BL=prompt_ids_BL,
            prompt_mask_BL=length_mask(
                lengths, prompt_ids_BL.shape[1], left=True, device=self.accelerator.device
            ),
            completion_ids_BT=completion_ids_BT,
            completion_mask_BT=length_mask(
                [len(ids) for ids in tokens], completion_ids_BT.shape[1], device=self.accelerator.device
            ),
            loss_mask_BT=pad_sequences(loss_mask, 0, **pad),
            old_logps_BT=known([completion.old_logps for completion in completions]),
            sampler_logps_BT=known([completion.logps for completion in completions]),
            images=None if rollout.images is None else tuple(rollout.images),
        )

    def _loss_mask(self, completion: Any) -> list[int]:
        if completion.truncated and self.args.mask_truncated_completions:
            return [0] * len(completion.token_ids)
        return completion.loss_mask or [1] * len(completion.token_ids)

    def compute_logprobs(self, model: Any, batch: MicroBatch, *, with_entropy: bool = False) -> LogprobOutput:
        """Log-probs (and entropies) of the completion tokens under ``model`` at the sampling temperature."""
        with_aux_loss = self.aux_loss_enabled and model.training
        if (
            self.args.use_liger_kernel and batch.token_weights_BT is not None
        ):  # a loss is next, and Liger fuses it
            return liger_loss(
                model,
                batch,
                objective_settings(self.args),
                self.scorer.head,
                self.args.max_completion_length,
                with_aux_loss=with_aux_loss,
            )
        return self.scorer(model, batch, with_entropy=with_entropy, with_aux_loss=with_aux_loss)

    @torch.no_grad()
    def annotate(
        self, model: Any, batch: MicroBatch, *, on_policy: bool, rows: list[int] | None = None
    ) -> MicroBatch:
        """Add the log-probs of the old policy (unless that is the current one) and of the reference.

        Dropout is off: both policies are the ones that generate.

        Args:
            rows: those that need them; the log-probs of the others are zero. None is all.
        """
        rows = list(range(len(batch))) if rows is None else rows
        was_training = model.training
        model.eval()
        try:
            # Liger takes the correction for the sampler as it finds it, and that needs the old policy.
            if not on_policy or (self.args.use_liger_kernel and batch.sampler_logps_BT is not None):
                batch = replace(batch, old_logps_BT=self._old_logps(model, batch, rows))
            with self.reference.scoring(model) as reference:
                if reference is not None:
                    batch = replace(batch, ref_logps_BT=self._logps(reference, batch, rows))
        finally:
            model.train(was_training)
        return batch

    def _logps(self, model: Any, batch: MicroBatch, rows: list[int]) -> torch.Tensor:
        """Log-probs of the completion tokens of some rows, zero in the others."""
        logps_BT = torch.zeros(batch.completion_ids_BT.shape, device=batch.completion_ids_BT.device)
        if rows:
            chosen_BT = self.compute_logprobs(model, batch.select(rows)).logps_BT
            logps_BT[rows, : chosen_BT.shape[1]] = chosen_BT  # type: ignore[union-attr]
        return logps_BT

    def _old_logps(self, model: Any, batch: MicroBatch, rows: list[int]) -> torch.Tensor:
        """Those that are known already, the current policy's for the rest."""
        logps_BT, known_BT = self._logps(model, batch, rows), batch.old_logps_BT
        return logps_BT if known_BT is None else torch.where(known_BT.isnan(), logps_BT, known_BT)

    def logps_of(self, model: Any, rollout: RolloutBatch) -> list[list[float]]:
        """Log-probs of completions under the current policy."""
        parts = self.collate(rollout).split(self.args.per_device_train_batch_size)
        batches = [self.annotate(model, part, on_policy=False) for part in parts]
        rows = [row for batch in batches for row in batch.old_logps_BT.tolist()]  # type: ignore[union-attr]
        return [row[: len(c.token_ids)] for row, c in zip(rows, rollout.completions, strict=True)]

    def apply_kl_penalty(self, scored: RewardBatch, batches: list[MicroBatch]) -> RewardBatch:
        """Subtract β · Σ_t KL_it from the aggregated reward of each completion."""
        if scored.rewards.step_rewards:
            raise ConfigError(
                "kl_in_reward=True applies to rewards of whole completions, but a reward function returned "
                "step rewards; put the KL into the loss (kl_in_reward=False)"
            )
        estimator = KL_ESTIMATORS[self.args.kl_estimator]
        local_B = torch.cat(
            [(estimator(b.old_logps_BT, b.ref_logps_BT) * b.loss_mask_BT).sum(-1) for b in batches]  # type: ignore[arg-type]
        )
        rewards = scored.rewards
        kl_N = self.accelerator.gather(local_B)[: len(rewards.rewards_NF)].to(rewards.rewards_NF)
        return replace(scored, rewards=replace(rewards, penalty_N=self.args.beta * kl_N))

    @torch.no_grad()
    def compute_entropy_masks(self, model: Any, window: list[MicroBatch]) -> list[MicroBatch]:
        """Mark the tokens in the top entropy quantile of the window, over all micro-batches and ranks."""
        if self.args.top_entropy_quantile >= 1.0:
            return window
        entropies = [self.compute_logprobs(model, batch, with_entropy=True).entropy_BT for batch in window]
        masks = [batch.loss_mask_BT.bool() for batch in window]
        local = torch.cat([entropy[mask] for entropy, mask in zip(entropies, masks, strict=True)])
        padded = self.accelerator.pad_across_processes(local, pad_index=-1.0)
        gathered = self.accelerator.gather(padded)
        # An entropy is never negative, so the padding cannot be mistaken for one.
        threshold = entropy_threshold(gathered[gathered >= 0], self.args.top_entropy_quantile)
        return [
            replace(batch, entropy_mask_BT=(entropy >= threshold.to(entropy)).long() * batch.loss_mask_BT)
            for batch, entropy in zip(window, entropies, strict=True)
        ]
