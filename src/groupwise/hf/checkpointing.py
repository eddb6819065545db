"""Atomic checkpoints, their selection on resume, and the trainer state that ``Trainer`` does not save."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel, TrainerState
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from groupwise.compat.transformers import checkpoint_prefix, trainer_state_name
from groupwise.config.grpo_config import GRPOConfig
from groupwise.errors import ConfigError, GroupwiseError

logger = logging.getLogger(__name__)

_STAGING = "_incomplete"  # ``Trainer`` uploads no files whose path in ``output_dir`` begins with "_"
_STATE = "groupwise_state_{rank}.pt"
_REFERENCE = "groupwise_reference.pt"


class CheckpointWriter:
    """Write checkpoints to a staging directory and rename them when every file is on disk.

    A directory named ``checkpoint-N`` is therefore complete, also after a crash or a power failure.

    Attributes:
        is_staging: True while ``Trainer`` writes into the staging directory.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.is_staging = False

    def output_dir(self, run_dir: str) -> str:
        """Return the directory in which ``Trainer`` creates ``checkpoint-N``."""
        return str(staging_dir(run_dir)) if self.is_staging else run_dir

    def save(
        self,
        run_dir: str,
        args: GRPOConfig,
        state: TrainerState,
        *,
        write: Callable[[], None],
        write_rollout_state: Callable[[str], None],
        estimate_bytes: Callable[[], int],
    ) -> str:
        """Write, rename and rotate. Collective: every rank calls it.

        Args:
            run_dir: output directory of the run.
            args: settings of the run.
            state: the trainer's; its ``best_model_checkpoint`` is corrected to the final name.
            write: ``Trainer._save_checkpoint`` with its arguments bound; writes under ``output_dir``.
            write_rollout_state: adds files to the directory that it is given.
            estimate_bytes: returns about the size of the checkpoint, for the message of a failure.

        Returns:
            The directory of the checkpoint.

        Raises:
            OSError: a file could not be written, for example because the disk is full. The files that were
                written are removed.
        """
        name = f"{checkpoint_prefix()}-{state.global_step}"
        staged, final = staging_dir(run_dir) / name, Path(run_dir, name)
        if args.should_save:
            clear_staging(run_dir)
        self.accelerator.wait_for_everyone()
        try:
            self._write(staged, final, args, state, write, write_rollout_state)
        except BaseException as cause:
            if args.should_save:
                clear_staging(run_dir)
            # A full disk is a RuntimeError in torch and an error of its own in safetensors.
            known = isinstance(cause, (OSError, RuntimeError, SafetensorError))
            if known and not isinstance(cause, GroupwiseError):
                raise _write_error(final, estimate_bytes(), cause) from cause
            raise
        if args.should_save:
            publish(staged, final)
            rotate(final, args.save_total_limit, state.best_model_checkpoint)
        self.accelerator.wait_for_everyone()
        return str(final)

    def _write(
        self,
        staged: Path,
        final: Path,
        args: GRPOConfig,
        state: TrainerState,
        write: Callable[[], None],
        write_rollout_state: Callable[[str], None],
    ) -> None:
        """Write all files of all ranks to the staging directory, and flush them to disk."""
        self.is_staging = True
        try:
            write()
        finally:
            self.is_staging = False
        if not args.save_only_model:
            write_rollout_state(str(staged))
        if state.best_model_checkpoint == str(staged):
            state.best_model_checkpoint = str(final)
        self.accelerator.wait_for_everyone()
        if args.should_save:
            state.save_to_json(str(staged / trainer_state_name()))
            for path in [*staged.rglob("*"), staged]:
                _flush(path)


def _write_error(final: Path, needed: int, cause: BaseException) -> OSError:
    free = shutil.disk_usage(final.parent).free
    reason = f"{type(cause).__name__}: {next(iter(str(cause).splitlines()), '')}"
    return OSError(
        getattr(cause, "errno", None) or errno.EIO,
        f"checkpoint {final} could not be written ({reason:.300}). It needs about {_megabytes(needed)}, and "
        f"{_megabytes(free)} are free there; make space, or choose another output_dir. The files that were "
        "written are removed",
    )


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MB"


