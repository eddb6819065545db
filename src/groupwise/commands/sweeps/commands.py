"""Small files in the directory of a sweep: commands from another process, and the clones that it started."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from groupwise.config.redact import masked
from groupwise.errors import ConfigError, GroupwiseError

_LOCK, _FOLDER, _CLONES = "_sweep.lock", "_commands", "_clones.json"


class SavedClone(NamedTuple):
    """Clone that a sweep started; its settings are those of ``source`` with ``changes``.

    checkpoint: that of the source from which it started; None: it started at step 0.
    """

    source: str
    changes: dict[str, Any]
    checkpoint: str | None


def read_clones(directory: Path) -> dict[str, SavedClone]:
    """Return the clones of the last sweep in ``directory`` by name, a clone after its source."""
    path = directory / _CLONES
    if not path.exists():
        return {}
    return {name: SavedClone(*saved) for name, saved in json.loads(path.read_text(encoding="utf-8")).items()}


def write_clones(directory: Path, clones: dict[str, SavedClone]) -> None:
    """Save the clones for a sweep that is resumed in another process, without credentials."""
    if clones or (directory / _CLONES).exists():
        _write(directory / _CLONES, masked({name: list(clone) for name, clone in clones.items()}))


@contextmanager
def sweep_lock(directory: Path) -> Iterator[None]:
    """Context manager of the process that runs the sweep in ``directory``.

    Raises:
        ConfigError: another process runs one there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"a sweep is running in {str(directory)!r}; wait for its end") from None
    try:
        for left in directory.glob(f"{_FOLDER}/*"):  # of a sweep that was killed
            left.unlink()
        yield
    finally:
        lock.release()


def answer_commands(directory: Path, execute: Callable[[dict[str, Any]], str]) -> None:
    """Execute the commands that have arrived, and write the answer of each, or its error, beside it."""
    for path in sorted(directory.glob(f"{_FOLDER}/*.json"), key=lambda path: path.stat().st_mtime):
        try:
            answer = {"accepted": True, "text": execute(json.loads(path.read_text(encoding="utf-8")))}
        except GroupwiseError as error:
            answer = {"accepted": False, "text": str(error)}
        except Exception as error:  # a command must not end the runs
            answer = {"accepted": False, "text": f"{type(error).__name__}: {error}"}
        _write(path.with_suffix(".answer"), answer)
        path.unlink()


def send_command(directory: Path, command: dict[str, Any], poll_seconds: float = 0.2) -> str:
    """Send a command and wait for the answer of the sweep, which reads commands between two rounds.

    Raises:
        ConfigError: no sweep is running in ``directory``, or it refused the command.
    """
    path = directory / _FOLDER / f"{uuid.uuid4().hex}.json"
    if not _is_running(directory):
        raise ConfigError(f"no sweep is running in {str(directory)!r}")
    path.parent.mkdir(exist_ok=True)
    _write(path, command)
    answer = path.with_suffix(".answer")
    while not answer.exists():
        if not _is_running(directory) and not answer.exists():
            path.unlink(missing_ok=True)
            raise ConfigError(f"the sweep in {str(directory)!r} ended before it read the command")
        time.sleep(poll_seconds)
    given = json.loads(answer.read_text(encoding="utf-8"))
    answer.unlink()
    if not given["accepted"]:
        raise ConfigError(given["text"])
    return str(given["text"])


def _is_running(directory: Path) -> bool:
    if not (directory / _LOCK).exists():
        return False
    lock = FileLock(directory / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write a file that appears with its whole content."""
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(content, default=str), encoding="utf-8")
    os.replace(partial, path)
