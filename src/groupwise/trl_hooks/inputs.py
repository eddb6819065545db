"""Dictionaries of tensors under TRL's names, the argument of ``_compute_loss``.

The dictionary is the only form in which a generation batch is kept, so a hook may rebuild, reorder or filter
it: records are built from its tensors just before the loss.

    Experience --make_inputs--> dictionary of a generation batch
               --shuffle_rows, split_rows--> dictionaries of micro-batches
               --token_batch--> TokenBatch for log-probs, --micro_batch--> MicroBatch for the loss
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from groupwise.errors import ConfigError, warn_once
from groupwise.records import Experience, MicroBatch, TokenBatch

logger = logging.getLogger(__name__)

#: Tensors, lists and numbers by name; see :func:`make_inputs`.
Inputs = dict[str, Any]


def make_inputs(
    experience: Experience,
    num_items_in_batch: torch.Tensor,
    *,
    correction_BX: torch.Tensor | None = None,
    with_tool_mask: bool = False,
) -> Inputs:
    """Build TRL's dictionary of a generation batch, B rows of this rank.

    Example: the two rows of :class:`groupwise.records.TokenBatch`, on-policy and without a reference::

        prompt_ids     = [[5, 6], [0, 7]]    prompt_mask     = [[1, 1], [0, 1]]
        completion_ids = [[8, 2], [9, 0]]    completion_mask = [[1, 1], [1, 0]]
        advantages     = [0.7, -0.7]         num_items_in_batch = 3

    ``old_per_token_logps``, ``ref_per_token_logps``, ``sampling_per_token_logps``,
    ``importance_sampling_ratio`` and ``tool_mask`` are present where TRL has them.

    Args:
        num_items_in_batch: loss tokens of the generation batch on all ranks, a scalar.
        correction_BX: sampler correction, (B, T) or (B, 1); None: the loss has none.
        with_tool_mask: some completions contain tokens of tools or environments.
    """
    if experience.contexts is not None:
        raise ConfigError(
            "TRL's inputs have one prompt and one completion per rollout, but a rollout has rows that do not "
            "continue each other (rollout_ids); train with groupwise.GRPOTrainer in place of "
            "groupwise.trl_hooks"
        )
    mask_BT, loss_mask_BT = experience.completion_mask_BT, experience.loss_mask_BT
    # Rows without a loss token: masked truncated completions, and padding of an evaluation batch.
    dropped_B1 = loss_mask_BT.sum(-1, keepdim=True) == 0
    inputs: Inputs = {
        "prompt_ids": experience.prompt_ids_BL,
        "prompt_mask": experience.prompt_mask_BL,
        "completion_ids": experience.completion_ids_BT,
        "completion_mask": mask_BT.masked_fill(dropped_B1, 0),
        "advantages": experience.advantages_BX.squeeze(1),  # (B,), or (B, T) with process rewards
        "num_items_in_batch": num_items_in_batch,
    }
    if not experience.old_logps_BT.isnan().all():
        inputs["old_per_token_logps"] = experience.old_logps_BT
    if correction_BX is not None:
        inputs["importance_sampling_ratio"] = correction_BX
    if experience.sampler_logps_BT is not None:
        inputs["sampling_per_token_logps"] = experience.sampler_logps_BT.masked_fill(mask_BT == 0, 0.0)
    if experience.ref_logps_BT is not None:
        inputs["ref_per_token_logps"] = experience.ref_logps_BT
    if with_tool_mask:
        tool_mask_BT = loss_mask_BT.masked_fill(mask_BT == 0, 1)
        inputs["tool_mask"] = tool_mask_BT.masked_fill(dropped_B1, 0)
    return inputs


def num_rows(inputs: Mapping[str, Any]) -> int:
    """Return the number of rows: the length of the first entry that has one."""
    return next(len(value) for value in inputs.values() if _has_rows(value))


def _has_rows(value: object) -> bool:
    """Return False for None, numbers and tensors without axes, which every micro-batch shares."""
    return isinstance(value, list | tuple) or (isinstance(value, torch.Tensor) and value.dim() > 0)


def shuffle_rows(inputs: Inputs) -> Inputs:
    """Permute the rows by one draw from the global generator of torch, as TRL does before it splits them."""
    permutation = torch.randperm(num_rows(inputs))
    return {name: _select(value, permutation) for name, value in inputs.items()}


def split_rows(inputs: Inputs, count: int) -> list[Inputs]:
    """Split into ``count`` micro-batches of equal size; as in TRL, rows that fill none are dropped.

    Raises:
        ConfigError: there are fewer rows than micro-batches.
    """
    size = num_rows(inputs) // count
    if size == 0:
        raise ConfigError(
            f"_generate_and_score_completions returned {num_rows(inputs)} rows, but a generation batch is "
            f"split into {count} micro-batches (steps_per_generation={count}); return at least one row each"
        )
    if num_rows(inputs) % count:
        warn_once(
            logger,
            "_generate_and_score_completions returned rows that %d micro-batches (steps_per_generation) "
            "do not share equally: %d row(s) are not trained on",
            *(count, num_rows(inputs) % count),
        )
    return [
        {name: _select(value, slice(i * size, (i + 1) * size)) for name, value in inputs.items()}
        for i in range(count)
    ]


def _select(value: Any, rows: torch.Tensor | slice) -> Any:
    if not _has_rows(value):
        return value
    if isinstance(value, torch.Tensor) or isinstance(rows, slice):
        return value[rows]
    return [value[row] for row in rows.tolist()]


def loss_mask(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the mask (B, T) of the tokens with loss."""
    mask_BT: torch.Tensor = inputs["completion_mask"]
    return mask_BT * inputs["tool_mask"] if "tool_mask" in inputs else mask_BT


