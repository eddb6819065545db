"""Token weights of an accumulation window, and the loss of its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, cast

import torch
from accelerate import Accelerator

from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import corrects_for_sampler
from groupwise.core.entropy import EntropyControl
from groupwise.core.metrics import Mean, Metrics, masked_mean
from groupwise.core.objectives import OBJECTIVES, ObjectiveSettings, policy_loss
from groupwise.core.surrogates import SurrogateSettings
from groupwise.core.weights import NORMALIZERS, WindowCounts, count_rows, weigh_rows
from groupwise.errors import ConfigError
from groupwise.records import Experience, LogprobOutput, LossOutput, MicroBatch


class LossMixin:
    """Weigh tokens, compute the policy loss and control the entropy bonus."""

    args: GRPOConfig
    accelerator: Accelerator
    objective_settings: ObjectiveSettings
    entropy_control: EntropyControl
    router_aux_loss_coef: float

    #: Rows in which no loss token has an advantage other than zero have no gradient and may be skipped. Holds
    #: for the methods that the class defines itself: a subclass that overrides ``compute_policy_loss`` or
    #: ``compute_loss`` receives every row unless it declares this again.
    zero_grad_at_zero_advantage = True

    @property
    def balances_updates(self) -> bool:
        """Return True if experts are balanced over all micro-batches and ranks of an update."""
        return self.args.router_aux_loss_scope == "global_batch"

    def set_token_weights(
        self, window: Sequence[Experience], entropy_masks: Sequence[torch.Tensor]
    ) -> list[MicroBatch]:
        """Weigh every loss token of an accumulation window, from exact counts over all ranks.

        Args:
            window: experience of this rank, one entry per micro-batch.
            entropy_masks: one mask (B, T) per entry, from ``compute_entropy_masks``.

        Returns:
            the entries of ``window`` with token, sequence and entropy weights.
        """
        counted_B, sizes = torch.cat([batch.kept_B for batch in window]), [*map(len, window)]
        # A dropped row is in no denominator: a group of 8 with a failed rollout is trained as one of 7.
        sequences_B = counted_B.long()  # 1 per row that counts
        if by_row := self.args.rollout_credit == "row":
            sequences_B *= torch.cat([count_rows(batch) for batch in window])
        local = [  # four sums over the window of this rank, read together
            sequences_B.sum(),
            torch.stack([batch.loss_mask_BT.sum() for batch in window]).sum(),
            torch.stack([mask_BT.sum(dtype=torch.long) for mask_BT in entropy_masks]).sum(),
            torch.stack([rows_B.any() for rows_B in counted_B.split(sizes)]).sum(),
        ]
        totals = self.accelerator.reduce(torch.stack(local), "sum").tolist()
        sequences, tokens, bonus_tokens = max(totals[0], 1), totals[1], totals[2]  # of all ranks
        world_size = self.accelerator.num_processes
        micro_batches = max(totals[3], 1) / world_size  # without those of dropped rows alone
        normalizer = NORMALIZERS[OBJECTIVES[self.args.loss_type].normalizer]
        needed = normalizer.needs_group_tokens
        group_tokens = self._count_group_tokens(window, counted_B) if needed else {}
        length = self.args.max_completion_length
        counts = WindowCounts(sequences, tokens, micro_batches, world_size, length, group_tokens)
        target = self.args.entropy_target if self.args.use_adaptive_entropy else None
        coef = self.entropy_control.applied(target) if self.args.has_entropy_bonus else None
        # The bonus is a mean over the selected tokens of all ranks; gradients are averaged over ranks.
        bonus_weight = None if coef is None else coef * world_size / max(bonus_tokens, 1)
        # Rows of the window are numbered in rank order; ranks have equally many.
        first = self.accelerator.process_index * len(sequences_B)
        rows_N = torch.arange(first, first + len(sequences_B), device=sequences_B.device)
        parts = zip(window, entropy_masks, rows_N.split(sizes), sequences_B.split(sizes), strict=True)
        return [
            MicroBatch(
                **vars(batch),
                rows_B=rows_B,
                # w_it (B, T): the loss of the window is Σ w_it ℓ_it, however it is split.
                token_weights_BT=weigh_rows(normalizer, batch, counts)
                if by_row
                else normalizer(batch.loss_mask_BT.float(), batch.group_ids_B, counts),
                entropy_mask_BT=mask_BT,
                entropy_weights_BT=None if bonus_weight is None else mask_BT.float() * bonus_weight,
                # Its sum over all ranks is their number: DDP divides gradients by it. Others have 0.
                sequence_weight_B1=count_B.float().unsqueeze(1) * (world_size / sequences),
            )
            for batch, mask_BT, rows_B, count_B in parts
        ]

    def _count_group_tokens(self, window: Sequence[Experience], counted_B: torch.Tensor) -> dict[int, int]:
        """Count the loss tokens of every prompt of the window over all ranks, in the rows that count."""
        groups_B = torch.cat([batch.group_ids_B for batch in window])
        tokens_B = torch.cat([batch.loss_mask_BT.sum(-1) for batch in window])
        # One pair (group id, loss tokens) per row that counts.
        rows_B2 = torch.stack([groups_B, tokens_B], dim=1)[counted_B]
        # Ranks may have different numbers of rows; group ids are never negative.
        rows_N2 = self.accelerator.gather(self.accelerator.pad_across_processes(rows_B2, pad_index=-1))
        counts: dict[int, int] = {}
        for group, tokens in rows_N2.tolist():
            if group >= 0:
                counts[group] = counts.get(group, 0) + tokens
        return counts

    def compute_policy_loss(self, batch: MicroBatch, logprobs: LogprobOutput) -> LossOutput:
        """Compute the loss of one micro-batch; the losses of a window add up to the loss of the window.

        Override to train on another loss, or register an objective (``groupwise.register_objective``). Set
        ``zero_grad_at_zero_advantage = True`` beside the override if rows without advantage, and rows without
        loss tokens, have no gradient.

        Args:
            batch: masks, advantages, log-probs and token weights of this micro-batch.
            logprobs: log-probs and entropies (B, T) of the current policy, differentiable.

        Returns:
            loss: scalar, differentiable.
            bonus_entropy: entropy of the tokens of the entropy bonus; None without a bonus.
            metrics: metrics of the micro-batch.
        """
        # logps (B, T) -> surrogate ℓ_it (B, T) or (B, 1) -> Σ w_it ℓ_it, a scalar
        loss, metrics = policy_loss(batch, logprobs.logps_BT, logprobs.entropy_BT, self.objective_settings)
        mean = metrics.get("policy_loss")
        if isinstance(mean, Mean):  # a window counts once in the logs, however it is split
            metrics["policy_loss"] = Mean(mean.total, batch.sequence_weight_B1.sum())
        bonus_entropy = None
        if batch.entropy_weights_BT is not None and logprobs.entropy_BT is not None:
            bonus_entropy = masked_mean(logprobs.entropy_BT, batch.entropy_mask_BT)
        return LossOutput(loss, bonus_entropy, metrics)

    def add_aux_loss(
        self, output: LossOutput, aux_loss: torch.Tensor | None, batch: MicroBatch
    ) -> LossOutput:
        """Add the balancing loss of a mixture of experts, weighted by the share of the window."""
        if aux_loss is None:
            return output
        share = batch.sequence_weight_B1.sum()  # the shares of a window's micro-batches add up to 1
        # Losses that are parts of the update's add up over ranks, whose gradients are averaged.
        weight = self.accelerator.num_processes if self.balances_updates else share
        mean = Mean(aux_loss.detach() * weight, share) if self.balances_updates else Mean(aux_loss.detach())
        loss = output.loss + self.router_aux_loss_coef * aux_loss * weight
        return replace(output, loss=loss, metrics={**output.metrics, "aux_loss": mean})

    def update_entropy_coef(self, window_entropy: Mean) -> Metrics:
        """Update the adaptive entropy coefficient after a window. Returns the metrics to log.

        Args:
            window_entropy: entropy of the tokens of the bonus in this rank's window.
        """
        if not self.args.has_entropy_bonus:
            return {}
        settings = self.args
        if settings.use_adaptive_entropy:
            local = [torch.as_tensor(v, dtype=torch.float32) for v in vars(window_entropy).values()]
            # (sum of entropies, number of tokens) of all ranks: every rank takes the same decision.
            sums = torch.stack(local).to(self.accelerator.device)
            total, count = self.accelerator.reduce(sums, "sum").tolist()
            self.entropy_control = self.entropy_control.step(
                total / max(count, 1.0),
                settings.entropy_target,
                settings.entropy_coef_delta,
                settings.entropy_coef_min,
                settings.entropy_coef_max,
            )
        return {"entropy_coef": Mean(self.entropy_control.coef)}  # acts in the next window


def objective_settings(
    args: GRPOConfig, *, placeholder_logps: bool = False, truncation_unknown: bool = False
) -> ObjectiveSettings:
    """Collect the settings of the loss from the configuration.

    Args:
        placeholder_logps: the sampler's log-probs may be placeholders, see :func:`corrects_for_sampler`.
        truncation_unknown: the sampler truncates its distribution and does not report the sampling mask.
    """

    def named(kind: type) -> dict[str, Any]:
        return {field.name: vars(args).get(field.name) for field in fields(kind)}

    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    clip = {"epsilon_low": args.epsilon, "epsilon_high": high}
    loss_kwargs = cast("dict[str, object]", args.loss_kwargs or {})  # JSON is parsed when the config is built
    surrogate = OBJECTIVES[args.loss_type].surrogate_settings(
        SurrogateSettings(**named(SurrogateSettings) | clip), loss_kwargs
    )
    given = named(ObjectiveSettings) | {"truncation_unknown": truncation_unknown, "surrogate": surrogate}
    if not corrects_for_sampler(args, placeholder_logps=placeholder_logps):
        given["vllm_importance_sampling_mode"] = None
    return ObjectiveSettings(**given)


def check_loss_override(trainer: type[LossMixin], args: GRPOConfig) -> None:
    """Check that Liger's fused loss does not bypass a subclass's loss.

    Raises:
        ConfigError: ``use_liger_kernel=True`` with an overridden ``compute_policy_loss``.
    """
    if args.use_liger_kernel and trainer.compute_policy_loss is not LossMixin.compute_policy_loss:
        raise ConfigError(
            f"use_liger_kernel=True computes the loss without log-probs, but {trainer.__name__} overrides "
            "compute_policy_loss, which needs them; set use_liger_kernel=False"
        )
