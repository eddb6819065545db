"""Log-probs of tensors that a hook passes, whatever its masks look like."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from groupwise.policy.layouts.forward import forward_logprobs
from groupwise.policy.layouts.padded import padded_inputs
from groupwise.policy.logprobs import LogprobComputer
from groupwise.records import LogprobOutput, TokenBatch
from groupwise.trl_hooks.inputs import has_gaps


def logprobs_of_rows(
    computer: LogprobComputer,
    model: nn.Module,
    batch: TokenBatch,
    size: int,
    *,
    with_entropy: bool,
    with_aux_loss: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Compute log-probs of the completions by ``size`` rows at a time, in the layout of the run.

    Returns:
        log-probs and entropies (B, T), float32, 0 on padding; the balancing loss, a mean over the forward
        passes. The latter two are None unless requested.
    """
    gaps = has_gaps(batch)
    chunks = [range(start, min(start + size, len(batch))) for start in range(0, len(batch), size)]
    outputs = []
    for rows in chunks:
        if gaps:
            outputs.append(_with_gaps(computer, model, batch, rows, with_entropy, with_aux_loss))
        else:
            part = batch.select(rows)  # without columns of padding
            outputs.append(computer(model, part, with_entropy=with_entropy, with_aux_loss=with_aux_loss))
    masks = batch.completion_mask_BT.split([len(rows) for rows in chunks])
    logps_BT = torch.cat([_widened(o.logps_BT, mask) for o, mask in zip(outputs, masks, strict=True)])
    entropies = [
        _widened(o.entropy_BT, mask)
        for o, mask in zip(outputs, masks, strict=True)
        if o.entropy_BT is not None
    ]
    aux_losses = [output.aux_loss for output in outputs if output.aux_loss is not None]
    return (
        logps_BT,
        torch.cat(entropies) if entropies else None,
        torch.stack(aux_losses).mean() if aux_losses else None,
    )


def _widened(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Pad to the width of the mask, with 0 where it is 0."""
    missing = mask_BT.shape[1] - values_BT.shape[1]
    return torch.nn.functional.pad(values_BT, (0, missing)).masked_fill(mask_BT == 0, 0.0)


def _with_gaps(
    computer: LogprobComputer,
    model: nn.Module,
    batch: TokenBatch,
    rows: range,
    with_entropy: bool,
    with_aux_loss: bool,
) -> LogprobOutput:
    """Compute log-probs where tokens inside a sequence are masked: hidden from attention, but counted.

    The other layouts would take the masked tokens out of the sequence and move the others together.
    """
    index = slice(rows.start, rows.stop)
    fields: dict[str, Any] = {name: tensor[index] for name, tensor in batch.tensors().items()}
    part = TokenBatch(**fields)
    inputs, targets_BK = padded_inputs(model, part)
    if "position_ids" in inputs:
        mask = inputs["attention_mask"]
        columns = torch.arange(mask.shape[1], device=mask.device)
        inputs["position_ids"] = (columns - mask.argmax(-1, keepdim=True)).clamp(min=0)
    logps_BK, entropy_BK, aux_loss = forward_logprobs(
        model, inputs, targets_BK, computer.head, with_entropy=with_entropy, with_aux_loss=with_aux_loss
    )
    predictors = slice(-(part.completion_ids_BT.shape[1] + 1), -1)
    return LogprobOutput(
        logps_BK[:, predictors], None if entropy_BK is None else entropy_BK[:, predictors], aux_loss
    )
