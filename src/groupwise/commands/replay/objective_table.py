"""Registered objectives on one recorded optimizer step: value, gradient and its angle to the run's."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from groupwise.commands.replay.replay import logps_by_row
from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.objectives import OBJECTIVES, ObjectiveSettings, policy_loss
from groupwise.core.row_weights import count_rows, weigh_rows
from groupwise.core.weights import NORMALIZERS, WindowCounts
from groupwise.errors import ConfigError
from groupwise.mixins.loss import objective_settings
from groupwise.records import MicroBatch
from groupwise.reporting.rollout_files import StepRecord


class ObjectiveRow(NamedTuple):
    """One objective on the tokens of a step.

    The gradient is that with respect to the log-probs of the loss tokens of the window, ∂L / ∂ℓ, without the
    entropy bonus: one number per token, by which the objective raises or lowers it.

    name: registered name.
    value: loss of the window.
    gradient_norm: Euclidean norm of the gradient.
    cosine: cosine between the gradient and that of the run's objective; NaN if one of them is zero.

    All numbers are NaN for an objective whose own settings have no defaults.
    """

    name: str
    value: float
    gradient_norm: float
    cosine: float


def objective_table(
    records: Sequence[StepRecord], config: GRPOConfig, names: Iterable[str] | None = None
) -> list[ObjectiveRow]:
    """Evaluate objectives on the log-probs of a step; the row of the run's objective comes first.

    Needs no model: the log-probs come from one forward pass, that of the step. Rows that the step did not
    compute, because they have no gradient, count in the normalizers alone.

    Args:
        records: one of each rank.
        config: settings of the run.
        names: objectives; None: all registered ones.

    Raises:
        ConfigError: the step has no log-probs, because it was computed with Liger's loss.
    """
    batches, logps = _with_logps(records)
    others = [name for name in (OBJECTIVES if names is None else names) if name != config.loss_type]
    own = _evaluate(config.loss_type, records, batches, logps, config)
    rows = []
    for name in [config.loss_type, *others]:
        try:
            is_own = name == config.loss_type
            loss, gradient = own if is_own else _evaluate(name, records, batches, logps, config)
        except TypeError:  # its settings have no defaults
            rows.append(ObjectiveRow(name, math.nan, math.nan, math.nan))
            continue
        norms = gradient.norm() * own[1].norm()
        # Exactly 1 for equal gradients: rounding of the norms would give 1 ± 1e-16.
        cosine = torch.dot(gradient, own[1]) / norms if not torch.equal(gradient, own[1]) else norms / norms
        rows.append(ObjectiveRow(name, loss, gradient.norm().item(), cosine.item()))
    return rows


def _with_logps(records: Sequence[StepRecord]) -> tuple[list[MicroBatch], list[torch.Tensor]]:
    """Return the micro-batches of all ranks, with token weights of zero on rows without log-probs."""
    found = {row: logps for record in records for row, logps in logps_by_row(record).items()}
    if not found:
        raise ConfigError(
            "the step has no log-probs: it was computed with Liger's loss, or no row has a gradient"
        )
    batches, logps = [], []
    for batch in (batch for record in records for batch in record.window):
        # Rows that were not computed have ratio 1: their log-probs are those of the old policy, or zero.
        logps_BT = batch.old_logps_BT.nan_to_num(0.0).clone()
        computed_B1 = torch.zeros(len(batch), 1)
        for index, row in enumerate(batch.row_numbers()):
            if row in found:
                width = min(len(found[row]), logps_BT.shape[1])
                logps_BT[index, :width] = found[row][:width]
                computed_B1[index] = 1.0
        batches.append(replace(batch, sequence_weight_B1=computed_B1, entropy_weights_BT=None))
        logps.append(logps_BT)
    return batches, logps


def _evaluate(
    name: str,
    records: Sequence[StepRecord],
    batches: Sequence[MicroBatch],
    logps: Sequence[torch.Tensor],
    config: GRPOConfig,
) -> tuple[float, torch.Tensor]:
    """Return the loss of the window and its gradient by log-prob, float64 and flat."""
    settings = _settings(name, records[0], config)
    normalizer = NORMALIZERS[OBJECTIVES[name].normalizer]
    counts, world_size = _counts(records, config), records[0].world_size
    leaves = [logps_BT.clone().requires_grad_() for logps_BT in logps]
    losses = []
    for batch, leaf in zip(batches, leaves, strict=True):
        if config.rollout_credit == "row":
            weights_BT = weigh_rows(normalizer, batch, counts)
        else:
            weights_BT = normalizer(batch.loss_mask_BT.float(), batch.group_ids_B, counts)
        # ``sequence_weight_B1`` is 1 on computed rows here. Ranks are averaged: undo their factor.
        weighed = replace(batch, token_weights_BT=weights_BT * batch.sequence_weight_B1 / world_size)
        losses.append(policy_loss(weighed, leaf, None, settings)[0])
    gradients = torch.autograd.grad(torch.stack(losses).sum(), leaves)
    masks = [batch.loss_mask_BT.bool() for batch in batches]
    flat = torch.cat([part[mask].double() for part, mask in zip(gradients, masks, strict=True)])
    return sum(loss.item() for loss in losses), flat


def _settings(name: str, record: StepRecord, config: GRPOConfig) -> ObjectiveSettings:
    """Return the run's settings of the loss for another objective, with the defaults of its own settings."""
    changed = copy.copy(config)
    if name != config.loss_type:
        changed.loss_type, changed.loss_kwargs = name, None
    changed.vllm_importance_sampling_correction = record.corrects_for_sampler
    return objective_settings(changed, truncation_unknown=record.truncation_unknown)


def _counts(records: Sequence[StepRecord], config: GRPOConfig) -> WindowCounts:
    windows = [batch for record in records for batch in record.window]
    by_row = config.rollout_credit == "row"
    sequences = sum(int(((b.group_ids_B >= 0) * (count_rows(b) if by_row else 1)).sum()) for b in windows)
    group_tokens: dict[int, int] = {}
    for batch in windows:
        for group, tokens in zip(
            batch.group_ids_B.tolist(), batch.loss_mask_BT.sum(-1).tolist(), strict=True
        ):
            if group >= 0:
                group_tokens[group] = group_tokens.get(group, 0) + tokens
    return WindowCounts(
        sequences=max(sequences, 1),
        tokens=sum(int(batch.loss_mask_BT.sum()) for batch in windows),
        micro_batches=len(records[0].window),
        world_size=records[0].world_size,
        max_completion_length=config.max_completion_length,
        group_tokens=group_tokens,
    )
