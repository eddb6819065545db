"""Commands to a running sweep from another process: small files in its directory."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from groupwise.errors import ConfigError, GroupwiseError

_LOCK, _FOLDER = "_sweep.lock", "_commands"


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
    partial.write_text(json.dumps(content), encoding="utf-8")
    os.replace(partial, path)
