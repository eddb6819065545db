"""Atomic checkpoints, and the trainer state that ``Trainer`` does not save."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from groupwise.hf.run_directory import STATE, RunDirectory

logger = logging.getLogger(__name__)

_REFERENCE = "groupwise_reference.pt"


class CheckpointWriter:
    """Write checkpoints to a staging directory and rename them when every file is on disk.

    A directory named ``checkpoint-N`` is therefore complete, also after a crash or a power failure.

    Attributes:
        is_staging: True while ``Trainer`` writes into the staging directory.
    """

    def __init__(self, accelerator: Accelerator, run: RunDirectory) -> None:
        self.accelerator, self.run = accelerator, run
        self.is_staging = False

    def output_dir(self, run_dir: str) -> str:
        """Return the directory in which ``Trainer`` creates ``checkpoint-N``."""
        return str(self.run.staging) if self.is_staging else run_dir

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
            TrainingError: another run writes to ``run_dir``.
        """
        final = Path(run_dir, f"{checkpoint_prefix()}-{state.global_step}")
        with self.staged(final, estimate_bytes) as staged:
            self.is_staging = True
            try:
                write()
            finally:
                self.is_staging = False
            if not args.save_only_model:
                write_rollout_state(str(staged))
            if state.best_model_checkpoint == str(staged):
                state.best_model_checkpoint = str(final)
            if args.should_save:
                state.save_to_json(str(staged / trainer_state_name()))
        self.run.on_savers(lambda: self.run.rotate(final, args.save_total_limit, state.best_model_checkpoint))
        return str(final)

    @contextmanager
    def staged(self, final: Path, estimate_bytes: Callable[[], int]) -> Iterator[Path]:
        """Yield the directory in which all ranks write the files of ``final``, and rename it at the end.

        Raises:
            OSError: see :meth:`save`.
        """
        with self.run.claimed():
            staged = self.run.staging / final.name
            try:
                yield staged
                self.accelerator.wait_for_everyone()
                self.run.on_savers(lambda: self.run.publish(staged, final))
            except BaseException as cause:
                if self.run.args.should_save:
                    self.run.clear_staging()
                # A full disk is a RuntimeError in torch, an error of its own in safetensors, and a bare
                # Exception in tokenizers.
                known = isinstance(cause, (OSError, RuntimeError, SafetensorError))
                if (known or type(cause) is Exception) and not isinstance(cause, GroupwiseError):
                    raise _write_error(final, estimate_bytes(), cause) from cause
                raise


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
    torch.save({**state, "world_size": world_size}, os.path.join(directory, STATE.format(rank=rank)))


def load_state(directory: str, rank: int, world_size: int) -> dict[str, Any]:
    """Read the rollout state of one rank.

    Raises:
        ConfigError: the checkpoint was written by another number of processes, or by another trainer.
    """
    path = os.path.join(directory, STATE.format(rank=rank))
    if not os.path.isfile(path):
        others = list(Path(directory).glob(STATE.format(rank="*")))
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
