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
        self._before_training: list[dict[str, Any]] | None = []  # logs; None once training has begun

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        path = Path(str(args.output_dir), METRICS_FILE)
        with log_boundary(logger, f"{path} of an earlier run stays as it is: it"):
            if path.is_file():  # neither a device nor a pipe
                _begin_file(path.resolve(), state.global_step, self._before_training or ())
        self._before_training = None
        model = kwargs["model"].config.name_or_path if "model" in kwargs else ""
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
                if file.tell():  # ends a line that a full disk or a killed process left incomplete
                    file.seek(-1, os.SEEK_END)
                    file.write(b"" if file.read() == b"\n" else b"\n")
                file.write(json.dumps(record).encode() + b"\n")
            if self._before_training is not None:
                self._before_training.append(record)
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
    *lines, last = path.read_bytes().split(b"\n")
    records = [_record(line) for line in lines]
    torn = [
        str(number)
        for number, (line, record) in enumerate(zip(lines, records, strict=True), start=1)
        if record is None and line.strip()
    ]
    if torn:
        warn_once(logger, "%s: no log in line %s, torn by a full disk or a kill", path, ", ".join(torn))
    return [record for record in (*records, _record(last)) if record is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _write_metrics(path: Path, records: Sequence[dict[str, Any]]) -> None:
    replace_file(path, b"".join(json.dumps(record).encode() + b"\n" for record in records))


def earlier_path(path: Path) -> Path:
    """Return the path for files of an earlier run: with the time of their last change, and a free number."""
    ended = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
    earlier, number = path.with_name(f"{path.stem}-{ended}{path.suffix}"), 1
    while earlier.exists():  # of a run that ended within the same second
        number += 1
        earlier = path.with_name(f"{path.stem}-{ended}.{number}{path.suffix}")
    return earlier


def _begin_file(path: Path, step: int, own: Sequence[dict[str, Any]]) -> None:
    """Keep the logs up to ``step`` of a resumed run; those of an earlier run get a file of their own.

    Args:
        step: optimizer step that training begins after.
        own: evaluations of this run before its training, which the file has too.
    """
    others = [log for log in read_metrics(path) if log not in own]
    if step > 0:
        kept = [log for log in others if log["step"] <= step]
        known = {(log["step"], *log) for log in kept}
        kept += [log for log in own if (log["step"], *log) not in known]
        _write_metrics(path, sorted(kept, key=lambda log: log["step"]))
    elif others:
        os.replace(path, earlier := earlier_path(path))
        if own:
            _write_metrics(earlier, others)
            _write_metrics(path, own)
