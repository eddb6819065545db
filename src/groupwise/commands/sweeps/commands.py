"""Small files in the directory of a sweep: commands from another process, and the clones that it started."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from groupwise.config.redact import masked
from groupwise.errors import ConfigError, GroupwiseError, warn_once
from groupwise.files import read_json, replace_file

logger = logging.getLogger(__name__)

_LOCK, _FOLDER, _CLONES = "_sweep.lock", "_commands", "_clones.json"
_SUFFIXES = (".json", ".taken", ".answer", ".tmp")  # of the files of a command


class SavedClone(NamedTuple):
    """Clone that a sweep started; its settings are those of ``source`` with ``changes``.

    checkpoint: that of the source from which it started; None: it started at step 0.
    """

    source: str
    changes: dict[str, Any]
    checkpoint: str | None


def read_clones(directory: Path) -> dict[str, SavedClone]:
    """Return the clones of the last sweep in ``directory`` by name, a clone after its source.

    Damaged ones are reported and left out, and a copy of the file is kept.
    """
    path, found, damaged = directory / _CLONES, dict[str, SavedClone](), list[str]()
    try:
        for name, saved in dict(json.loads(path.read_bytes())).items():
            match saved:
                case [str(source), dict(changes), str() | None as checkpoint]:
                    found[name] = SavedClone(source, changes, checkpoint)
                case _:
                    damaged.append(f"clone {name!r} is {saved!r:.80}")
    except FileNotFoundError:
        return {}
    except Exception as error:  # of reading, json and dict: whatever the file holds
        damaged.append(f"{type(error).__name__}: {error}")
    if damaged:
        kept = shutil.copy(path, path.with_name(f"{path.stem}-damaged.json")) if path.is_file() else path
        logger.error(
            "%s is damaged, and clones of it do not continue: %s; kept as %s", path, "; ".join(damaged), kept
        )
    return found


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
        for left in directory.glob(f"{_FOLDER}/*"):  # of a sweep that was killed, and sent since
            if left.suffix in _SUFFIXES and not left.is_dir():
                left.unlink(missing_ok=True)
        yield
    finally:
        lock.release()


def answer_commands(directory: Path, execute: Callable[[dict[str, Any]], str]) -> None:
    """Execute the commands that have arrived, and write the answer of each, or its error, beside it.

    A command is renamed first, so that none is executed twice. No command ends the runs.
    """
    for path in sorted(directory.glob(f"{_FOLDER}/*.json")):  # in the order in which they were sent
        taken = path.with_suffix(".taken")
        try:
            os.replace(path, taken)
            try:
                answer = {"accepted": True, "text": execute(read_json(taken, {}))}
            except GroupwiseError as error:
                answer = {"accepted": False, "text": str(error)}
            except Exception as error:
                answer = {"accepted": False, "text": f"{type(error).__name__}: {error}"}
            _write(path.with_suffix(".answer"), answer)
        except OSError as error:
            warn_once(logger, "command %s was not answered: %s", path, error)
        finally:
            with suppress(OSError):
                taken.unlink()


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
        # In the order of their life: a file that appears meanwhile is a later one.
        is_known = path.exists() or path.with_suffix(".taken").exists() or answer.exists()
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
    lock = FileLock(directory / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write a file that appears with its whole content."""
    replace_file(path, json.dumps(content, default=str).encode())
