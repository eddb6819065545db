"""Files of a run's output directory: ``metrics.jsonl``, a line of JSON per log, and ``settings.json``."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from groupwise.compat.transformers import name_or_path
from groupwise.config.redact import redacted_json

logger = logging.getLogger(__name__)

METRICS_FILE, SETTINGS_FILE = "metrics.jsonl", "settings.json"


class MetricsFileCallback(TrainerCallback):
    """Append every log of the main process to :data:`METRICS_FILE`, with the step and the time in seconds.

    Training begins with the configuration in :data:`SETTINGS_FILE`: model and settings, without credentials.
    A resumed run drops the lines after the step that it resumes from, which it logs again, and evaluations
    before training whose metrics the file has at their step already; a new run keeps
    the file of an earlier one as ``metrics-<time of its last line>.jsonl``; evaluations before training are
    of the new one. Values that JSON does not have (NaN, infinities) are null. An error of the file system is
    logged as a warning and the log is lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_trained = False
        self._start: int | None = None  # of the evaluations before training in the file

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        path = Path(str(args.output_dir), METRICS_FILE)
        if path.exists():
            try:
                start = None if self._has_trained else self._start
                if state.global_step == 0:
                    _set_earlier_aside(path, start)
                else:
                    _drop_lines_after(path, state.global_step, start)
            except OSError as error:
                logger.warning("%s of an earlier run stays as it is: %s", path, error)
        self._has_trained = True
        model = name_or_path(getattr(kwargs.get("model"), "config", None))
        settings = {"model": model, "world_size": args.world_size, "settings": args.to_dict()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(SETTINGS_FILE).write_text(redacted_json(settings) + "\n", encoding="utf-8")
        except OSError as error:
            logger.warning("the settings were not written to %s: %s", path.with_name(SETTINGS_FILE), error)

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
        record = {"step": state.global_step, "time": round(time.time(), 3), **logs}
        path = Path(str(args.output_dir), METRICS_FILE)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                if self._start is None:
                    self._start = file.tell()
                file.write(json.dumps({name: _plain(value) for name, value in record.items()}) + "\n")
        except OSError as error:
            logger.warning(
                "the metrics of step %d were not written to %s: %s", state.global_step, path, error
            )


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the logs of a file, in order; a last line that a killed process left incomplete is dropped."""
    return _records(path.read_bytes())


def _records(lines: bytes) -> list[dict[str, Any]]:
    records = []
    for line in lines.decode().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def _set_earlier_aside(path: Path, start: int | None) -> None:
    """Rename the file after the time of its last line; what begins at ``start`` stays, None: nothing."""
    if start == 0:
        return
    own = b"" if start is None else path.read_bytes()[start:]
    ended = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
    earlier = path.with_name(f"{path.stem}-{ended}{path.suffix}")
    os.replace(path, earlier)
    if own:
        path.write_bytes(own)
        os.truncate(earlier, start or 0)


def _drop_lines_after(path: Path, step: int, start: int | None) -> None:
    """Rewrite the file atomically without the logs of steps after ``step``.

    Args:
        start: beginning of the evaluations before training, which stay once; None: there are none.
    """
    content = path.read_bytes()
    kept = [record for record in _records(content[:start]) if record["step"] <= step]
    known = {(record["step"], *record) for record in kept}
    own = [] if start is None else _records(content[start:])
    kept += [record for record in own if (record["step"], *record) not in known]
    kept.sort(key=lambda record: record["step"])
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(partial, path)
