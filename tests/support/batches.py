"""Token batches for tests that need no rollout."""

from __future__ import annotations

from typing import Any

import torch

from groupwise.policy.heads.capture import LogprobHead
from groupwise.policy.layouts.packed import compute_packed_logprobs, pack_sequences
from groupwise.records import LogprobOutput, MicroBatch, TokenBatch


def token_batch(
    prompts: torch.Tensor,
    prompt_mask: torch.Tensor,
    completions: torch.Tensor,
    completion_mask: torch.Tensor,
    **fields: Any,
) -> TokenBatch:
    """On-policy sequences whose completion tokens all have a loss; every row is a group of its own."""
    return TokenBatch(**_fields(prompts, prompt_mask, completions, completion_mask), **fields)


def micro_batch(
    prompts: torch.Tensor,
    prompt_mask: torch.Tensor,
    completions: torch.Tensor,
    completion_mask: torch.Tensor,
    **fields: Any,
) -> MicroBatch:
    """The same, ready for the loss."""
    given = _fields(prompts, prompt_mask, completions, completion_mask)
    return MicroBatch(**{"entropy_mask_BT": completion_mask, **given, **fields})


def _fields(prompts: Any, prompt_mask: Any, completions: Any, completion_mask: Any) -> dict[str, Any]:
    return {
        "prompt_ids_BL": prompts,
        "prompt_mask_BL": prompt_mask,
        "completion_ids_BT": completions,
        "completion_mask_BT": completion_mask,
        "loss_mask_BT": completion_mask,
        "group_ids_B": torch.arange(len(prompts)),
        "old_logps_BT": torch.full(completions.shape, torch.nan),
    }


def packed(*, shared: bool) -> Any:
    """Log-probs in a packed layout, called as ``compute_padded_logprobs`` is."""

    def compute(model: Any, batch: TokenBatch, head: LogprobHead, *, with_entropy: bool) -> LogprobOutput:
        sequences = pack_sequences(batch, shared=shared)
        return compute_packed_logprobs(model, batch, sequences, head, with_entropy=with_entropy)

    return compute
