"""Read the files of a finished or running run: logs, settings, checkpoints and completions."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from groupwise.config.redact import masked, redact
from groupwise.errors import ConfigError, boundary
from groupwise.files import read_json
from groupwise.reporting.metrics_file import METRICS_FILE, SETTINGS_FILE, read_metrics
from groupwise.reporting.table import reward_columns, row_text

logger = logging.getLogger(__name__)

_STATE = "trainer_state.json"
#: Entries of a checkpoint's state that are settings; they stand in for a missing file of settings.
_STATE_SETTINGS = ("max_steps", "num_train_epochs", "train_batch_size", "logging_steps", "save_steps")
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
        logs: of training and evaluations in order, with "step" and, except from a checkpoint, "time".
        settings: flat, without credentials; empty if the run wrote none.
        checkpoints: steps of the checkpoints.
    """

    directory: Path
    logs: list[dict[str, Any]]
    settings: dict[str, Any]
    checkpoints: list[int]
    completions: list[SavedCompletion]


def read_run(directory: Path) -> RunFiles:
    """Read an output directory.

    Logs are those of ``metrics.jsonl``, or of the newest checkpoint's state without that file.

    Raises:
        ConfigError: the directory has neither logs nor completions.
    """
    names = (path.parent.name for path in directory.glob(f"checkpoint-*/{_STATE}"))
    checkpoints = sorted(int(m[1]) for name in names if (m := re.fullmatch(r"checkpoint-(\d+)", name)))
    states = [directory / f"checkpoint-{step}" / _STATE for step in checkpoints[-1:]]
    states += [path for path in [directory / _STATE] if path.is_file()]
    state = _read_json(states[0]) if states else {}
    path = directory / METRICS_FILE
    history = state.get("log_history")
    kept = [log for log in history if isinstance(log, dict)] if isinstance(history, list) else []
    logs = read_metrics(path) if path.is_file() else kept
    folders = sorted(path for path in directory.glob("completions*") if path.is_dir())  # training first
    completions = [row for folder in folders for row in _read_completions(folder)]
    if not logs and not completions:
        raise ConfigError(
            f"{str(directory)!r} is not the output directory of a run: it has no logs in {METRICS_FILE} "
            f"or checkpoint-*/{_STATE}, and no completions/*.parquet"
        )
    settings = _read_settings(directory / SETTINGS_FILE)
    settings = settings or {name: state[name] for name in _STATE_SETTINGS if name in state}
    return RunFiles(directory, logs, settings, checkpoints, completions)


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    saved = _read_json(path)
    settings, paths = saved.get("settings"), saved.get("fast_paths")
    return {
        **{name: saved[name] for name in ("model", "world_size") if name in saved},
        **{f"fast path, {name}": text for name, text in (paths if isinstance(paths, dict) else {}).items()},
        **masked(settings if isinstance(settings, dict) else {}, clean=redact),
    }


def _read_json(path: Path) -> dict[str, Any]:
    with boundary(ConfigError, f"reading {str(path)!r}"):
        return dict(read_json(path, {}))


def _read_completions(folder: Path) -> Iterator[SavedCompletion]:
    """Yield the completions of a folder; a row that is no completion is left out, with a warning."""
    mode = folder.name.removeprefix("completions").removeprefix("_") or "train"
    for path in sorted(folder.glob("completions_*.parquet")):
        with boundary(ConfigError, f"reading {str(path)!r}"):
            table = pq.read_table(path)
        if missing := {"step", "prompt", "completion", "advantage"}.difference(table.column_names):
            logger.warning("%s is left out: it has no column %s", path, ", ".join(sorted(missing)))
            continue
        rewards = reward_columns(table.column_names)
        for number, row in enumerate(table.to_pylist()):
            try:
                completion = _saved_completion(row, mode, rewards)
            except Exception as error:
                logger.warning("row %d of %s is left out: %s: %s", number, path, type(error).__name__, error)
                continue
            yield completion


def _saved_completion(row: Mapping[str, Any], mode: str, rewards: Sequence[str]) -> SavedCompletion:
    fixed = {"step", "prompt", "completion", "advantage", *rewards}
    extra = {name: str(value)[:_EXTRA] for name, value in row.items() if value is not None}
    values = {name: None if row[name] is None else float(row[name]) for name in rewards}
    return SavedCompletion(
        mode=mode,
        step=int(row["step"]),
        prompt="" if row["prompt"] is None else saved_text(row["prompt"]),
        text="" if row["completion"] is None else saved_text(row["completion"], only=True),
        rewards=values,
        advantage=0.0 if row["advantage"] is None else float(row["advantage"]),
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
