"""Log-probs of tensors that a hook passes, whatever its masks look like."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
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
    if has_gaps(batch):
        # Masked tokens inside a sequence are hidden from attention, but counted. The other layouts would take
        # them out of the sequence and move the others together.
        columns = {name: tensor.split(size) for name, tensor in batch.tensors().items()}
        parts = [dict(zip(columns, part, strict=True)) for part in zip(*columns.values(), strict=True)]
        shown = [replace(batch, **part) for part in parts]
        outputs = [compute_padded_logprobs(model, part, computer.head, **wanted) for part in shown]
    else:  # without columns of padding
        outputs = [computer(model, part, **wanted) for part in batch.split(size)]
    entropies = [output.entropy_BT for output in outputs if output.entropy_BT is not None]
    aux_losses = [output.aux_loss for output in outputs if output.aux_loss is not None]
    return (
        _joined([output.logps_BT for output in outputs], batch.completion_mask_BT),
        _joined(entropies, batch.completion_mask_BT) if entropies else None,
        torch.stack(aux_losses).mean() if aux_losses else None,
    )


def _joined(parts: list[torch.Tensor], mask_BT: torch.Tensor) -> torch.Tensor:
    """Concatenate the rows of the parts, padded to the width of the mask, with 0 where it is 0."""
    width = mask_BT.shape[1]
    padded = [F.pad(part, (0, width - part.shape[1])) for part in parts]  # each without its padding columns
    return torch.cat(padded).masked_fill(mask_BT == 0, 0.0)
