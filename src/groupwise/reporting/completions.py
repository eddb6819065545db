"""Completions tables: console, parquet files, dashboards and the Hub."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import HfApi

from groupwise.config.grpo_config import GRPOConfig
from groupwise.errors import log_boundary
from groupwise.files import replace_file
from groupwise.random_state import preserved_state
from groupwise.reporting.dashboards import log_completions
from groupwise.reporting.table import (
    Cell,
    CompletionRow,
    Table,
    as_table,
    message_columns,
    reward_columns,
    row_text,
)
from groupwise.reporting.terminal import print_rich

if TYPE_CHECKING:
    from rich.table import Table as RichTable

logger = logging.getLogger(__name__)

_API = HfApi()  # background jobs of one client run in order

#: Printed rows where ``num_completions_to_print`` is None, and characters of a printed text.
FEW, PRINTED = 4, 600
#: Bidirectional marks, embeddings, overrides and isolates.
_ORDER = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"

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

    A part that fails, such as a file on a full disk, is a warning.
    """
    if not rows:
        return
    if args.log_unique_prompts:
        rows = first_of_each_prompt(rows)
    table, mode = as_table(rows), re.sub(r"[^\w.-]", "_", mode)
    kind = "completions" if mode == "train" else f"completions_{mode}"
    folder = Path(output_dir) / kind
    path = folder / f"completions_{step:05d}.parquet"
    with preserved_state():  # the first import of rich draws random numbers; training must not change
        count = FEW if args.num_completions_to_print is None else args.num_completions_to_print
        print_table(as_table(best_and_worst(rows, count)), f"{kind}, step {step}")
        with log_boundary(logger, str(path)):
            write_parquet({**table, **message_columns(rows)}, path, reward_columns(table))
        log_completions(rows, table, kind, step, args.report_to or [])
        if args.log_completions_hub_repo:
            repo = args.log_completions_hub_repo
            _API.run_as_future(_push, _API, folder, repo, mode, args.hub_token, args.hub_private_repo)


def first_of_each_prompt(rows: Sequence[CompletionRow]) -> list[CompletionRow]:
    """Return the first row of every prompt; prompts with different images are different."""
    first: dict[tuple[str | bytes, ...], CompletionRow] = {}
    for row in rows:
        first.setdefault((row_text(row["prompt"]), *row["images"]), row)
    return list(first.values())


def best_and_worst(rows: Sequence[CompletionRow], count: int) -> list[CompletionRow]:
    """Return ``count`` rows of the group whose advantages differ most, from the best to the worst.

    Rows of the next group follow where one has too few.
    """
    groups: dict[tuple[Any, ...], list[CompletionRow]] = {}
    for row in sorted(rows, key=lambda row: -row["advantage"]):
        groups.setdefault((row["step"], row_text(row["prompt"]), *row["images"]), []).append(row)
    chosen: list[CompletionRow] = []
    for group in sorted(groups.values(), key=lambda group: group[-1]["advantage"] - group[0]["advantage"]):
        left = min(count - len(chosen), len(group))
        chosen += [group[i * (len(group) - 1) // max(left - 1, 1)] for i in range(left)]
    return chosen


def print_table(table: Table, title: str) -> None:
    """Print the table to stdout, above the progress bars. An empty table prints nothing."""
    if table["step"]:
        print_rich(completions_grid(table, title))


def completions_grid(table: Table, title: str) -> RichTable:
    """Return the table as it is printed: prompt, completion and scores.

    Numbers and extra columns of a row share one column, so that prompt and completion have room; the middle
    of a long text is left out.
    """
    from rich.table import Table as RichTable
    from rich.text import Text

    grid = RichTable(title=title, show_lines=True, expand=True)
    grid.add_column("prompt", overflow="fold", ratio=2)
    grid.add_column("completion", overflow="fold", ratio=3)
    grid.add_column("scores", overflow="fold", width=20)
    for row in zip(*table.values(), strict=True):
        texts = {name: _cell_text(value) for name, value in zip(table, row, strict=True)}
        prompt, completion = (shortened(texts.pop(name, "")) for name in ("prompt", "completion"))
        scores = "\n".join(f"{_cell_text(name)} {text}" for name, text in texts.items() if text)
        grid.add_row(Text(prompt), Text(completion), Text(scores))  # Text: brackets are not markup
    return grid


def shortened(text: str) -> str:
    """Return the text, without its middle if it has more than ``PRINTED`` characters."""
    left_out = len(text) - PRINTED
    if left_out <= 0:
        return text
    return f"{text[: PRINTED // 2]}\n[{left_out} characters]\n{text[-PRINTED // 2 :]}"


def _cell_text(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}"
    return "".join(_printable(character) for character in str(value))


def _printable(character: str) -> str:
    """Escape control characters, which could move the cursor or show text in another order."""
    if character == "\t":
        return " "
    if character in _ORDER or (character != "\n" and unicodedata.category(character) in ("Cc", "Zl", "Zp")):
        return character.encode("unicode_escape").decode("ascii")
    return character


def write_parquet(table: Mapping[str, Sequence[Any]], path: Path, numeric: Collection[str] = ()) -> None:
    """Write the table atomically: ``path`` is never a partial file.

    Column types are int64 (steps), float64, bool, string and lists of messages only, so that the files of a
    run load as one dataset. ``numeric`` columns are float64 even if all values are missing; other empty
    columns are strings.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        name: _arrow_column(values, name in numeric) for name, values in table.items() if name != "step"
    }
    content = pa.BufferOutputStream()
    pq.write_table(pa.table({"step": pa.array(table["step"], pa.int64()), **columns}), content)
    replace_file(path, content.getvalue())


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


def _push(api: HfApi, folder: Path, repo: str, mode: str, token: str | None, private: bool | None) -> None:
    """Upload the parquet files of ``folder`` to the directory ``mode`` of a dataset; errors are warnings.

    Each call uploads the whole folder: the Hub skips files that it already has, and files missed by a failed
    upload are included in the next one. The interpreter waits for pending uploads at exit.
    """
    with log_boundary(logger, f"the dataset {repo} of completions"):
        api.create_repo(repo, repo_type="dataset", private=private, exist_ok=True, token=token)
        api.upload_folder(
            repo_id=repo,
            repo_type="dataset",
            folder_path=folder,
            path_in_repo=mode,
            allow_patterns="*.parquet",
            commit_message="Add completions",
            token=token,
        )
