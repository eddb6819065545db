"""Completions from the user's ``rollout_func``."""

from __future__ import annotations

from typing import Any

from groupwise.errors import BackendError, boundary
from groupwise.records import Completion, RolloutFunction, copied
from groupwise.tokenization.prompts import Prompt

_RESERVED_KEYS = ("prompt_ids", "completion_ids", "logprobs", "env_mask")


def call_rollout_function(
    function: RolloutFunction, prompts: list[Prompt], trainer: object, end_tokens: frozenset[int]
) -> tuple[list[list[int]], list[Completion], dict[str, list[Any]]]:
    """Call ``function(prompts, trainer)`` and check its result.

    Args:
        function: returns a dict of lists with B entries: ``prompt_ids`` and ``completion_ids`` (token ids);
            optionally ``logprobs`` (per completion token, None or NaN if unknown) and ``env_mask`` (1 for
            tokens of the policy, 0 for others, which carry no loss). Other keys are columns for the rewards.
        prompts: B prompts, each repeated once per completion. The function gets copies and may change them.
        trainer: passed to the function.
        end_tokens: a completion that does not end in one of these counts as truncated.

    Returns:
        prompt token ids, completions and extra columns, B entries each.

    Raises:
        BackendError: the function raised, a required key is missing, lengths differ, or a mask is invalid.
    """
    name = getattr(function, "__name__", type(function).__name__)
    with boundary(BackendError, f"rollout_func {name!r}"):
        output = function(copied(prompts), trainer)
    missing = [key for key in ("prompt_ids", "completion_ids") if key not in output]
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
    completions = [_completion(output, row, name, end_tokens) for row in range(len(prompts))]
    extra = {
        key: list(values)
        for key, values in output.items()
        if key not in _RESERVED_KEYS and values is not None
    }
    return [list(ids) for ids in output["prompt_ids"]], completions, extra


def _completion(output: dict[str, Any], row: int, name: str, end_tokens: frozenset[int]) -> Completion:
    tokens = [int(token) for token in output["completion_ids"][row]]
    logps, loss_mask = (
        None if output.get(key) is None else list(output[key][row]) for key in ("logprobs", "env_mask")
    )
    for key, values in (("logprobs", logps), ("env_mask", loss_mask)):
        if values is not None and len(values) != len(tokens):
            raise BackendError(
                f"rollout_func {name!r}, completion {row}: {len(values)} values in {key!r} for {len(tokens)} "
                "tokens"
            )
    if loss_mask is not None and not set(loss_mask) <= {0, 1}:
        wrong = next(value for value in loss_mask if value not in (0, 1))
        raise BackendError(
            f"rollout_func {name!r}, completion {row}: 'env_mask' holds {wrong!r}; allowed: 1 for tokens "
            "of the policy, 0 for others"
        )
    return Completion(
        token_ids=tokens,
        logps=None if logps is None else [float("nan") if value is None else float(value) for value in logps],
        loss_mask=None if loss_mask is None else [int(value) for value in loss_mask],
        truncated=not tokens or tokens[-1] not in end_tokens,
    )
