"""Completions from the user's ``rollout_func``."""

from __future__ import annotations

from typing import Any

import torch

from groupwise.errors import BackendError, boundary
from groupwise.records import Completion, RolloutFunction, copied
from groupwise.tokenization.prompts import Prompt

_RESERVED_KEYS = ("prompt_ids", "completion_ids", "logprobs", "env_mask")


def call_rollout_function(
    function: RolloutFunction,
    prompts: list[Prompt],
    trainer: object,
    end_tokens: frozenset[int],
    vocab_size: int = 2**31,
) -> tuple[list[list[int]], list[Completion], dict[str, list[Any]]]:
    """Call ``function(prompts, trainer)`` and check its result.

    Args:
        function: returns a dict of lists with B entries: ``prompt_ids`` and ``completion_ids`` (token ids);
            optionally ``logprobs`` (per completion token, None or NaN if unknown) and ``env_mask`` (1 for
            tokens of the policy, 0 for others, which carry no loss). A row may be a tensor or an array.
            Other keys are columns for the rewards.
        prompts: B prompts, each repeated once per completion. The function gets copies and may change them.
        trainer: passed to the function.
        end_tokens: a completion that does not end in one of these counts as truncated.
        vocab_size: number of token ids that the policy has.

    Returns:
        prompt token ids, completions and extra columns, B entries each.

    Raises:
        BackendError: the function raised, a required key is missing, lengths differ, or a token id, log-prob
            or mask is invalid; the message names the row.
    """
    name = getattr(function, "__name__", type(function).__name__)
    with boundary(BackendError, f"rollout_func {name!r}"):
        output = function(copied(prompts), trainer)
    missing = [key for key in ("prompt_ids", "completion_ids") if output.get(key) is None]
    if missing:
        raise BackendError(
            f"rollout_func {name!r} returned no {' and no '.join(missing)}; it returned {sorted(output)}; "
            "it must return prompt_ids and completion_ids, and may return logprobs, env_mask and extra "
            "columns"
        )
    for key, values in output.items():
        if values is not None and len(values) != len(prompts):
            raise BackendError(
                f"rollout_func {name!r} returned {len(values)} entries for {key!r}, but there are "
                f"{len(prompts)} prompts (each prompt is repeated once per completion)"
            )
    fields = {key: output[key] for key in _RESERVED_KEYS if output.get(key) is not None}
    rows = [
        _checked(name, row, {key: _plain(values[row]) for key, values in fields.items()}, vocab_size)
        for row in range(len(prompts))
    ]
    completions = [
        Completion(
            token_ids=row["completion_ids"],
            logps=None
            if "logprobs" not in row
            else [torch.nan if v is None else float(v) for v in row["logprobs"]],
            loss_mask=None if "env_mask" not in row else [int(value) for value in row["env_mask"]],
            truncated=not row["completion_ids"] or row["completion_ids"][-1] not in end_tokens,
        )
        for row in rows
    ]
    extra = {
        key: list(values)
        for key, values in output.items()
        if key not in _RESERVED_KEYS and values is not None
    }
    return [row["prompt_ids"] for row in rows], completions, extra


def _plain(values: Any) -> list[Any]:
    """Return a row as a list of Python numbers: it may be a tensor, an array, or a list of their scalars."""
    return [value.item() if hasattr(value, "item") else value for value in values]


def _checked(name: str, row: int, fields: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the fields of a row if they are valid; token ids become ints."""

    def refuse(key: str, found: str, allowed: str) -> None:
        raise BackendError(f"rollout_func {name!r}, completion {row}: {key!r} {found}; allowed: {allowed}")

    for key in ("prompt_ids", "completion_ids"):
        for at, token in enumerate(fields[key]):
            if not (isinstance(token, int) and 0 <= token < vocab_size):
                refuse(key, f"holds {token!r} at position {at}", f"token ids from 0 to {vocab_size - 1}")
    if not fields["prompt_ids"]:
        refuse("prompt_ids", "is empty", "one token id or more, from which the first one is predicted")
    for key in ("logprobs", "env_mask"):
        if key in fields and len(fields[key]) != len(fields["completion_ids"]):
            raise BackendError(
                f"rollout_func {name!r}, completion {row}: {len(fields[key])} values in {key!r} for "
                f"{len(fields['completion_ids'])} tokens"
            )
    for value in fields.get("logprobs", ()):
        if value is not None and not isinstance(value, float | int):
            refuse("logprobs", f"holds {value!r}", "numbers; None or NaN where unknown")
    for value in fields.get("env_mask", ()):
        if value not in (0, 1):
            refuse("env_mask", f"holds {value!r}", "1 for tokens of the policy, 0 for others")
    return fields
