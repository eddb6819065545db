"""Log-probs of tensors that a hook passes, whatever its masks look like."""

from __future__ import annotations

import torch
from torch import nn

from groupwise.policy.layouts.padded import compute_padded_logprobs
from groupwise.policy.logprobs import LogprobComputer
from groupwise.records import TokenBatch
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
    wanted = {"with_entropy": with_entropy, "with_aux_loss": with_aux_loss}
    gaps = has_gaps(batch)
    chunks = [range(start, min(start + size, len(batch))) for start in range(0, len(batch), size)]
    outputs = []
    for rows in chunks:
        if gaps:
            # Masked tokens inside a sequence are hidden from attention, but counted. The other layouts would
            # take them out of the sequence and move the others together.
            part = {name: tensor[rows.start : rows.stop] for name, tensor in batch.tensors().items()}
            shown = TokenBatch(**part, sampler=batch.sampler)  # type: ignore[arg-type]
            outputs.append(compute_padded_logprobs(model, shown, computer.head, **wanted))
        else:  # without columns of padding
            outputs.append(computer(model, batch.select(rows), **wanted))
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
