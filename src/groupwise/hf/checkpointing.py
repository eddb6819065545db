"""Checkpoints that are either whole or not there, and that hold what the Trainer itself does not save."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from groupwise.errors import ConfigError

logger = logging.getLogger(__name__)

#: Where a checkpoint is written before it gets its name.
STAGING = ".incomplete"
_STATE = "groupwise_state_{rank}.pt"
_REFERENCE = "groupwise_reference.pt"


def staging_dir(run_dir: str) -> Path:
    """The directory in which a checkpoint is written; what a crash left there is never resumed from."""
    return Path(run_dir) / STAGING


def clear_staging(run_dir: str) -> None:
    """Remove what a crash left behind: its files must not end up in the next checkpoint of the same name."""
    shutil.rmtree(staging_dir(run_dir), ignore_errors=True)


def publish(staged: Path, final: Path) -> None:
    """Give a completely written checkpoint its name, in one step of the file system.

    An older checkpoint of the same name makes way first.
    """
    for path in staged.rglob("*"):
        _flush(path)
    _flush(staged)
    if final.exists():
        os.replace(final, staged.with_name(f"{final.name}.old"))
    os.replace(staged, final)
    _flush(final.parent)
    shutil.rmtree(staged.parent, ignore_errors=True)


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints beside ``newest`` until ``limit`` are left; None keeps all.

    ``newest`` and ``best`` stay in any case. A checkpoint loses its name before its files, so that no part of
    one is ever left under it.
    """
    if limit is None or limit <= 0:
        return
    protected = {newest.resolve()} | ({Path(best).resolve()} if best else set())
    # By time and not by number: a directory may hold the checkpoints of an earlier, longer run.
    paths = sorted(_checkpoints(newest.parent).values(), key=lambda path: path.stat().st_mtime)
    surplus = len(paths) - max(limit, len(protected))
    for path in [path for path in paths if path.resolve() not in protected][: max(surplus, 0)]:
        discarded = staging_dir(str(newest.parent)) / path.name
        discarded.parent.mkdir(exist_ok=True)
        os.replace(path, discarded)
        shutil.rmtree(discarded.parent, ignore_errors=True)


def _checkpoints(run_dir: str | Path) -> dict[int, Path]:
    """The checkpoints in a directory by their step."""
    pattern = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
    return {
        int(match[1]): path
        for path in Path(run_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if path.is_dir() and (match := pattern.fullmatch(path.name))
    }


def _flush(path: Path) -> None:
    """Force a file or directory to disk: a rename must not outlive its contents in a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_checkpoint(resume_from_checkpoint: str | bool | None, output_dir: str) -> str | None:
    """The directory to resume from, or None.

    Args:
        resume_from_checkpoint: a directory, or True for the newest checkpoint in ``output_dir``.

    Raises:
        ConfigError: there is no such checkpoint.
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
            f"resume_from_checkpoint=True, but {output_dir!r} holds no checkpoint; pass the directory of "
            "one, or start from the beginning with resume_from_checkpoint=None"
        )
    return str(found[max(found)])


def has_other_names(directory: str, model: torch.nn.Module) -> bool:
    """Whether the weights in ``directory`` have other names than in ``model``.

    ``save_pretrained`` writes some architectures (many vision-language and mixture-of-experts models) as
    their first release had them, and only ``from_pretrained`` changes the names back.
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


def load_converted(directory: str, model: Any) -> None:
    """Load weights that have other names in the checkpoint into ``model``.

    Raises:
        ConfigError: some are missing.
    """
    loaded, report = type(model).from_pretrained(directory, dtype="auto", output_loading_info=True)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            f"checkpoint {directory!r} lacks {len(missing)} weights of a {type(model).__name__}, such as "
            f"{missing[0]!r}; was it made with another model?"
        )
    model.load_state_dict(loaded.state_dict())


def save_state(directory: str, rank: int, world_size: int, state: dict[str, Any]) -> None:
    """Write one rank's share of the trainer state."""
    os.makedirs(directory, exist_ok=True)
    torch.save({**state, "world_size": world_size}, os.path.join(directory, _STATE.format(rank=rank)))


def load_state(directory: str, rank: int, world_size: int) -> dict[str, Any]:
    """Read one rank's share of the trainer state.

    Raises:
        ConfigError: the checkpoint was written by another number of processes, or by another trainer.
    """
    path = os.path.join(directory, _STATE.format(rank=rank))
    if not os.path.isfile(path):
        others = list(Path(directory).glob(_STATE.format(rank="*")))
        if others:
            raise _wrong_number_of_processes(directory, len(others), world_size)
        raise ConfigError(
            f"checkpoint {directory!r} holds no {os.path.basename(path)}: it was saved with save_only_model="
            "True or by another trainer; load the model from it and train without resume_from_checkpoint"
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["world_size"] != world_size:
        raise _wrong_number_of_processes(directory, state["world_size"], world_size)
    return state


#: What the order of the prompts depends on.
_ORDER = (
    *("num_generations", "generation_batch_size", "steps_per_generation", "num_iterations"),
    *("shuffle_dataset", "seed", "data_seed"),
)


def order_of_prompts(config: Any, train_dataset: Any) -> dict[str, Any]:
    """What a resumed run needs alike to see every prompt as often as a run without a break."""
    rows = len(train_dataset) if hasattr(train_dataset, "__len__") else None
    return {**{name: getattr(config, name) for name in _ORDER}, "rows of train_dataset": rows}


def warn_of_other_order(saved: dict[str, Any], config: Any, train_dataset: Any) -> None:
    """Say which of them have changed under a run that is resumed."""
    now = order_of_prompts(config, train_dataset)
    changed = [f"{name}={now[name]} (was {value})" for name, value in saved.items() if now[name] != value]
    if changed:
        logger.warning(
            "resumed with %s: prompts come in another order, so some of this epoch may come twice or not at "
            "all; what the checkpoint holds of its last generation is used up first",
            ", ".join(changed),
        )


def _wrong_number_of_processes(directory: str, saved: int, now: int) -> ConfigError:
    return ConfigError(
        f"checkpoint {directory!r} was written by {saved} processes and cannot be resumed with {now}: each "
        f"holds a part of the generated batch; start {saved} processes"
    )


def save_reference(directory: str, model: torch.nn.Module) -> None:
    """Write the weights of a reference model that moves during training."""
    os.makedirs(directory, exist_ok=True)
    torch.save(model.state_dict(), os.path.join(directory, _REFERENCE))


def load_reference(directory: str, model: torch.nn.Module | None, *, moves: bool) -> None:
    """Read them back into ``model``, if it moves; warn of those that are there for one that does not.

    Raises:
        ConfigError: ``model`` moves, and the checkpoint is one of a run without ``sync_ref_model``.
    """
    if model is None:
        return
    path = os.path.join(directory, _REFERENCE)
    found = os.path.isfile(path)
    if not moves:
        if found:
            logger.warning(
                "resumed with sync_ref_model=False: the reference is the initial model, and not the one that "
                "had moved up to checkpoint %r",
                directory,
            )
        return
    if not found:
        raise ConfigError(
            f"sync_ref_model=True, but checkpoint {directory!r} was written without it and holds no "
            "reference; resume with sync_ref_model=False, or start anew from its weights"
        )
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
