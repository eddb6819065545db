"""Output directory of a run: its lock, its id, the checkpoints in it, and how they enter and leave it."""

from __future__ import annotations

import errno
import filecmp
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TypeVar

from accelerate.state import AcceleratorState
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from transformers.trainer_utils import SaveStrategy

from groupwise.compat.transformers import CHECKPOINT, TRAINER_STATE
from groupwise.config.grpo_config import GRPOConfig
from groupwise.distributed import gather_or_raise, is_sharded
from groupwise.errors import ConfigError, GroupwiseError, warn_once
from groupwise.hf import checkpointing
from groupwise.hf.checkpointing import MANIFEST, damage, is_complete, saved_run_id

logger = logging.getLogger(__name__)

# ``Trainer`` uploads no files whose path in ``output_dir`` begins with "_".
_LOCK, _STAGING = "_run.lock", "_incomplete"
_EARLIER_RUNS = "_earlier_runs"  # checkpoints of other runs

T = TypeVar("T")


class RunDirectory:
    """``output_dir`` of a run: locked while the run trains; one that saves moves others' checkpoints aside.

    The operating system ends the lock with its process; its file stays.

    Attributes:
        run_id: identity of the run, which a resumed run shares; "" before the first one.
        step: of the checkpoint that the run resumed from; None in a new run.
        finished: checkpoint of the result, of a run that had ended when it was resumed.
        staging: directory in which files are written before they are renamed; that of the run with the lock.
        is_staging: True while they are written.
    """

    def __init__(self, args: GRPOConfig) -> None:
        self.args = args
        self.run_id = ""
        self.step: int | None = None
        self.finished: Path | None = None
        self.is_staging = False
        self._saves: bool | None = None  # None: outside of open()
        self._is_locked = False

    @property
    def path(self) -> Path:
        return Path(str(self.args.output_dir))

    @property
    def staging(self) -> Path:
        return self.path / _STAGING

    @contextmanager
    def open(self, resume_from_checkpoint: str | bool | None) -> Iterator[str | None]:
        """Yield the checkpoint to resume from, or None; keep the lock until the end.

        Collective, as all methods.

        Args:
            resume_from_checkpoint: see :func:`find_checkpoint`.

        Raises:
            ConfigError: another run has the lock, or the checkpoint does not exist or is damaged.
        """
        # A run with save_strategy="no" moves no checkpoints aside before a callback saves one.
        self._saves = self.args.save_strategy != SaveStrategy.NO or self.args.enable_jit_checkpoint
        try:
            with self.locked():
                self.finished = None
                start = partial(_start, resume_from_checkpoint, self.path)
                checkpoint, self.step, self.run_id = self.on_savers(start)
                yield checkpoint
        finally:
            self._saves = None

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

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Have the lock for the block; a block within another one has it already.

        Raises:
            ConfigError: another run has the lock.
        """
        if self._is_locked:
            yield
            return
        lock, process = FileLock(self.path / _LOCK), os.getpid()
        try:
            self.on_savers(lambda: self._acquire(lock))
            self._is_locked = True
            yield
        finally:
            if os.getpid() == process:  # else a fork of it
                lock.release()
                self._is_locked = False

    def _acquire(self, lock: FileLock) -> None:
        """Lock the directory, and delete what a killed run staged."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(
                f"output_dir={str(self.path)!r} is used by another run, and two would mix their metrics and "
                "replace each other's checkpoints; wait for its end, or choose another one"
            ) from None
        except (OSError, NotImplementedError) as cause:
            logger.warning("output_dir=%r cannot be locked (%s): start no other run there", self.path, cause)
        self.clear_staging()

    def move_aside(self) -> None:
        """Move checkpoints that this run does not continue to ``_earlier_runs``.

        These are checkpoints of other runs and of steps after :attr:`step`: resuming would take them for this
        run's, and saving would replace or rotate them. Does nothing in a run that saves nothing.
        """
        if self._saves:
            self.on_savers(self._move_aside)

    def _move_aside(self) -> None:
        last = -1 if self.step is None else self.step
        moved = [
            path
            for step, path in reversed(checkpoints(self.path).items())
            if step > last or saved_run_id(path) not in (None, self.run_id)
        ]
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
    def staged(self, final: Path) -> Iterator[Path]:
        """Yield the directory in which all ranks write the files of ``final``, and rename it at the end.

        A directory ``final`` is therefore complete, also after a crash or a power failure.

        Raises:
            OSError: a file could not be written, for example because the disk is full. The files that were
                written are removed.
            ConfigError: another run has the lock.
        """
        with self.locked():
            if self._saves is False:  # the first save of a run that was not to save any
                self._saves = True
                self.move_aside()
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
                    raise _write_error(final, cause) from cause
                raise
            finally:
                self.is_staging = False

    def publish(self, staged: Path, final: Path) -> None:
        """Write the manifest and rename a complete checkpoint, replacing one of the same name.

        A run that is killed between the two renames leaves both in :attr:`staging`, from which the next run
        takes the new one.
        """
        checkpointing.write_manifest(staged, self.run_id)
        for path in [*staged.rglob("*"), staged]:
            flush(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.exists():
            os.replace(final, staged.with_name(f"{final.name}.old"))
        os.replace(staged, final)
        flush(final.parent)
        self.clear_staging()

    def clear_staging(self) -> None:
        """Delete staged files; a checkpoint that was replacing another one is renamed first."""
        for replaced in self.staging.glob("*.old"):
            new, final = replaced.with_suffix(""), self.path / replaced.stem
            if new.exists() and not final.exists():
                os.replace(new, final)
        shutil.rmtree(self.staging, ignore_errors=True)

    def rotate(self, newest: Path, best: str | None) -> None:
        """Delete the oldest checkpoints of this run until ``save_total_limit`` are left.

        Incomplete ones are first, then those of later steps, then those of the lowest steps. A checkpoint is
        renamed before its files are deleted, so that ``checkpoint-N`` is never incomplete.

        Args:
            newest, best: directories of the newest and the best checkpoint, which are never deleted.
        """
        limit = self.args.save_total_limit  # None or 0 keeps all
        if limit is None or limit <= 0:
            return
        protected = {newest.resolve()} | ({Path(best).resolve()} if best else set())
        own = [
            (is_complete(path), step <= int(newest.name.rpartition("-")[2]), step, path)
            for step, path in checkpoints(newest.parent).items()
            if saved_run_id(path) in (None, self.run_id)
        ]
        surplus = len(own) - max(limit, len(protected))
        old = [path for *_, path in sorted(own) if path.resolve() not in protected]
        for path in old[: max(surplus, 0)]:
            self.staging.mkdir(exist_ok=True)
            os.replace(path, self.staging / path.name)
            self.clear_staging()


def _write_error(final: Path, cause: BaseException) -> OSError:
    free = shutil.disk_usage(final.parent).free
    reason = f"{type(cause).__name__}: {next(iter(str(cause).splitlines()), '')}"
    return OSError(
        getattr(cause, "errno", None) or errno.EIO,
        f"checkpoint {final} could not be written ({reason:.300}); {free / 2**20:,.1f} MB are free there. "
        "Make space, or choose another output_dir. The files that were written are removed",
    )


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
        return None, None, token_hex(6)
    step = checkpointing.read_saved(directory, TRAINER_STATE).get("global_step", 0)
    return directory, step, saved_run_id(Path(directory)) or token_hex(6)


def checkpoints(run_dir: Path) -> dict[int, Path]:
    """Map step number to directory for every checkpoint in ``run_dir``, the newest first."""
    pattern = re.compile(rf"{CHECKPOINT}-(\d+)")
    found = {
        int(match[1]): path
        for path in run_dir.glob(f"{CHECKPOINT}-*")
        if path.is_dir() and (match := pattern.fullmatch(path.name))
    }
    return dict(sorted(found.items(), reverse=True))


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
    has_manifest = (chosen / MANIFEST).is_file()
    if reason := damage(chosen):
        sound = next(filter(_is_sound, checkpoints(chosen.absolute().parent).values()), None)
        beside = f"the newest sound checkpoint is {str(sound)!r}" if sound else "none beside it is sound"
        unchecked = f"; if the change was on purpose, delete {MANIFEST}: then no digests are compared"
        raise ConfigError(
            f"checkpoint {str(chosen)!r} is damaged: {reason}; {beside}. Copy it again, or resume from "
            f"another one{unchecked if has_manifest else ''}"
        )
    if not has_manifest:
        warn_once(logger, "%r has no %s: damaged files are not noticed", str(chosen), MANIFEST)
    return str(chosen)


def _newest(output_dir: Path) -> Path:
    """Return the newest checkpoint that is complete and sound, and warn of the ones before it."""
    found = list(checkpoints(output_dir).values())
    if not found:
        aside = output_dir / _EARLIER_RUNS
        earlier = f" (checkpoints of earlier runs are in {str(aside)!r})" if aside.is_dir() else ""
        raise ConfigError(
            f"resume_from_checkpoint=True, but {str(output_dir)!r} contains no checkpoint of the run that "
            f"was started last{earlier}; pass the directory of one, or start a new run with "
            "resume_from_checkpoint=None"
        )
    chosen = next(filter(_is_sound, found), found[0])  # with none, the load explains what is missing
    for path in found[: found.index(chosen)]:
        reason = damage(path) or "the state of the run is not complete there"
        logger.warning("%s skipped: %s", path.name, reason)
    return chosen


def _is_sound(directory: Path) -> bool:
    return is_complete(directory) and not damage(directory)
