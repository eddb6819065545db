"""Small files in the directory of a sweep: its lock, and commands from another process."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from groupwise.errors import ConfigError, GroupwiseError, log_boundary
from groupwise.files import read_json, replace_file

logger = logging.getLogger(__name__)

_LOCK, _FOLDER = "_sweep.lock", "_commands"


@contextmanager
def sweep_lock(directory: Path) -> Iterator[None]:
    """Context manager of the process that runs the sweep in ``directory``.

    Raises:
        ConfigError: another process runs one there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(directory / _LOCK, timeout=0):
            for left in directory.glob(f"{_FOLDER}/*"):  # of a sweep that was killed, and sent since
                if not left.is_dir():
                    left.unlink(missing_ok=True)
            yield
    except Timeout:
        raise ConfigError(f"a sweep is running in {str(directory)!r}; wait for its end") from None


def answer_commands(directory: Path, execute: Callable[[dict[str, Any]], str]) -> None:
    """Execute the commands that have arrived; the answer of each, or its error, takes the place of its file.

    No command ends the runs.
    """
    for path in sorted(directory.glob(f"{_FOLDER}/*.json")):  # in the order in which they were sent
        try:
            answer = {"accepted": True, "text": execute(read_json(path, {}))}
        except Exception as error:
            kind = "" if isinstance(error, GroupwiseError) else f"{type(error).__name__}: "
            answer = {"accepted": False, "text": f"{kind}{error}"}
        with log_boundary(logger, f"the answer to {path}"):
            try:
                _write(path.with_suffix(".answer"), answer)
            finally:
                path.unlink()


def send_command(directory: Path, command: dict[str, Any], poll_seconds: float = 0.2) -> str:
    """Send a command and wait for the answer of the sweep, which reads commands between two rounds.

    Raises:
        ConfigError: no sweep is running in ``directory``, it refused the command, or it ended or was
            started again before it answered.
    """
    path = directory / _FOLDER / f"{time.time_ns():020}-{uuid.uuid4().hex}.json"
    if not _is_running(directory):
        raise ConfigError(f"no sweep is running in {str(directory)!r}")
    path.parent.mkdir(exist_ok=True)
    _write(path, command)
    answer = path.with_suffix(".answer")
    while not answer.exists():
        is_known = path.exists() or answer.exists()  # in the order of their life
        if not (is_known and _is_running(directory)) and not answer.exists():
            path.unlink(missing_ok=True)
            raise ConfigError(f"the sweep in {str(directory)!r} ended before it answered the command")
        time.sleep(poll_seconds)
    given = read_json(answer, {"accepted": bool, "text": str})
    answer.unlink()
    if not given["accepted"]:
        raise ConfigError(given["text"])
    return str(given["text"])


def _is_running(directory: Path) -> bool:
    if not (directory / _LOCK).exists():
        return False
    try:
        with FileLock(directory / _LOCK, timeout=0):
            return False
    except Timeout:
        return True


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write a file that appears with its whole content."""
    replace_file(path, json.dumps(content, default=str).encode())
