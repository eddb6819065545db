"""Output directory of a run: its lock and id, the checkpoints in it, and how they enter and leave it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import filecmp
import json
import logging
import os
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from accelerate.state import AcceleratorState
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from transformers.trainer_utils import SaveStrategy

from groupwise.compat.transformers import checkpoint_prefix, trainer_state_name
from groupwise.config.grpo_config import GRPOConfig
from groupwise.distributed import gather_or_raise, is_sharded
from groupwise.errors import ConfigError, GroupwiseError, TrainingError, warn_once
from groupwise.hf.checkpointing import (
    MANIFEST,
    damage,
    is_complete,
    read_saved,
    saved_run_id,
    write_manifest,
)
from groupwise.records.serialization import read_json

logger = logging.getLogger(__name__)

# ``Trainer`` uploads no files whose path in ``output_dir`` begins with "_".
_LOCK, _HOLDER, _STAGING = "_run.lock", "_run.json", "_incomplete"
_EARLIER_RUNS = "_earlier_runs"  # checkpoints of other runs

T = TypeVar("T")


class RunDirectory:
    """``output_dir`` of a run: locked while the run trains or evaluates; one that saves moves others' aside.

    The operating system ends the lock with its process, which a file beside it names. On a file system
    without locks between hosts a second run can start, and the first one ends at its next save, because the
    file names another process.

    Attributes:
        run_id: identity of the run, which a resumed run shares; "" before the first one.
        step: of the checkpoint that the run resumed from; None in a new run.
        finished: checkpoint of the result, of a run that had ended when it was resumed.
        staging: directory in which files are written before they are renamed.
        is_staging: True while they are written.
    """

    def __init__(self, args: GRPOConfig) -> None:
        self.args = args
        self.run_id = ""
        self.step: int | None = None
        self.finished: Path | None = None
        self.staging, self.is_staging = Path(), False
        self._depth = 0  # of nested blocks of open()
        self._is_claimed = self._saves = False
        self._lock: FileLock | None = None
        self._holder: dict[str, Any] | None = None

    @property
    def path(self) -> Path:
        return Path(str(self.args.output_dir))

    @contextmanager
    def open(
        self, resume_from_checkpoint: str | bool | None, *, saves: bool | None = None
    ) -> Iterator[str | None]:
        """Yield the checkpoint to resume from, or None; keep the lock until the end.

        Collective, as all methods. A block within another one continues the same run.

        Args:
            resume_from_checkpoint: see :func:`find_checkpoint`.
            saves: None: by ``save_strategy``; a run moves no checkpoints aside before it saves.

        Raises:
            ConfigError: another run has the lock, or the checkpoint does not exist or is damaged.
        """
        if saves is None:
            saves = self.args.save_strategy != SaveStrategy.NO or self.args.enable_jit_checkpoint
        self._depth += 1
        try:
            self._saves = saves or self._saves
            self._claim()
            self.finished = None
            checkpoint, self.step, run_id = self.on_savers(lambda: _start(resume_from_checkpoint, self.path))
            if checkpoint is not None or self._depth == 1:
                self.run_id = run_id
            yield checkpoint
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._release()

    @contextmanager
    def claimed(self, *, saves: bool = True) -> Iterator[None]:
        """Have the lock: for the block, or within another one until the end of that.

        Args:
            saves: False: no checkpoint is moved aside, and a directory without write access is a warning.

        Raises:
            ConfigError: another run has the lock.
            TrainingError: another run took the directory, whose file system does not lock between hosts.
        """
        outermost = not self._is_claimed
        try:
            if self._is_claimed and saves:
                self.on_savers(self._check_holder)
            try:
                self._claim()
            except OSError as cause:
                if saves:
                    raise
                logger.warning("output_dir=%r: no metrics and rollouts are written (%s)", self.path, cause)
            if saves and self._depth and not self._saves:
                self._saves = True
                self.move_aside()
            yield
        finally:
            if outermost and self._depth == 0:
                self._release()

    def on_savers(self, function: Callable[[], T]) -> T:
        """Call ``function`` on ranks that save; return the first result, or raise its error, on all ranks."""
        results: list[T] = []
        failure = None
        if self.args.should_save:
            try:
                results.append(function())
            except Exception as error:
                failure = error
        return next(found[0] for found in gather_or_raise(results, failure) if found)

    def has_result(self) -> bool:
        """Return True if the run had ended when it was resumed, and the directory has its weights."""
        if self.finished is None:
            return False
        checkpoint, files = self.finished, [path.name for path in self.finished.glob("*.safetensors")]
        compare = partial(filecmp.cmpfiles, checkpoint, self.path, files, shallow=False)
        return len(self.on_savers(compare)[0]) == len(files) > 0  # of equal contents

    # The lock.

    def _claim(self) -> None:
        if not self._is_claimed:
            name = self.on_savers(_new_id)
            self.staging = self.on_savers(lambda: self._acquire(name))
            self._is_claimed = True

    def _acquire(self, name: str) -> Path:
        """Lock the directory, and delete what a killed run staged. Returns the staging directory."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / _LOCK)
        host = socket.gethostname()
        try:
            lock.acquire(timeout=0)
            self._lock = lock
        except Timeout:
            other = _described(_read_holder(self.path))
            raise ConfigError(
                f"output_dir={str(self.path)!r} is used by another run ({other}), and two would mix "
                "their metrics and replace each other's checkpoints; wait for its end, or "
                f"choose another one. If that process has ended, delete {str(self.path / _LOCK)!r}"
            ) from None
        except (OSError, NotImplementedError) as cause:
            logger.warning("output_dir=%r cannot be locked (%s): start no other run there", self.path, cause)
        left = _read_holder(self.path)
        if left is not None and left.get("host") != host:
            logger.warning("a run was killed (%s); if it still trains, its next save fails", _described(left))
        staging = _staging_dir(self.path)
        if left is not None and re.fullmatch("[0-9a-f]{12}", str(left.get("id"))):
            killed = staging.with_name(staging.name + left["id"])
            for step, path in checkpoints(killed).items():  # between its last file and its rename
                final = self.path / path.name
                if not final.exists() and (path / MANIFEST).is_file() and not damage(path):
                    os.replace(path, final)
                    logger.warning(
                        "checkpoint of step %d of a run that was killed is kept in %s", step, final
                    )
            shutil.rmtree(killed, ignore_errors=True)
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        self._holder = {"host": host, "process": os.getpid(), "since": since, "id": name}
        (self.path / _HOLDER).write_text(json.dumps(self._holder), encoding="utf-8")
        return staging.with_name(staging.name + name)

    def _check_holder(self) -> None:
        found = _read_holder(self.path)
        if found is not None and found != self._holder:
            raise TrainingError(
                f"another run ({_described(found)}) took output_dir={str(self.path)!r}, whose file system "
                "has no locks between hosts; this run ends before it replaces a checkpoint of that one. "
                "Choose another output_dir for one of them, and resume from its last checkpoint"
            )

    def _release(self) -> None:
        is_forked = self._holder is not None and self._holder["process"] != os.getpid()
        if self._holder is not None and not is_forked and _read_holder(self.path) == self._holder:
            # With staged files left, the next run reads whose they are.
            for name in (_LOCK,) if self.staging.exists() else (_HOLDER, _LOCK):
                with contextlib.suppress(OSError):
                    (self.path / name).unlink()
        if self._lock is not None and not is_forked:  # the lock is that of the parent
            self._lock.release()
        self._lock = self._holder = None
        self._is_claimed = self._saves = False

    def move_aside(self, others: Sequence[Path] = ()) -> None:
        """Move checkpoints that this run does not continue, and ``others``, to ``_earlier_runs``.

        These are checkpoints of other runs and of steps after :attr:`step`: resuming would take them for this
        run's, and saving would replace or rotate them. Does nothing in a run that saves nothing.
        """
        if self._is_claimed and self._saves:
            self.on_savers(lambda: self._move_aside(others))

    def _move_aside(self, others: Sequence[Path]) -> None:
        last = -1 if self.step is None else self.step
        foreign = [
            path
            for step, path in sorted(checkpoints(self.path).items())
            if step > last or saved_run_id(path) not in (None, self.run_id)
        ]
        moved = [*foreign, *others]
        if not moved:
            return
        aside = self.path / _EARLIER_RUNS / f"{datetime.now():%Y%m%d-%H%M%S-%f}"
        aside.mkdir(parents=True)
        for path in moved:
            os.replace(path, aside / path.name)
        logger.warning(
            "%s in %r of %s moved to %r; delete them if you do not need them",
            ", ".join(path.name for path in moved),
            str(self.path),
            "earlier runs" if self.step is None else f"other runs, or after step {self.step},",
            str(aside),
        )

    # Files of a checkpoint.

    @contextmanager
    def staged(self, final: Path, estimate_bytes: Callable[[], int]) -> Iterator[Path]:
        """Yield the directory in which all ranks write the files of ``final``, and rename it at the end.

        A directory ``final`` is therefore complete, also after a crash or a power failure.

        Args:
            estimate_bytes: returns about the size of the files, for the message of a failure.

        Raises:
            OSError: a file could not be written, for example because the disk is full. The files that were
                written are removed.
            ConfigError, TrainingError: see :meth:`claimed`.
        """
        with self.claimed():
            staged, self.is_staging = self.staging / final.name, True
            failure = None
            try:
                try:
                    yield staged
                except Exception as error:
                    failure = error
                    if is_sharded(AcceleratorState()):  # other ranks may wait within the block
                        raise
                gather_or_raise(None, failure)
                self.on_savers(lambda: self.publish(staged, final))
            except BaseException as cause:
                if self.args.should_save:
                    self.clear_staging()
                # A full disk is a RuntimeError in torch, an error of its own in safetensors, and a bare
                # Exception in tokenizers.
                known = isinstance(cause, (OSError, RuntimeError, SafetensorError))
                if (known or type(cause) is Exception) and not isinstance(cause, GroupwiseError):
                    raise _write_error(final, estimate_bytes(), cause) from cause
                raise
            finally:
                self.is_staging = False

    def publish(self, staged: Path, final: Path) -> None:
        """Write the manifest and rename a complete checkpoint, replacing one of the same name.

        Both are exchanged at once where the file system can; elsewhere a run that is killed between two
        renames leaves a complete one in :attr:`staging`, from which the next run takes it.
        """
        write_manifest(staged, self.run_id)
        for path in [*staged.rglob("*"), staged]:
            flush(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        if not (final.exists() and _exchange(staged, final)):
            if final.exists():
                os.replace(final, staged.with_name(f"{final.name}.old"))
            os.replace(staged, final)
        flush(final.parent)
        self.clear_staging()

    def clear_staging(self) -> None:
        """Delete the files of a checkpoint that could not be written."""
        shutil.rmtree(self.staging, ignore_errors=True)

    def rotate(self, newest: Path, best: str | None) -> None:
        """Delete the oldest checkpoints until ``save_total_limit`` are left.

        Incomplete ones are first, then those of other runs or of later steps, then those of the lowest steps.
        A checkpoint is renamed before its files are deleted, so that ``checkpoint-N`` is never incomplete.

        Args:
            newest, best: directories of the newest and the best checkpoint, which are never deleted.
        """
        limit = self.args.save_total_limit  # None or 0 keeps all
        if limit is None or limit <= 0:
            return
        protected = {newest.resolve()} | ({Path(best).resolve()} if best else set())
        own, newest_step = (None, self.run_id), int(newest.name.rpartition("-")[2])

        def order(item: tuple[int, Path]) -> tuple[bool, bool, int]:
            step, path = item
            return is_complete(path), step <= newest_step and saved_run_id(path) in own, step

        paths = [path for _, path in sorted(checkpoints(newest.parent).items(), key=order)]
        surplus = len(paths) - max(limit, len(protected))
        for path in [path for path in paths if path.resolve() not in protected][: max(surplus, 0)]:
            self.staging.mkdir(exist_ok=True)
            os.replace(path, self.staging / path.name)
            self.clear_staging()


def _new_id() -> str:
    return uuid.uuid4().hex[:12]


def _read_holder(directory: Path) -> dict[str, Any] | None:
    try:
        return read_json(directory / _HOLDER, {"host": str, "process": int})
    except (OSError, ConfigError):
        return None


def _described(holder: dict[str, Any] | None) -> str:
    if holder is None:
        return "which has just started"
    return f"process {holder.get('process')} on host {holder.get('host')}, since {holder.get('since')}"


def _staging_dir(directory: Path) -> Path:
    """Return the path, without the run's suffix, of the directory in which a checkpoint is written.

    It is beside ``directory``, because that may be uploaded while a checkpoint is written, or after a crash.
    It is inside where a rename from beside is not possible: a mount point, a read-only parent.
    """
    directory = directory.resolve()
    try:
        with tempfile.TemporaryDirectory(prefix="_", dir=directory.parent) as beside:
            probe = Path(beside, Path(beside).name)
            probe.mkdir()
            probe.rename(directory / probe.name).rmdir()
    except OSError:
        return directory / f"{_STAGING}_"
    return directory.parent / f"_{directory.name}{_STAGING}_"


def _write_error(final: Path, needed: int, cause: BaseException) -> OSError:
    free = shutil.disk_usage(final.parent).free
    reason = f"{type(cause).__name__}: {next(iter(str(cause).splitlines()), '')}"
    return OSError(
        getattr(cause, "errno", None) or errno.EIO,
        f"checkpoint {final} could not be written ({reason:.300}). It needs about {needed / 2**20:,.1f} MB, "
        f"and {free / 2**20:,.1f} MB are free there; make space, or choose another output_dir. The files "
        "that were written are removed",
    )


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two directories atomically; returns False, with both unchanged, where that is not possible."""
    try:
        rename = ctypes.CDLL(None).renameat2  # of Linux
    except (OSError, AttributeError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0


def flush(path: Path) -> None:
    """Sync a file or directory to disk, so that after a power failure no rename precedes its contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _start(resume_from_checkpoint: str | bool | None, run_dir: Path) -> tuple[str | None, int | None, str]:
    """Return the checkpoint that a run resumes from, its step and the id of the run; None without one."""
    directory = find_checkpoint(resume_from_checkpoint, str(run_dir))
    if directory is None:
        return None, None, _new_id()
    step = read_saved(directory, trainer_state_name()).get("global_step", 0)
    return directory, step, saved_run_id(Path(directory)) or _new_id()


def checkpoints(run_dir: Path) -> dict[int, Path]:
    """Map step number to directory for every checkpoint in ``run_dir``."""
    pattern = re.compile(rf"{checkpoint_prefix()}-(\d+)")
    return {
        int(match[1]): path
        for path in run_dir.glob(f"{checkpoint_prefix()}-*")
        if path.is_dir() and (match := pattern.fullmatch(path.name))
    }


def find_checkpoint(resume_from_checkpoint: str | bool | None, output_dir: str) -> str | None:
    """Return the directory to resume from, or None.

    Args:
        resume_from_checkpoint: a directory, or True for the newest sound checkpoint in ``output_dir``.
        output_dir: directory of the run.

    Raises:
        ConfigError: the checkpoint does not exist or is damaged.
    """
    if resume_from_checkpoint is None or resume_from_checkpoint is False:
        return None
    if resume_from_checkpoint is True:
        chosen = _newest(Path(output_dir))
    else:
        chosen = Path(resume_from_checkpoint)
        if not chosen.is_dir():
            raise ConfigError(f"resume_from_checkpoint={resume_from_checkpoint!r} is not a directory")
        if found := damage(chosen):
            raise _damaged(chosen, found)
    if not (chosen / MANIFEST).is_file():
        warn_once(logger, "%r has no %s: damaged files are not noticed", str(chosen), MANIFEST)
    return str(chosen) if resume_from_checkpoint is True else str(resume_from_checkpoint)


def _newest(output_dir: Path) -> Path:
    """Return the newest checkpoint that is complete and sound, and warn of the ones before it."""
    found = checkpoints(output_dir)
    if not found:
        aside = output_dir / _EARLIER_RUNS
        earlier = f" (checkpoints of earlier runs are in {str(aside)!r})" if aside.is_dir() else ""
        raise ConfigError(
            f"resume_from_checkpoint=True, but {str(output_dir)!r} contains no checkpoint of the run that "
            f"was started last{earlier}; pass the directory of one, or start a new run with "
            "resume_from_checkpoint=None"
        )
    skipped: dict[Path, str] = {}
    for step in sorted(found, reverse=True):
        reason = damage(found[step]) or (
            "" if is_complete(found[step]) else "the state of the run is not complete there"
        )
        if not reason:
            for path, why in skipped.items():
                logger.warning("%s skipped: %s", path.name, why)
            return found[step]
        skipped[found[step]] = reason
    newest = next(iter(skipped))
    if damage(newest):
        raise _damaged(newest, skipped[newest])
    return newest  # load_state explains what is missing


def _damaged(directory: Path, found: str) -> ConfigError:
    others = sorted(checkpoints(directory.absolute().parent).items(), reverse=True)
    sound = next((path for _, path in others if is_complete(path) and not damage(path)), None)
    newest = f"the newest sound checkpoint is {str(sound)!r}" if sound else "no checkpoint beside it is sound"
    unchecked = f"; if the change was on purpose, delete {MANIFEST}: then no digests are compared"
    return ConfigError(
        f"checkpoint {str(directory)!r} is damaged: {found}; {newest}. Copy it again, or resume from another "
        f"one{unchecked if (directory / MANIFEST).is_file() else ''}"
    )