def staging_dir(run_dir: str) -> Path:
    """Return the directory in which a checkpoint is written; a run never resumes from it.

    It is beside ``run_dir``, because ``run_dir`` may be uploaded while a checkpoint is written, or after a
    crash. It is inside where a rename from beside is not possible: a mount point, a read-only parent.
    """
    directory = Path(run_dir).resolve()
    if _can_rename(directory.parent, directory):
        return directory.parent / f"_{directory.name}{_STAGING}"
    return directory / _STAGING


def _can_rename(source: Path, target: Path) -> bool:
    """Return True if a directory in ``source`` can be renamed into ``target``, which is created."""
    probe = moved = None
    try:
        target.mkdir(parents=True, exist_ok=True)
        probe = Path(tempfile.mkdtemp(prefix="_", dir=source))
        moved = probe.rename(target / probe.name)
    except OSError:
        return False
    finally:
        left = moved or probe
        if left is not None:
            left.rmdir()
    return True


def clear_staging(run_dir: str) -> None:
    """Delete the files of a checkpoint that a crash left incomplete."""
    shutil.rmtree(staging_dir(run_dir), ignore_errors=True)


def publish(staged: Path, final: Path) -> None:
    """Rename a complete checkpoint atomically, replacing one of the same name."""
    if final.exists():
        os.replace(final, staged.with_name(f"{final.name}.old"))
    os.replace(staged, final)
    _flush(final.parent)
    shutil.rmtree(staged.parent, ignore_errors=True)


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints beside ``newest`` until ``limit`` are left, incomplete ones first.

    A checkpoint is renamed before its files are deleted, so that ``checkpoint-N`` is never incomplete.

    Args:
        newest: directory of the newest checkpoint; never deleted.
        limit: None or 0 keeps all.
        best: directory of the best checkpoint; never deleted.
    """
    if limit is None or limit <= 0:
        return
    protected = {newest.resolve()} | ({Path(best).resolve()} if best else set())
    # By time, not by step number: the directory may hold checkpoints of an earlier, longer run.
    paths = sorted(
        _checkpoints(newest.parent).values(), key=lambda path: (is_complete(path), path.stat().st_mtime)
    )
    surplus = len(paths) - max(limit, len(protected))
    for path in [path for path in paths if path.resolve() not in protected][: max(surplus, 0)]:
        discarded = staging_dir(str(newest.parent)) / path.name
        discarded.parent.mkdir(exist_ok=True)
        os.replace(path, discarded)
        shutil.rmtree(discarded.parent, ignore_errors=True)


def _checkpoints(run_dir: str | Path) -> dict[int, Path]:
    """Map step number to directory for every checkpoint in ``run_dir``."""
    pattern = re.compile(rf"{checkpoint_prefix()}-(\d+)")
    return {
        int(match[1]): path
        for path in Path(run_dir).glob(f"{checkpoint_prefix()}-*")
        if path.is_dir() and (match := pattern.fullmatch(path.name))
    }


def is_complete(directory: Path) -> bool:
    """Return True if a run can be resumed from ``directory``.

    ``enable_jit_checkpoint`` creates the directory before anything is saved.
    """
    has_state = any(directory.glob(_STATE.format(rank="*")))
    return has_state and (directory / trainer_state_name()).is_file()


def _flush(path: Path) -> None:
    """Sync a file or directory to disk, so that after a power failure no rename precedes its contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_checkpoint(resume_from_checkpoint: str | bool | None, output_dir: str) -> str | None:
    """Return the directory to resume from, or None.

    Args:
        resume_from_checkpoint: a directory, or True for the newest complete checkpoint in ``output_dir``.
        output_dir: directory of the run.

    Raises:
        ConfigError: the checkpoint does not exist.
    """
    if resume_from_checkpoint is None or resume_from_checkpoint is False:
        return None
    if resume_from_checkpoint is not True:
        if not os.path.isdir(resume_from_checkpoint):
            raise ConfigError(f"resume_from_checkpoint={resume_from_checkpoint!r} is not a directory")
        return str(resume_from_checkpoint)
    found = _checkpoints(output_dir)
    if not found:
        raise ConfigError(
            f"resume_from_checkpoint=True, but {output_dir!r} contains no checkpoint; pass the directory of "
            "one, or start a new run with resume_from_checkpoint=None"
        )
    newest_first = [found[step] for step in sorted(found, reverse=True)]
    complete = next((path for path in newest_first if is_complete(path)), None)
    if complete is None:
        return str(newest_first[0])  # load_state explains what is missing
    if skipped := [path.name for path in newest_first[: newest_first.index(complete)]]:
        logger.warning("%s skipped: the state of the run is not complete there", ", ".join(skipped))
    return str(complete)


