"""The completions of a logging interval, sent to every place the configuration asks for."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from groupwise.config.grpo_config import GRPOConfig
from groupwise.reporting.console import print_table
from groupwise.reporting.dashboards import log_tables
from groupwise.reporting.hub import push_folder
from groupwise.reporting.table import Images, Table, as_table, image_column, reward_columns

Row = dict[str, Any]


def report_completions(
    rows: list[Row], step: int, args: GRPOConfig, output_dir: str, mode: str = "train"
) -> None:
    """Print, save and send the completions of one logging interval; call it on the main process only.

    With ``log_unique_prompts`` every place gets the first row of each prompt of the interval, also when the
    prompt came up in several of its steps. The parquet file is
    ``<output_dir>/completions/completions_<step>.parquet``; modes other than "train" have the folder
    ``completions_<mode>``, because an evaluation happens at the step of a training log.

    Args:
        rows: ``{"step": int, "prompt": str, "completion": str, "rewards": {name: float | None},
            "advantage": float, "columns": {name: str or number}}``, and ``"images": [bytes of a PNG file]``
            for dashboards only; left as they are.
        step: the optimizer step that names this report.
        args: reads ``num_completions_to_print``, ``log_unique_prompts``, ``log_completions_hub_repo``,
            ``report_to`` and the Hub settings.
        output_dir: where the folder of parquet files is kept.
        mode: "train", or the prefix of an evaluation ("eval", "eval_math").

    Raises:
        OSError: the file cannot be written. Trouble with a dashboard or the Hub is only logged.
    """
    if not rows:
        return
    if args.log_unique_prompts:
        rows = first_of_each_prompt(rows)
    generator = random.getstate()  # the first import of rich draws from it, and training must not notice
    try:
        _report(as_table(rows), image_column(rows), step, args, output_dir, re.sub(r"[^\w.-]", "_", mode))
    finally:
        random.setstate(generator)


def _report(table: Table, images: Images, step: int, args: GRPOConfig, output_dir: str, mode: str) -> None:
    kind = "completions" if mode == "train" else f"completions_{mode}"
    print_table(spread(table, args.num_completions_to_print), f"{kind}, step {step}")
    folder = Path(output_dir) / kind
    write_parquet(table, folder / f"completions_{step:05d}.parquet", reward_columns(table))
    log_tables(table, images, kind, step, args.report_to or [])
    if args.log_completions_hub_repo:
        push_folder(folder, args.log_completions_hub_repo, mode, args.hub_token, args.hub_private_repo)


def first_of_each_prompt(rows: list[Row]) -> list[Row]:
    first: dict[tuple[str, ...], Row] = {}
    for row in rows:
        first.setdefault((row["prompt"], *row.get("images", ())), row)
    return list(first.values())


def spread(table: Table, count: int | None) -> Table:
    """``count`` rows at even distances (None: all), so that a few rows show several prompts and steps."""
    total = len(table["step"])
    if count is None or count >= total:
        return table
    return {name: [values[i * total // count] for i in range(count)] for name, values in table.items()}


def write_parquet(table: Table, path: Path, numeric: Collection[str] = ()) -> None:
    """Write the table so that ``path`` never holds half a file.

    Few types, so that the files of a run fit together: int64 steps, float64 numbers, booleans, strings.
    ``numeric`` columns are numbers also when all values are missing, other columns then are strings.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    columns = {
        name: _arrow_column(values, name in numeric) for name, values in table.items() if name != "step"
    }
    pq.write_table(pa.table({"step": pa.array(table["step"], pa.int64()), **columns}), unfinished)
    os.replace(unfinished, path)


def _arrow_column(values: list[Any], numeric: bool) -> pa.Array:
    known = [value for value in values if value is not None]
    if known and not numeric and all(isinstance(value, bool) for value in known):
        return pa.array(values, pa.bool_())
    if numeric or (known and all(isinstance(value, int | float) for value in known)):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array([None if value is None else str(value) for value in values], pa.string())
