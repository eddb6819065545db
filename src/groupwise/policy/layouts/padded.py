"""Padded layout: one row per sequence, prompts padded on the left, completions on the right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from groupwise.policy.introspection import accepted_arguments, has_own_positions, has_prompt_learning
from groupwise.policy.layouts.forward import HeadSettings, ModelInputs, forward_logprobs
from groupwise.records import LogprobOutput, TokenBatch
from groupwise.records.images import join_images
from groupwise.records.sampling_mask import SamplingMask, join_sampling_masks


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
    if has_prompt_learning(model):
        return _right_padded_logprobs(
            model, batch, head, with_entropy=with_entropy, with_aux_loss=with_aux_loss
        )
    inputs, targets_BK = padded_inputs(model, batch)
    logps_BK, entropy_BK, aux_loss = forward_logprobs(
        model,
        inputs,
        targets_BK,
        head,
        with_entropy=with_entropy,
        with_aux_loss=with_aux_loss,
        kept=_padded_sampling_mask(batch, targets_BK.shape[1]),
    )
    # The logits at position j - 1 predict the token at j; those of the last position are not used.
    predictors = slice(-(batch.completion_ids_BT.shape[1] + 1), -1)
    return LogprobOutput(
        logps_BK[:, predictors], None if entropy_BK is None else entropy_BK[:, predictors], aux_loss
    )


def _right_padded_logprobs(
    model: nn.Module, batch: TokenBatch, head: HeadSettings, *, with_entropy: bool, with_aux_loss: bool
) -> LogprobOutput:
    """Compute log-probs for an adapter of virtual tokens, which PEFT puts before the first column.

    Padding between them and a prompt would change the positions of the prompt, so that the log-probs of a row
    would depend on the longest prompt beside it. All padding is on the right here.
    """
    num_prompt, num_completion = batch.prompt_ids_BL.shape[1], batch.completion_ids_BT.shape[1]
    start_B1 = batch.prompt_mask_BL.argmax(-1, keepdim=True)  # first real token
    column_1S = torch.arange(num_prompt + num_completion, device=start_B1.device).unsqueeze(0)
    order_BS = (column_1S + start_B1) % column_1S.shape[1]
    ids_BS = torch.cat([batch.prompt_ids_BL, batch.completion_ids_BT], dim=1).gather(1, order_BS)
    mask_BS = torch.cat([batch.prompt_mask_BL, batch.completion_mask_BT], dim=1).gather(1, order_BS)
    no_prompt: dict[str, Any] = {"prompt_ids_BL": ids_BS[:, :0], "prompt_mask_BL": mask_BS[:, :0]}
    rows = replace(
        batch, **no_prompt, completion_ids_BT=ids_BS, completion_mask_BT=mask_BS, sampling_mask=None
    )
    inputs, _ = padded_inputs(model, rows)
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = column_1S.shape[1]
    starts = start_B1.flatten().tolist()
    kept = None
    if batch.sampling_mask is not None:
        places = [num_prompt - 1 - start for start in starts]
        kept = join_sampling_masks(batch.sampling_mask, [column_1S.shape[1]] * len(batch), places)
    logps_BS, entropy_BS, aux_loss = forward_logprobs(
        model,
        inputs,
        F.pad(ids_BS[:, 1:], (0, 1)),
        head,
        with_entropy=with_entropy,
        with_aux_loss=with_aux_loss,
        kept=kept,
    )
    # The logits at the position before a token predict it.
    predictors_BT = num_prompt - 1 - start_B1 + column_1S[:, :num_completion]
    return LogprobOutput(
        logps_BS.gather(1, predictors_BT),
        None if entropy_BS is None else entropy_BS.gather(1, predictors_BT),
        aux_loss,
    )


def _padded_sampling_mask(batch: TokenBatch, num_positions: int) -> SamplingMask | None:
    """Return the sampling mask at the B x K positions of the head; see :func:`padded_inputs`."""
    if batch.sampling_mask is None:
        return None
    start = num_positions - 1 - batch.completion_ids_BT.shape[1]
    return join_sampling_masks(batch.sampling_mask, [num_positions] * len(batch), start)


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