def has_converted_names(directory: str, model: nn.Module) -> bool:
    """Return True if the checkpoint in ``directory`` names weights differently than ``model`` does.

    ``save_pretrained`` writes some architectures (many vision-language and mixture-of-experts models) with
    the weight names of their first release, and only ``from_pretrained`` converts them back.
    """
    index, single = Path(directory, SAFE_WEIGHTS_INDEX_NAME), Path(directory, SAFE_WEIGHTS_NAME)
    if index.is_file():
        saved = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    elif single.is_file():
        with safe_open(single, framework="pt") as file:
            saved = set(file.keys())
    else:
        return False
    return not saved <= model.state_dict().keys()


def load_converted(directory: str, model: PreTrainedModel) -> None:
    """Load weights into ``model`` through ``from_pretrained``, which converts their names.

    Raises:
        ConfigError: the checkpoint lacks some weights.
    """
    loaded, report = cast(
        tuple[PreTrainedModel, dict[str, set[str]]],
        type(model).from_pretrained(directory, dtype="auto", output_loading_info=True),
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            f"checkpoint {directory!r} lacks {len(missing)} weights of a {type(model).__name__}, such as "
            f"{missing[0]!r}; was it written with another model?"
        )
    model.load_state_dict(loaded.state_dict())


def save_state(directory: str, rank: int, world_size: int, state: dict[str, Any]) -> None:
    """Write the rollout state of one rank."""
    os.makedirs(directory, exist_ok=True)
    torch.save({**state, "world_size": world_size}, os.path.join(directory, _STATE.format(rank=rank)))


def load_state(directory: str, rank: int, world_size: int) -> dict[str, Any]:
    """Read the rollout state of one rank.

    Raises:
        ConfigError: the checkpoint was written by another number of processes, or by another trainer.
    """
    path = os.path.join(directory, _STATE.format(rank=rank))
    if not os.path.isfile(path):
        others = list(Path(directory).glob(_STATE.format(rank="*")))
        if others:
            raise _wrong_world_size(directory, len(others), world_size)
        raise ConfigError(
            f"checkpoint {directory!r} has no {os.path.basename(path)}: it was saved with save_only_model="
            "True or by another trainer; load the model from it and train without resume_from_checkpoint"
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["world_size"] != world_size:
        raise _wrong_world_size(directory, state["world_size"], world_size)
    return state


def _wrong_world_size(directory: str, saved: int, now: int) -> ConfigError:
    return ConfigError(
        f"checkpoint {directory!r} was written by {saved} processes and cannot be resumed with {now}: every "
        f"rank saves its part of the generated batch; start {saved} processes"
    )


def save_reference(directory: str, model: nn.Module) -> None:
    """Write the weights of a reference model that is synchronized with the policy."""
    os.makedirs(directory, exist_ok=True)
    torch.save(model.state_dict(), os.path.join(directory, _REFERENCE))


def load_reference(directory: str, model: nn.Module | None, *, sync_ref_model: bool) -> None:
    """Load the saved reference weights into ``model``, or warn if ``sync_ref_model`` is now off.

    Raises:
        ConfigError: ``sync_ref_model`` is on, and the checkpoint was written without it.
    """
    if model is None:
        return
    path = os.path.join(directory, _REFERENCE)
    is_saved = os.path.isfile(path)
    if not sync_ref_model:
        if is_saved:
            logger.warning(
                "resumed with sync_ref_model=False: the reference is the initial model; the synchronized "
                "reference in checkpoint %r is not loaded",
                directory,
            )
        return
    if not is_saved:
        raise ConfigError(
            f"sync_ref_model=True, but checkpoint {directory!r} was written without it and contains no "
            "reference; resume with sync_ref_model=False, or start a new run from its weights"
        )
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
