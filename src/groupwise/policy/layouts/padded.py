"""Padded layout: one row per sequence, prompts padded on the left, completions on the right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from groupwise.core.images import join_images
from groupwise.core.kept_tokens import KeptTokens, join_kept_tokens
from groupwise.policy.layouts.forward import (
    HeadSettings,
    ModelInputs,
    accepted_arguments,
    forward_logprobs,
    has_own_positions,
)
from groupwise.records import LogprobOutput, TokenBatch


def compute_padded_logprobs(
    model: nn.Module,
    batch: TokenBatch,
    head: HeadSettings,
    *,
    with_entropy: bool,
    with_aux_loss: bool = False,
) -> LogprobOutput:
    """Compute log-probs (and entropies) of the completion tokens under ``model``.

    Args:
        model: causal LM, wrapped or not.
        with_aux_loss: also return the balancing loss of a mixture-of-experts model.

    Returns:
        log-probs and entropies (B, T), float32, with arbitrary values on padding; balancing loss, a scalar.
    """
    inputs, targets_BK = padded_inputs(model, batch)
    logps_BK, entropy_BK, aux_loss = forward_logprobs(
        model,
        inputs,
        targets_BK,
        head,
        with_entropy=with_entropy,
        with_aux_loss=with_aux_loss,
        kept=_padded_kept_tokens(batch, targets_BK.shape[1]),
    )
    # The logits at position j - 1 predict the token at j; those of the last position are not used.
    predictors = slice(-(batch.completion_ids_BT.shape[1] + 1), -1)
    return LogprobOutput(
        logps_BK[:, predictors], None if entropy_BK is None else entropy_BK[:, predictors], aux_loss
    )


def _padded_kept_tokens(batch: TokenBatch, num_positions: int) -> KeptTokens | None:
    """Return kept tokens at the B x K positions of the head; see :func:`padded_inputs`."""
    if batch.kept_tokens is None:
        return None
    start = num_positions - 1 - batch.completion_ids_BT.shape[1]
    return join_kept_tokens(batch.kept_tokens, [num_positions] * len(batch), start)


def padded_inputs(model: nn.Module, batch: TokenBatch) -> tuple[ModelInputs, torch.Tensor]:
    """Build the arguments of the model's forward for ``batch``.

    Positions count from each row's first real token, so the amount of padding cannot change the result. A
    masked token between real ones counts too.

    Returns:
        arguments, and the target (B, K) of each position that the head receives: the last T + 1 if the model
        accepts ``logits_to_keep``, else all L + T. The last column is a dummy.
    """
    input_ids = torch.cat([batch.prompt_ids_BL, batch.completion_ids_BT], dim=1)
    attention_mask = torch.cat([batch.prompt_mask_BL, batch.completion_mask_BT], dim=1)
    accepted = accepted_arguments(model)
    inputs: ModelInputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    if batch.images is not None:
        starts = batch.prompt_ids_BL.shape[1] - batch.prompt_mask_BL.sum(-1)
        joined = join_images(batch.images, starts.tolist(), input_ids.shape[1], input_ids.device)
        inputs.update({name: value for name, value in joined.items() if name in accepted})
    has_images = batch.images is not None and any(row.arrays for row in batch.images)
    if "position_ids" in accepted and not (has_images and has_own_positions(model)):
        begun, not_ended = (mask.cummax(-1).values for mask in (attention_mask, attention_mask.flip(-1)))
        inputs["position_ids"] = ((begun * not_ended.flip(-1)).cumsum(-1) - 1).clamp(min=0)
    targets_BK = F.pad(input_ids[:, 1:], (0, 1))
    if "logits_to_keep" in accepted:
        kept = batch.completion_ids_BT.shape[1] + 1
        inputs["logits_to_keep"] = kept
        targets_BK = targets_BK[:, -kept:]
    return inputs, targets_BK
