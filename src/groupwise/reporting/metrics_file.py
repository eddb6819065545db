"""Files of a run's output directory: ``metrics.jsonl``, a line of JSON per log, and ``settings.json``."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from groupwise.compat.transformers import name_or_path
from groupwise.config.redact import redacted_json
from groupwise.errors import log_boundary, warn_once
from groupwise.files import replace_file
from groupwise.records.fast_paths import FastPath

logger = logging.getLogger(__name__)

METRICS_FILE, SETTINGS_FILE = "metrics.jsonl", "settings.json"


class MetricsFileCallback(TrainerCallback):
    """Append every log of the main process to :data:`METRICS_FILE`, with the step and the time in seconds.

    Training begins with the configuration in :data:`SETTINGS_FILE`: model and settings, without credentials.
    A resumed run drops the lines after the step that it resumes from, which it logs again, and evaluations
    before training whose metrics the file has at their step already; a new run keeps
    the file of an earlier one as ``metrics-<time of its last line>.jsonl``; evaluations before training are
    of the new one. Values that JSON does not have (NaN, infinities) are null. A log with a value named "step"
    or "time" has it as "step_" or "time_". An error is logged as a warning and the log is lost.

    Args:
        fast_paths: returns the states of the run's fast paths, which are logged in one line when training
            begins, as a warning if one is slow for a reason that is not the user's choice. The file has their
            states at the last log.
    """

    def __init__(self, fast_paths: Callable[[], Sequence[FastPath]] = tuple) -> None:
        super().__init__()
        self._fast_paths = fast_paths
        self._settings: dict[str, Any] = {}
        self._has_trained = False
        self._start: int | None = None  # of the evaluations before training in the file

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        path = Path(str(args.output_dir), METRICS_FILE)
        with log_boundary(logger, f"{path} of an earlier run stays as it is: it"):
            start = None if self._has_trained else self._start
            if path.is_file() and state.global_step == 0:  # neither a device nor a pipe
                _set_earlier_aside(path.resolve(), start)
            elif path.is_file():
                _drop_lines_after(path, state.global_step, start)
        self._has_trained = True
        model = name_or_path(getattr(kwargs.get("model"), "config", None))
        with log_boundary(logger, str(path.with_name(SETTINGS_FILE))):
            paths = self._fast_paths()
            level = logging.WARNING if any(path.warns for path in paths) else logging.INFO
            logger.log(level, " · ".join(map(str, paths)))
            self._settings = {"model": model, "world_size": args.world_size, "settings": args.to_dict()}
            self._write_settings(path.with_name(SETTINGS_FILE), paths)

    def _write_settings(self, path: Path, paths: Sequence[FastPath]) -> None:
        """Write the settings at the beginning of training with these fast paths, unless the file has them."""
        by_name = {one.name: one.state for one in paths}
        if self._settings.get("fast_paths") == by_name:
            return
        self._settings["fast_paths"] = by_name
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, redacted_json(self._settings).encode() + b"\n")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        path = Path(str(args.output_dir), METRICS_FILE)
        with log_boundary(logger, f"{path}: the metrics of step {state.global_step}"):
            record: dict[str, Any] = {"step": state.global_step, "time": round(time.time(), 3)}
            for name, value in logs.items():
                while name in record:
                    name += "_"
                record[name] = _plain(value)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab+") as file:
                if file.tell():  # a line that a full disk or a kill has torn ends before this one
                    file.seek(-1, os.SEEK_END)
                    file.write(b"" if file.read() == b"\n" else b"\n")
                if self._start is None:
                    self._start = file.tell()
                file.write(json.dumps(record).encode() + b"\n")
        if self._settings:  # training has begun
            with log_boundary(logger, str(path.with_name(SETTINGS_FILE))):
                self._write_settings(path.with_name(SETTINGS_FILE), self._fast_paths())


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the logs of a file, in order, without lines that are no log, with one warning.

    A last line that a killed process left incomplete is dropped.
    """
    lines = _lines(path.read_bytes())
    torn = [
        str(number) for number, (line, record) in enumerate(lines, start=1) if record is None and line.strip()
    ]
    if torn:
        warn_once(logger, "%s: no log in line %s, torn by a full disk or a kill", path, ", ".join(torn))
    return [record for _, record in lines if record is not None]


def _lines(content: bytes) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Return every line with its log, None without one; a last line that is incomplete is left out."""
    *whole, last = content.split(b"\n")
    lines = [(line, _record(line)) for line in whole]
    return lines if _record(last) is None else [*lines, (last, _record(last))]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def earlier_path(path: Path) -> Path:
    """Return the path for files of an earlier run: with the time of their last change, and a free number."""
    ended = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
    earlier, number = path.with_name(f"{path.stem}-{ended}{path.suffix}"), 1
    while earlier.exists():  # of a run that ended within the same second
        number += 1
        earlier = path.with_name(f"{path.stem}-{ended}.{number}{path.suffix}")
    return earlier


def _set_earlier_aside(path: Path, start: int | None) -> None:
    """Rename the file after the time of its last line; what begins at ``start`` stays, None: nothing."""
    if start == 0:
        return
    own = b"" if start is None else path.read_bytes()[start:]
    earlier = earlier_path(path)
    os.replace(path, earlier)
    if own:
        path.write_bytes(own)
        os.truncate(earlier, start or 0)


def _drop_lines_after(path: Path, step: int, start: int | None) -> None:
    """Rewrite the file atomically without the logs of steps after ``step``; lines that are no log stay.

    Args:
        start: beginning of the evaluations before training, which stay once; None: there are none.
    """
    content = path.read_bytes()
    kept: list[tuple[int, bytes]] = []
    known, last = set(), 0
    for line, record in _lines(content[:start]):
        last = last if record is None else record["step"]
        if record is None or last <= step:
            kept.append((min(last, step), line))
            known.add((last, *(record or ())))
    for line, record in [] if start is None else _lines(content[start:]):
        if record is not None and (record["step"], *record) not in known:
            kept.append((record["step"], line))
    kept.sort(key=lambda entry: entry[0])
    replace_file(path, b"".join(line + b"\n" for _, line in kept))
