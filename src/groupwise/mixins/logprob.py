"""Completions to token ids, masks and log-probs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, TrainerState

from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import truncated_logprob_bound
from groupwise.core.entropy import entropy_threshold
from groupwise.core.kl import KL_ESTIMATORS
from groupwise.core.metrics import Metrics
from groupwise.core.objectives import ObjectiveSettings
from groupwise.core.padding import length_mask, pad_sequences
from groupwise.errors import ConfigError
from groupwise.policy.introspection import evaluation_mode
from groupwise.policy.logprob_mismatch import LogprobMismatchCheck
from groupwise.policy.logprobs import LogprobComputer, model_rows
from groupwise.policy.reference import Reference
from groupwise.records import (
    Experience,
    LogprobOutput,
    OldAndRefLogps,
    RewardBatch,
    RolloutBatch,
    TokenBatch,
)


class LogprobMixin:
    """Compute log-probs of completions under the policy, the behaviour policy and the reference model."""

    args: GRPOConfig
    accelerator: Accelerator
    model: PreTrainedModel
    model_wrapped: Any
    processing_class: Any
    reference: Reference
    state: TrainerState
    logprob_mismatch: LogprobMismatchCheck
    logprob_computer: LogprobComputer
    metrics_column: str
    aux_loss_enabled: bool
    objective_settings: ObjectiveSettings

    def collate(self, rollouts: RolloutBatch) -> TokenBatch:
        """Pad the rollouts of this rank to tensors (B, L) and (B, T) on the training device."""
        completions, device = rollouts.completions, self.accelerator.device
        token_ids = [completion.token_ids for completion in completions]
        pad: dict[str, Any] = {"multiple_of": self.args.pad_to_multiple_of, "device": device}
        pad_token = getattr(self.processing_class, "tokenizer", self.processing_class).pad_token_id
        # Prompts end, and completions begin, at the same column: logits of column L - 1 predict token 0.
        prompt_ids_BL = pad_sequences(rollouts.prompt_ids, pad_token, left=True, **pad)
        completion_ids_BT = pad_sequences(token_ids, pad_token, **pad)
        prompt_lengths, lengths = [*map(len, rollouts.prompt_ids)], [*map(len, token_ids)]
        first_row = self.accelerator.process_index * len(rollouts)  # of this rank in the global batch
        masks_truncated = self.args.mask_truncated_completions
        masked = [each.dropped or (each.truncated and masks_truncated) for each in completions]
        with_loss = [0 if is_masked else length for length, is_masked in zip(lengths, masked, strict=True)]
        loss_mask_BT = length_mask(with_loss, completion_ids_BT.shape[1], device=device)
        if any(completion.loss_mask for completion in completions):  # tokens of tools and environments
            own = [each.loss_mask or [1] * len(each.token_ids) for each in completions]
            loss_mask_BT *= pad_sequences(own, 0, **pad)
        groups = [row // rollouts.num_generations for row in range(first_row, first_row + len(rollouts))]
        dropped = [completion.dropped for completion in completions]
        sampler_logps_BT = None  # without a separate sampler, which the loss would correct for
        if any(completion.logps is not None for completion in completions):
            # NaN for completions without log-probs and on padding.
            # vars: a tensor where there is one; the attribute would copy it into a list.
            given = [(vars(each)["logps"], len(each.token_ids)) for each in completions]
            logps = [[math.nan] * count if own is None else own for own, count in given]
            sampler_logps_BT = pad_sequences(logps, math.nan, dtype=torch.float32, **pad)
        sampling_mask = tuple(completion.sampling_mask for completion in completions)
        if self.args.use_liger_kernel:  # its log-probs are of the full distribution, so all must be
            sampling_mask = (None,) * len(completions)
        weight_digests = tuple(completion.weight_digest for completion in completions)
        column = self.metrics_column  # "": no metrics by value
        values = tuple(row.get(column) for row in rollouts.rows) if column else ()
        contexts = tuple(completion.contexts or None for completion in completions)
        routed = tuple(completion.routed_experts for completion in completions)
        return TokenBatch(
            prompt_ids_BL=prompt_ids_BL,
            prompt_mask_BL=length_mask(prompt_lengths, prompt_ids_BL.shape[1], left=True, device=device),
            completion_ids_BT=completion_ids_BT,
            completion_mask_BT=length_mask(lengths, completion_ids_BT.shape[1], device=device),
            loss_mask_BT=loss_mask_BT,
            group_ids_B=torch.tensor(groups, device=device),
            old_logps_BT=torch.full((1, 1), math.nan, device=device).expand_as(completion_ids_BT),
            sampler_logps_BT=sampler_logps_BT,
            sampler=rollouts.sampler,
            images=None if rollouts.images is None else tuple(rollouts.images),
            sampling_mask=None if all(row is None for row in sampling_mask) else sampling_mask,
            weight_digests=weight_digests if any(weight_digests) else None,
            metric_values=None if all(value is None for value in values) else values,
            contexts=contexts if any(contexts) else None,
            dropped_B=torch.tensor(dropped, device=device) if any(dropped) else None,
            routed_experts=None if all(row is None for row in routed) else routed,
        )

    def check_logprob_mismatch(self, rollouts: RolloutBatch, tokens: TokenBatch) -> Metrics:
        """Compare the sampler's log-probs with the trainer's on a few rows; ``sampling/logprob_mismatch``."""
        step = self.state.global_step
        sampled_now = [completion.sampled_at(step) for completion in rollouts.completions]
        if tokens.contexts is not None:
            parts = model_rows(tokens)
            tokens, sampled_now = parts.rows, [sampled_now[rollout] for rollout in parts.rollout_R]
        # -log(top_p) nats; infinite where truncation has no bound: then only negative differences count.
        unknown = self.objective_settings.truncation_unknown
        bound = truncated_logprob_bound(self.args) if unknown else 0.0
        return self.logprob_mismatch.check(self.model, tokens, sampled_now, truncation=bound)

    def compute_logprobs(
        self, model: nn.Module, batch: TokenBatch, *, with_entropy: bool = False
    ) -> LogprobOutput:
        """Compute token log-probs under ``model`` at the sampling temperature. Returns (B, T) float32.

        With ``batch.sampling_mask``, log-probs and entropy are those of the truncated distribution.
        """
        with_aux_loss = self.aux_loss_enabled and model.training  # of the loss alone, not of old log-probs
        return self.logprob_computer(model, batch, with_entropy=with_entropy, with_aux_loss=with_aux_loss)

    def check_layout(self, batch: TokenBatch) -> None:
        """Choose the layout of the run by its rows; does nothing afterwards.

        Called by all ranks before any log-probs: the first ones may be those of another model, whose layout
        and gradients are not the policy's, and a rank may have no row to compute. An override of
        ``compute_logprobs`` may compute a model that no layout does: if it calls the own one, that checks,
        and packs the batches of the first window itself.
        """
        if getattr(self.compute_logprobs, "__func__", None) is LogprobMixin.compute_logprobs:
            self.logprob_computer.check(self.model_wrapped, batch)

    @torch.no_grad()
    def old_and_ref_logps(
        self, tokens: TokenBatch, only: Sequence[int] | None = None, *, on_policy: bool = False
    ) -> OldAndRefLogps:
        """Compute log-probs under the behaviour policy and the reference model, without dropout.

        Args:
            only: rows that will have a gradient; the others get old log-probs of NaN and reference log-probs
                of zero. None: all rows.
            on_policy: the policy does not change before the update: old log-probs of its completions stay
                NaN, and the loss reads ``logps.detach()``.

        Returns:
            old (B, T) and reference (B, T) log-probs.
        """
        if self.args.use_liger_kernel:
            # Liger takes the sampler correction as a factor, which needs old log-probs before the loss.
            on_policy = on_policy and tokens.sampler_logps_BT is None
        self.check_layout(tokens)
        model = self.model
        with evaluation_mode(model):  # without dropout: ρ would be noise
            old_logps_BT = tokens.old_logps_BT  # (B, T) NaN: the current policy
            if not on_policy:
                # NaN stays in rows without gradient: should a changed setting give them one, ρ is 1 there.
                recorded: list[Any] = []
                if self.args.router_replay == "R2":  # the loss replays the routing of this pass
                    self.logprob_computer.replay.recorded = recorded
                old_logps_BT = self._logps_of_rows(model, tokens, only, fill=math.nan)
                if self.args.router_replay == "R2":
                    self.logprob_computer.replay.recorded = None
                    rows = sorted(range(len(tokens)) if only is None else only)
                    of_rows = dict(zip(rows, recorded, strict=True))
                    tokens = replace(tokens, routed_experts=tuple(map(of_rows.get, range(len(tokens)))))
            # The reference is the model without its adapter, or another model, or None: β = 0.
            with self.reference.scoring(model) as reference:
                own = replace(tokens, routed_experts=None)  # a reference has routers of its own
                ref_logps_BT = None if reference is None else self._logps_of_rows(reference, own, only)
        return OldAndRefLogps(old_logps_BT, ref_logps_BT, tokens.routed_experts)

    @torch.no_grad()
    def add_missing_ref_logps(self, window: Sequence[Experience]) -> list[Experience]:
        """Add reference log-probs to experience of a generation that is older than the reference.

        A run saved with ``beta=0`` may resume with a reference, and a script may assign ``ref_model``.
        """
        if not self.reference.exists or all(batch.ref_logps_BT is not None for batch in window):
            return list(window)
        with evaluation_mode(self.model), self.reference.scoring(self.model) as reference:
            assert reference is not None

            def completed(batch: Experience) -> Experience:
                own = replace(batch, routed_experts=None)  # a reference has routers of its own
                return replace(batch, ref_logps_BT=self._logps_of_rows(reference, own, None))

            return [completed(batch) if batch.ref_logps_BT is None else batch for batch in window]

    @torch.no_grad()
    def completion_logprobs(
        self, rollouts: RolloutBatch, model: nn.Module | None = None
    ) -> list[list[float]]:
        """Compute log-probs of sampled tokens for reward functions with ``takes_logprobs``, without dropout.

        Args:
            rollouts: completions of this rank, B rows.
            model: any model with the policy's vocabulary; None: the policy.

        Returns:
            one list per completion with one value per token, NaN on tokens without loss.
        """
        tokens, model = self.collate(rollouts), self.model if model is None else model
        self.check_layout(tokens)
        with evaluation_mode(model):
            logps_BT = self._logps_of_rows(model, tokens, None)
        rows = logps_BT.masked_fill(tokens.loss_mask_BT == 0, math.nan).tolist()  # B lists of T values
        spans = [completion.last_row or (0, len(completion.token_ids)) for completion in rollouts.completions]
        return [row[start:end] for row, (start, end) in zip(rows, spans, strict=True)]

    def _logps_of_rows(
        self, model: nn.Module, tokens: TokenBatch, only: Sequence[int] | None, fill: float = 0.0
    ) -> torch.Tensor:
        """(B, T) log-probs of the rows in ``only``, computed by micro-batch; ``fill`` in the others."""
        chosen = set(range(len(tokens)) if only is None else only)
        logps_BT = torch.full(tokens.completion_ids_BT.shape, fill, device=tokens.completion_ids_BT.device)
        size = self.args.per_device_train_batch_size  # logits of more rows may not fit in memory
        for start in range(0, len(tokens), size):
            rows = [row for row in range(start, min(start + size, len(tokens))) if row in chosen]
            if rows:  # without columns of padding, so that T of the part may be smaller
                part_BT = self.compute_logprobs(model, tokens.select(rows)).logps_BT
                logps_BT[rows] = F.pad(part_BT, (0, logps_BT.shape[1] - part_BT.shape[1]))
        return logps_BT

    def apply_kl_penalty(
        self, rewards: RewardBatch, tokens: TokenBatch, logps: OldAndRefLogps | None
    ) -> RewardBatch:
        """Subtract β · Σ_t KL_it from every reward (``kl_in_reward``); without ``logps``, return ``rewards``.

        The penalty is subtracted from the aggregated reward of each completion.

        Raises:
            ConfigError: a reward function returned step rewards.
        """
        if logps is None or logps.ref_logps_BT is None:
            return rewards
        if rewards.step_rewards:
            raise ConfigError(
                "kl_in_reward=True applies to rewards of whole completions, but a reward function returned "
                "step rewards; put the KL into the loss (kl_in_reward=False)"
            )
        kl_BT = KL_ESTIMATORS[self.args.kl_estimator](logps.old_logps_BT, logps.ref_logps_BT)
        local_kl_B = kl_BT.masked_fill(tokens.loss_mask_BT == 0, 0.0).sum(-1)  # (B, T) -> (B,), a sum over t
        # Padding rows of an evaluation batch are the last ones of all ranks.
        kl_N = self.accelerator.gather(local_kl_B)[: len(rewards.rewards_NF)].to(rewards.rewards_NF)
        return replace(rewards, penalty_N=self.args.beta * kl_N)

    @torch.no_grad()
    def compute_entropy_masks(self, window: Sequence[TokenBatch]) -> list[torch.Tensor]:
        """Select the loss tokens in the top entropy quantile of an accumulation window, over all ranks.

        Beyond the 80/20 rule (arXiv 2506.01939). Without a quantile, all loss tokens are selected.

        Returns:
            one mask (B, T) of ones and zeros per batch.
        """
        if self.args.top_entropy_quantile >= 1.0:
            return [batch.loss_mask_BT for batch in window]
        model = self.model
        # A forward without gradient for the whole window: the threshold has to be known before the loss.
        outputs = [self.compute_logprobs(model, batch, with_entropy=True) for batch in window]
        entropies = [output.entropy_BT for output in outputs if output.entropy_BT is not None]
        masks = [batch.loss_mask_BT.bool() for batch in window]
        # (B, T) of every batch -> (number of loss tokens of this rank,)
        local = torch.cat([entropy[mask] for entropy, mask in zip(entropies, masks, strict=True)])
        padded = self.accelerator.pad_across_processes(local, pad_index=-1.0)
        gathered = self.accelerator.gather(padded)
        # An entropy is never negative, so padding cannot be mistaken for one.
        threshold = entropy_threshold(gathered[gathered >= 0], self.args.top_entropy_quantile)
        return [
            (entropy >= threshold.to(entropy)).long() * batch.loss_mask_BT
            for batch, entropy in zip(window, entropies, strict=True)
        ]
