"""Padded layout: one row per sequence, prompts padded on the left, completions on the right.

    prompt ids (B, L)           completion ids (B, T)
    [ .  .  p0 p1 p2 | c0 c1 c2 .  ]        . padding, not attended to
      0  0  0  1  2    3  4  5  5           position ids, from the first real token
                c0   c1 c2 .                predicted by the last T + 1 columns, of which the last is unused

Axes: B rows, L prompt tokens, T completion tokens, S = L + T, K positions that the head receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from groupwise.policy.heads.capture import LogprobHead, ModelInputs, forward_logprobs
from groupwise.policy.introspection import accepted_arguments, has_own_positions, has_prompt_learning
from groupwise.records import LogprobOutput, TokenBatch
from groupwise.records.images import has_images, join_images
from groupwise.records.sampling_mask import join_sampling_masks


def compute_padded_logprobs(
    model: nn.Module,
    batch: TokenBatch,
    head: LogprobHead,
    *,
    with_entropy: bool,
    with_aux_loss: bool = False,
    with_router_sums: bool = False,
    routing: Any = None,
    rows_R: torch.Tensor | None = None,
) -> LogprobOutput:
    """Compute log-probs (and entropies) of the completion tokens at the temperature that sampled them.

    Args:
        routing: ``BatchRouting`` of the batch that has these rows at ``rows_R``; None: these alone.

    Returns:
        log-probs and entropies (B, T), float32, with arbitrary values on padding; balancing loss, a
        scalar, or router sums.
    """
    size, width = batch.completion_ids_BT.shape  # B, T
    virtual_tokens = has_prompt_learning(model)
    inputs, targets_BK = padded_inputs(model, _right_padded(batch) if virtual_tokens else batch)
    if routing is not None:  # all B · S tokens in order
        rows_R = torch.arange(size, device=targets_BK.device) if rows_R is None else rows_R
        prompt_width = batch.prompt_ids_BL.shape[1]
        inputs["routing"] = routing, routing.index(rows_R, prompt_width, prompt_width + width)
    num_positions = targets_BK.shape[1]  # K
    # Column of the first completion token's predictor, the last token of the prompt: one, or one per row.
    first: int | torch.Tensor = num_positions - 1 - width
    if virtual_tokens:  # nothing is before a prompt, so its length decides
        first = batch.prompt_mask_BL.shape[1] - 1 - batch.prompt_mask_BL.argmax(-1, keepdim=True)  # (B, 1)
    kept = None
    if batch.sampling_mask is not None:
        starts = first.flatten().tolist() if isinstance(first, torch.Tensor) else first
        kept = join_sampling_masks(batch.sampling_mask, [num_positions] * size, starts)
    logps_BK, entropy_BK, aux_loss = forward_logprobs(
        model,
        inputs,
        targets_BK,
        head,
        batch.sampler.temperature,
        with_entropy=with_entropy,
        with_aux_loss=with_aux_loss,
        router_weight_S=inputs["attention_mask"].flatten() if with_router_sums else None,
        kept=kept,
    )
    column_BT = (first + torch.arange(width, device=targets_BK.device)).expand(size, width)
    return LogprobOutput(
        logps_BK.gather(1, column_BT),
        None if entropy_BK is None else entropy_BK.gather(1, column_BT),
        aux_loss,
    )


def compute_equal_lengths(
    model: nn.Module,
    batch: TokenBatch,
    head: LogprobHead,
    *,
    with_entropy: bool,
    with_aux_loss: bool = False,
    routing: Any = None,
) -> LogprobOutput:
    """Compute log-probs as :func:`compute_padded_logprobs`, of the rows of equal lengths together.

    No pass has padding: exact for every causal model, also if padding on the left moves its states, or the
    longest row of a batch its positions. The slowest layout: a pass may have one row. Router sums add up.
    """
    lengths = torch.stack([batch.prompt_mask_BL.sum(-1), batch.completion_mask_BT.sum(-1)], dim=1)
    by_lengths: dict[tuple[int, ...], list[int]] = {}
    for row, pair in enumerate(lengths.tolist()):  # (prompt tokens, completion tokens)
        by_lengths.setdefault(tuple(pair), []).append(row)
    options: Any = {"with_entropy": with_entropy, "with_router_sums": with_aux_loss, "routing": routing}
    parts = []
    for rows in by_lengths.values():
        rows_R = torch.tensor(rows, device=lengths.device)
        parts.append(
            (rows_R, compute_padded_logprobs(model, batch.select(rows), head, rows_R=rows_R, **options))
        )
    return join_outputs(parts, batch.completion_ids_BT.shape[1], [output.aux_loss for _, output in parts])


def join_outputs(
    parts: Sequence[tuple[torch.Tensor, LogprobOutput]], width: int, sums: Sequence[torch.Tensor | None]
) -> LogprobOutput:
    """Return the outputs (R, T') of parts of a batch, each with its rows, as those of the batch, (B, T).

    Args:
        width: T.
        sums: router sums of all passes, which add up; None of passes without.
    """
    place_B = torch.cat([rows_R for rows_R, _ in parts]).argsort()  # of each row among the parts

    def joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([F.pad(each, (0, width - each.shape[1])) for each in values])[place_B]

    entropies = [output.entropy_BT for _, output in parts if output.entropy_BT is not None]
    given = [each for each in sums if each is not None]
    return LogprobOutput(
        joined([output.logps_BT for _, output in parts]),
        joined(entropies) if entropies else None,
        torch.stack(given).sum(0) if given else None,
    )


def _right_padded(batch: TokenBatch) -> TokenBatch:
    """Return the sequences of ``batch`` as completions (B, S) without prompts, all padding on the right.

    For an adapter of virtual tokens, which PEFT puts before the first column: padding between them and a
    prompt would change the positions of the prompt, so that the log-probs of a row would depend on the
    longest prompt beside it.
    """
    ids_BS, mask_BS = batch.sequences()
    start_B1 = batch.prompt_mask_BL.argmax(-1, keepdim=True)  # first real token
    # Row i is rotated left by start_i: [. . p0 p1 | c0 c1] becomes [p0 p1 c0 c1 . .].
    order_BS = (torch.arange(ids_BS.shape[1], device=ids_BS.device) + start_B1) % ids_BS.shape[1]
    changed: dict[str, Any] = {
        "prompt_ids_BL": ids_BS[:, :0],
        "prompt_mask_BL": mask_BS[:, :0],
        "completion_ids_BT": ids_BS.gather(1, order_BS),
        "completion_mask_BT": mask_BS.gather(1, order_BS),
        "sampling_mask": None,
    }
    return replace(batch, **changed)


def padded_inputs(model: nn.Module, batch: TokenBatch) -> tuple[ModelInputs, torch.Tensor]:
    """Build the arguments of the model's forward for ``batch``.

    Positions count from each row's first real token, so the amount of padding cannot change the result. A
    masked token between real ones counts too.

    Returns:
        arguments, and the target (B, K) of each position that the head receives: the last T + 1 (or S, if
        fewer) if the model accepts ``logits_to_keep``, else all S. The last column is a dummy.
    """
    input_ids_BS, mask_BS = batch.sequences()
    accepted = accepted_arguments(model)
    inputs: ModelInputs = {"input_ids": input_ids_BS, "attention_mask": mask_BS}
    if batch.images is not None:
        starts = batch.prompt_ids_BL.shape[1] - batch.prompt_mask_BL.sum(-1)
        joined = join_images(batch.images, starts.tolist(), input_ids_BS.shape[1], input_ids_BS.device)
        inputs.update({name: value for name, value in joined.items() if name in accepted})
    if "position_ids" in accepted and not (has_images(batch.images) and has_own_positions(model)):
        begun, not_ended = (mask.cummax(-1).values for mask in (mask_BS, mask_BS.flip(-1)))
        # 1 from the first to the last real token, so that the sum counts gaps: (B, S) from 0.
        inputs["position_ids"] = ((begun * not_ended.flip(-1)).cumsum(-1) - 1).clamp(min=0)
    targets_BK = F.pad(input_ids_BS[:, 1:], (0, 1))  # the token after each position
    if "logits_to_keep" in accepted:
        # Not more than S: columns of virtual tokens would precede them.
        inputs["logits_to_keep"] = min(batch.completion_ids_BT.shape[1] + 1, input_ids_BS.shape[1])
        targets_BK = targets_BK[:, -inputs["logits_to_keep"] :]
    return inputs, targets_BK