def model_inputs(inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and attention mask (B, L + T)."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    return ids, torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)


def token_batch(input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int) -> TokenBatch:
    """Build the record of prompts and completions, B rows, from one tensor (B, L + T) of both.

    Args:
        logits_to_keep: T, the number of completion columns.
    """
    mask = attention_mask.long()
    completion_ids_BT = input_ids[:, -logits_to_keep:]
    return TokenBatch(
        prompt_ids_BL=input_ids[:, :-logits_to_keep],
        prompt_mask_BL=mask[:, :-logits_to_keep],
        completion_ids_BT=completion_ids_BT,
        completion_mask_BT=mask[:, -logits_to_keep:],
        loss_mask_BT=mask[:, -logits_to_keep:],
        group_ids_B=torch.arange(len(mask), device=mask.device),
        old_logps_BT=torch.full(completion_ids_BT.shape, torch.nan, device=mask.device),
    )


def has_gaps(attention_mask: torch.Tensor, logits_to_keep: int) -> bool:
    """Return True if a mask is not 0…01…1 in the prompt, or 1…10…0 in the last ``logits_to_keep`` columns."""
    prompt, completion = attention_mask[:, :-logits_to_keep], attention_mask[:, -logits_to_keep:]
    falls = (prompt[:, 1:] < prompt[:, :-1]).any()
    return bool(falls | (completion[:, 1:] > completion[:, :-1]).any())


def micro_batch(
    inputs: Mapping[str, Any],
    *,
    token_weights_BT: torch.Tensor,
    entropy_mask_BT: torch.Tensor,
    entropy_weights_BT: torch.Tensor | None,
    share: float,
) -> MicroBatch:
    """Build the record that the objective reads, from the dictionary of a micro-batch.

    Args:
        share: share of the micro-batch in the accumulation window.
    """
    tokens = token_batch(*model_inputs(inputs), inputs["completion_ids"].shape[1])
    advantages, old_logps_BT = inputs["advantages"], inputs.get("old_per_token_logps")
    given = {"loss_mask_BT": loss_mask(inputs), "sampler_logps_BT": inputs.get("sampling_per_token_logps")}
    correction_BX = inputs.get("importance_sampling_ratio")
    if correction_BX is None and given["sampler_logps_BT"] is not None:  # the loss would compute one
        correction_BX = torch.ones(len(tokens), 1, device=advantages.device)
    if old_logps_BT is not None:  # else that of the current policy
        given["old_logps_BT"] = old_logps_BT
    return MicroBatch(
        **{**vars(tokens), **given},
        correction_BX=correction_BX,
        advantages_BX=advantages.unsqueeze(1) if advantages.dim() == 1 else advantages,
        ref_logps_BT=inputs.get("ref_per_token_logps"),
        token_weights_BT=token_weights_BT,
        entropy_mask_BT=entropy_mask_BT,
        entropy_weights_BT=entropy_weights_BT,
        sequence_weight_B1=torch.full((len(tokens), 1), share / len(tokens), device=advantages.device),
    )
