"""Completions from the user's ``rollout_func``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch

from groupwise.core.metrics import Metrics
from groupwise.errors import BackendError, boundary, checked_entries, shortened
from groupwise.records import Completion, RolloutFunction, copied
from groupwise.tokenization.prompts import Prompt
from groupwise.tokenization.text import is_truncated

_FIELDS = ("prompt_ids", "completion_ids", "logprobs", "env_mask")  # of a row
#: Keys that are no columns.
RESERVED = frozenset({*_FIELDS, "rollout_ids", "failed"})
#: Arguments of reward functions that the trainer passes, whatever a column of the name holds.
_ARGUMENTS = (
    *("prompts", "completions", "rollout_rows", "row_ids", "turn_ends", "trainer_state"),
    *("log_extra", "log_metric", "completion_logprobs"),
)


def call_rollout_function(
    function: RolloutFunction,
    prompts: list[Prompt],
    trainer: object,
    end_tokens: frozenset[int],
    vocab_size: int = 2**31,
) -> tuple[list[list[int]], list[Completion], dict[str, list[Any]], Metrics]:
    """Call ``function(prompts, trainer)`` and check its result.

    Args:
        function: returns a dict of lists with R entries, one per row: ``prompt_ids`` and ``completion_ids``
            (token ids); optionally ``logprobs`` (per completion token, None or NaN if unknown), ``env_mask``
            (1 for tokens of the policy, 0 for others, which carry no loss) and ``rollout_ids`` (a number
            per row, increasing in the order of the prompts: rows with the same one are one rollout; without
            it every row is one). A row may be a tensor or an array. Entries of ``failed``, True for a rollout
            to be dropped from its group (one row suffices), and of other keys, columns for the rewards (that
            of the last row counts), are per row or per rollout.
        prompts: B prompts, each repeated once per rollout. The function gets copies and may change them.
        trainer: passed to the function.
        end_tokens: a completion that does not end in one of these counts as truncated.
        vocab_size: number of token ids that the policy has.

    Returns:
        prompt token ids, completions and extra columns, B entries each; statistics of the rows.

    Raises:
        BackendError: the function raised, a required key is missing, lengths differ, or a token id, log-prob
            or mask is invalid; the message names the row. Or a rollout has failed, unless
            ``rollout_on_error="retry"``.
    """
    name = getattr(function, "__name__", type(function).__name__)
    with boundary(BackendError, f"rollout_func {name!r}"):
        output = function(copied(prompts), trainer)
    output = checked_entries(
        output,
        f"rollout_func {name!r}",
        BackendError,
        objection=partial(taken_column, others=()),
        convert=_with_length,
        allowed="a list or an array",
    )
    missing = [key for key in ("prompt_ids", "completion_ids") if output.get(key) is None]
    if missing:
        raise BackendError(
            f"rollout_func {name!r} returned no {' and no '.join(missing)}; it returned {sorted(output)}; "
            "it must return prompt_ids and completion_ids, and may return logprobs, env_mask, rollout_ids "
            "and extra columns"
        )
    output = {key: values for key, values in output.items() if values is not None}
    ends = _ends_of_rollouts(name, output.get("rollout_ids"), len(prompts))  # of B rollouts among the R rows
    num_rollouts = len(prompts)  # B
    num_rows = ends[-1] if ends else num_rollouts  # R
    _check_lengths(name, output, num_rollouts, num_rows)
    fields = {key: output[key] for key in _FIELDS if key in output}
    rows = [
        _checked(name, row, {key: _plain(values[row]) for key, values in fields.items()}, vocab_size)
        for row in range(num_rows)
    ]
    failed = output.get("failed", [])
    if ends and len(failed) == num_rows:
        failed = [any(failed[start:end]) for start, end in pairwise([0, *ends])]
    columns = {
        key: [values[end - 1] for end in ends] if ends and len(values) == num_rows else list(values)
        for key, values in output.items()
        if key not in RESERVED
    }
    prompt_ids, completions, columns, metrics = _completions(rows, ends, columns, end_tokens)
    if any(failed):
        completions = _without_failed(name, completions, failed, trainer)
    return prompt_ids, completions, columns, metrics


def taken_column(name: str, others: Collection[str] = ("completion_ids",)) -> str:
    """Return why a column of a rollout cannot have the name: that of an argument of rewards, or another."""
    if name not in _ARGUMENTS and name not in others:
        return ""
    return f"a column {name!r} would replace the trainer's own; choose another name, such as 'own_{name}'"


def _check_lengths(name: str, output: dict[str, Any], num_rollouts: int, num_rows: int) -> None:
    """Raise BackendError unless fields have an entry per row, and columns one per row or per rollout."""
    joined = f" and {num_rows} rollout_ids" if output.get("rollout_ids") is not None else ""
    for key, values in output.items():
        if len(values) not in ({num_rows} if key in (*_FIELDS, "rollout_ids") else {num_rows, num_rollouts}):
            raise BackendError(
                f"rollout_func {name!r} returned {len(values)} entries for {key!r}, but there are "
                f"{num_rollouts} prompts (each prompt is repeated once per completion){joined}"
            )


def _without_failed(
    name: str, completions: list[Completion], failed: list[Any], trainer: Any
) -> list[Completion]:
    """Drop failed rollouts from their groups, or raise BackendError, as ``rollout_on_error`` says."""
    if trainer.args.rollout_on_error == "raise":
        raise BackendError(
            f"rollout_func {name!r}: rollout {[*map(bool, failed)].index(True)} has failed; "
            "rollout_on_error='retry' drops such rollouts from their groups"
        )
    pairs = zip(completions, failed, strict=True)
    return [replace(completion, dropped=bool(gone)) for completion, gone in pairs]


def _completions(
    rows: list[dict[str, Any]], ends: list[int], columns: dict[str, list[Any]], end_tokens: frozenset[int]
) -> tuple[list[list[int]], list[Completion], dict[str, list[Any]], Metrics]:
    """Return prompts, completions, columns and metrics of checked rows, joined to rollouts at ``ends``."""
    if ends:
        from groupwise.generation.rollout_rows import join_rollouts

        return join_rollouts(rows, ends, columns, end_tokens)
    completions = [
        Completion(
            token_ids=row["completion_ids"],
            logps=row.get("logprobs"),
            loss_mask=row.get("env_mask"),
            truncated=is_truncated(row["completion_ids"], end_tokens),
        )
        for row in rows
    ]
    return [row["prompt_ids"] for row in rows], completions, columns, {}


def _ends_of_rollouts(name: str, rollout_ids: Any, num_rollouts: int) -> list[int]:
    """Return for each rollout the index after its last row; [] without ``rollout_ids``."""
    if rollout_ids is None:
        return []
    runs = [(number, len(list(rows))) for number, rows in groupby(_plain(rollout_ids))]
    numbers = [number for number, _ in runs]
    if len(numbers) != num_rollouts or numbers != sorted({*numbers}):
        raise BackendError(
            f"rollout_func {name!r}: 'rollout_ids' holds {shortened(numbers)}, without repetitions; allowed: "
            f"one number for each of the {num_rollouts} prompts, increasing in their order, repeated in all "
            "rows of the rollout, which are adjacent"
        )
    return list(accumulate(count for _, count in runs))


def _with_length(values: Any) -> Any:
    """Return the entries of a key if they can be counted; a text is none."""
    if values is not None and (isinstance(values, str) or len(values) < 0):
        raise TypeError(values)
    return values


def _plain(values: Any) -> list[Any]:
    """Return a row as a list of Python numbers: it may be a tensor, an array, or a list of their scalars."""
    return [value.item() if hasattr(value, "item") else value for value in values]


def _checked(name: str, row: int, fields: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the fields of a row if they are valid: log-probs as floats, NaN for None, and masks as ints."""

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
            refuse(key, f"holds {len(fields[key])} values", f"{len(fields['completion_ids'])}, one per token")
    for value in fields.get("logprobs", ()):
        if value is not None and not isinstance(value, float | int):
            refuse("logprobs", f"holds {value!r}", "numbers; None or NaN where unknown")
    for value in fields.get("env_mask", ()):
        if value not in (0, 1):
            refuse("env_mask", f"holds {value!r}", "1 for tokens of the policy, 0 for others")
    if "logprobs" in fields:
        fields["logprobs"] = [torch.nan if value is None else float(value) for value in fields["logprobs"]]
    if "env_mask" in fields:
        fields["env_mask"] = [int(value) for value in fields["env_mask"]]
    return fields
