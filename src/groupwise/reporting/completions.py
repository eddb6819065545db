"""Completions tables: console, parquet files, dashboards and the Hub."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from groupwise.config.grpo_config import GRPOConfig
from groupwise.reporting.console import print_table
from groupwise.reporting.dashboards import log_tables
from groupwise.reporting.hub import push_folder
from groupwise.reporting.table import (
    CompletionRow,
    Table,
    as_table,
    image_column,
    message_columns,
    reward_columns,
    row_text,
)

_CALL = pa.struct({"name": pa.string(), "arguments": pa.string()})
_BLOCK = pa.struct({"type": pa.string(), "text": pa.string()})


def _message_type(content: pa.DataType) -> pa.StructType:
    """Return the type of a message, the same in every file of a run; keys that a message lacks are null."""
    text = pa.string()
    return pa.struct(
        {
            **{"role": text, "content": content, "reasoning_content": text, "thinking": text, "name": text},
            "tool_calls": pa.list_(pa.struct({"type": text, "function": _CALL})),
        }
    )


def report_completions(
    rows: Sequence[CompletionRow], step: int, args: GRPOConfig, output_dir: str, mode: str = "train"
) -> None:
    """Print, save and upload the completions of one logging interval; call it on the main process only.

    With ``log_unique_prompts`` only the first row of each prompt in the interval is reported. The parquet
    file is ``<output_dir>/completions/completions_<step>.parquet``. Modes other than "train" use the folder
    ``completions_<mode>``, because an evaluation may have the step of a training log.

    Args:
        rows: not modified.
        step: optimizer step of this log.
        args: reads ``num_completions_to_print``, ``log_unique_prompts``, ``log_completions_hub_repo``,
            ``report_to`` and the Hub settings.
        output_dir: parent of the folder of parquet files.
        mode: "train", or the prefix of an evaluation ("eval", "eval_math").

    Raises:
        OSError: the file cannot be written. Errors of dashboards and of the Hub are logged as warnings.
    """
    if not rows:
        return
    if args.log_unique_prompts:
        rows = first_of_each_prompt(rows)
    generator = random.getstate()  # the first import of rich draws random numbers; training must not change
    try:
        _report(rows, step, args, output_dir, re.sub(r"[^\w.-]", "_", mode))
    finally:
        random.setstate(generator)


def _report(rows: Sequence[CompletionRow], step: int, args: GRPOConfig, output_dir: str, mode: str) -> None:
    table = as_table(rows)
    kind = "completions" if mode == "train" else f"completions_{mode}"
    print_table(evenly_spaced(table, args.num_completions_to_print), f"{kind}, step {step}")
    folder = Path(output_dir) / kind
    path = folder / f"completions_{step:05d}.parquet"
    write_parquet({**table, **message_columns(rows)}, path, reward_columns(table))
    log_tables(table, image_column(rows), kind, step, args.report_to or [])
    if args.log_completions_hub_repo:
        push_folder(folder, args.log_completions_hub_repo, mode, args.hub_token, args.hub_private_repo)


def first_of_each_prompt(rows: Sequence[CompletionRow]) -> list[CompletionRow]:
    """Return the first row of every prompt; prompts with different images are different."""
    first: dict[tuple[str | bytes, ...], CompletionRow] = {}
    for row in rows:
        first.setdefault((row_text(row["prompt"]), *row.get("images", ())), row)
    return list(first.values())


def evenly_spaced(table: Table, count: int | None) -> Table:
    """Return ``count`` evenly spaced rows (None: all), which cover several prompts and steps."""
    total = len(table["step"])
    if count is None or count >= total:
        return table
    return {name: [values[i * total // count] for i in range(count)] for name, values in table.items()}


def write_parquet(table: Mapping[str, Sequence[Any]], path: Path, numeric: Collection[str] = ()) -> None:
    """Write the table atomically: ``path`` is never a partial file.

    Column types are int64 (steps), float64, bool, string and lists of messages only, so that the files of a
    run load as one dataset. ``numeric`` columns are float64 even if all values are missing; other empty
    columns are strings.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.tmp")
    columns = {
        name: _arrow_column(values, name in numeric) for name, values in table.items() if name != "step"
    }
    pq.write_table(pa.table({"step": pa.array(table["step"], pa.int64()), **columns}), partial)
    os.replace(partial, path)


def _arrow_column(values: Sequence[Any], numeric: bool) -> pa.Array:
    known = [value for value in values if value is not None]
    if known and all(isinstance(value, list) for value in known):
        has_blocks = any(isinstance(message["content"], list) for chat in known for message in chat)
        return pa.array(values, pa.list_(_message_type(pa.list_(_BLOCK) if has_blocks else pa.string())))
    if known and not numeric and all(isinstance(value, bool) for value in known):
        return pa.array(values, pa.bool_())
    if numeric or (known and all(isinstance(value, int | float) for value in known)):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array([None if value is None else str(value) for value in values], pa.string())
