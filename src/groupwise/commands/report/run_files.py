"""Read the files of a finished or running run: logs, settings, checkpoints and completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from groupwise.config.redact import masked, redact
from groupwise.errors import ConfigError, boundary
from groupwise.files import read_json
from groupwise.hf.run_directory import checkpoints
from groupwise.reporting.metrics_file import METRICS_FILE, SETTINGS_FILE, read_metrics
from groupwise.reporting.table import reward_columns, row_text

_EXTRA = 200  # characters of an extra column that are kept


@dataclass(frozen=True)
class SavedCompletion:
    """One row of the completions' files.

    Attributes:
        mode: "train", or the name of the evaluation.
        rewards: by function; None where it returned none.
        extra: columns that reward functions logged, as text.
    """

    mode: str
    step: int
    prompt: str
    text: str
    rewards: dict[str, float | None]
    advantage: float
    extra: dict[str, str]


@dataclass(frozen=True)
class RunFiles:
    """Content of an output directory.

    Attributes:
        logs: of training and evaluations in order, with "step" and "time".
        settings: flat, without credentials; empty if the run wrote none.
        checkpoints: steps of the checkpoints.
    """

    logs: list[dict[str, Any]]
    settings: dict[str, Any]
    checkpoints: list[int]
    completions: list[SavedCompletion]


def read_run(directory: Path) -> RunFiles:
    """Read an output directory.

    Raises:
        ConfigError: the directory has neither logs nor completions, or a file is damaged.
    """
    path, settings = directory / METRICS_FILE, directory / SETTINGS_FILE
    logs = read_metrics(path) if path.is_file() else []
    folders = sorted(path for path in directory.glob("completions*") if path.is_dir())  # training first
    completions = [row for folder in folders for row in _read_completions(folder)]
    if not logs and not completions:
        raise ConfigError(
            f"{str(directory)!r} is not the output directory of a run: it has no logs in {METRICS_FILE} "
            "and no completions/*.parquet"
        )
    shown = _read_settings(settings) if settings.is_file() else {}
    return RunFiles(logs, shown, sorted(checkpoints(directory)), completions)


def _read_settings(path: Path) -> dict[str, Any]:
    with boundary(ConfigError, f"reading {str(path)!r}"):
        saved = read_json(path, {"settings": dict})
    return {
        **{name: saved[name] for name in ("model", "world_size") if name in saved},
        **{f"fast path, {name}": text for name, text in saved.get("fast_paths", {}).items()},
        **masked(saved["settings"], clean=redact),
    }


def _read_completions(folder: Path) -> Iterator[SavedCompletion]:
    """Yield the completions of a folder."""
    mode = folder.name.removeprefix("completions").removeprefix("_") or "train"
    for path in sorted(folder.glob("completions_*.parquet")):
        with boundary(ConfigError, f"reading {str(path)!r}"):
            table = pq.read_table(path)
            rewards = reward_columns(table.column_names)
            rows = [_saved_completion(row, mode, rewards) for row in table.to_pylist()]
        yield from rows


def _saved_completion(row: Mapping[str, Any], mode: str, rewards: Sequence[str]) -> SavedCompletion:
    fixed = {"step", "prompt", "completion", "advantage", *rewards}
    extra = {name: str(value)[:_EXTRA] for name, value in row.items() if value is not None}
    return SavedCompletion(
        mode=mode,
        step=row["step"],
        prompt=saved_text(row["prompt"]),
        text=saved_text(row["completion"], only=True),
        rewards={name: row[name] for name in rewards},
        advantage=row["advantage"],
        extra={name: value for name, value in extra.items() if name not in fixed},
    )


def saved_text(value: str | list[Mapping[str, Any]], *, only: bool = False) -> str:
    """Return a saved prompt or completion as text; chats are lines ``role: content``.

    Args:
        only: of a chat that is one message without tool calls, return the content alone.
    """
    if isinstance(value, str):
        return value
    chat = [{key: item for key, item in message.items() if item is not None} for message in value]
    if only and len(chat) == 1 and chat[0].keys() == {"role", "content"}:
        return row_text([chat[0]]).removeprefix(f"{chat[0]['role']}: ")
    return row_text(chat)
