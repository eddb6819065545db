"""The rectangular layout: prompts padded on the left, completions on the right, one row per sequence."""

from __future__ import annotations

import torch

from groupwise.core.images import join_images
from groupwise.policy.layouts.forward import (
    HeadSettings,
    accepted_arguments,
    has_own_positions,
    score_forward,
)
from groupwise.records import LogprobOutput, TokenBatch


def compute_padded_logprobs(
    model: torch.nn.Module,
    batch: TokenBatch,
    head: HeadSettings,
    *,
    with_entropy: bool,
    with_aux_loss: bool = False,
) -> LogprobOutput:
    """Log-probs (and entropies) of the completion tokens under ``model``, shape (B, C), float32.

    StepCounterDataset restart at each row's first real token: the amount of padding cannot change the result.
    """
    input_ids = torch.cat([batch.prompt_ids_BL, batch.completion_ids_BT], dim=1)
    attention_mask = torch.cat([batch.prompt_mask_BL, batch.completion_mask_BT], dim=1)
    width = batch.completion_ids_BT.shape[1]
    accepted = accepted_arguments(model)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    if batch.images is not None:
        starts = batch.prompt_ids_BL.shape[1] - batch.prompt_mask_BL.sum(-1)
        joined = join_images(batch.images, starts.tolist(), input_ids.shape[1], input_ids.device)
        inputs.update({name: value for name, value in joined.items() if name in accepted})
    has_images = batch.images is not None and any(row.arrays for row in batch.images)
    if "position_ids" in accepted and not (has_images and has_own_positions(model)):
        inputs["position_ids"] = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    # The token at position j is predicted at j - 1: the last position predicts nothing and gets a dummy
    # target.
    targets = torch.nn.functional.pad(input_ids[:, 1:], (0, 1))
    if "logits_to_keep" in accepted:
        inputs["logits_to_keep"] = width + 1  # type: ignore[assignment]
        targets = targets[:, -(width + 1) :]
    logps, entropy, aux_loss = score_forward(
        model, inputs, targets, head, with_entropy=with_entropy, with_aux_loss=with_aux_loss
    )
    span = slice(-(width + 1), -1)
    return LogprobOutput(logps[:, span], None if entropy is None else entropy[:, span], aux_loss)
