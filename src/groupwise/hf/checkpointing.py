"""Files of a checkpoint: manifest, converted weights, and state that ``Trainer`` does not save."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from groupwise.compat.transformers import trainer_state_name
from groupwise.core.entropy import EntropyControl
from groupwise.data.dynamic_sampling import LeftoverGroups
from groupwise.errors import ConfigError
from groupwise.records.serialization import host_copy, load
from groupwise.reporting.evaluation import EvaluatedCompletion

logger = logging.getLogger(__name__)

STATE = "groupwise_state_{rank}.pt"
MANIFEST = "groupwise_manifest.json"
_REFERENCE = "groupwise_reference.pt"
_HASHED_BYTES = 2**24  # larger files have a size in the manifest and no digest


def fingerprint(path: Path) -> dict[str, Any]:
    """Return the size of a file, and its digest if it is small."""
    size = path.stat().st_size
    if size > _HASHED_BYTES:
        return {"bytes": size}
    return {"bytes": size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def write_manifest(directory: Path, run_id: str) -> None:
    """List the files of a checkpoint and the run that wrote it."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    files = {path.relative_to(directory).as_posix(): fingerprint(path) for path in paths}
    text = json.dumps({"run": run_id, "files": files}, indent=1)
    (directory / MANIFEST).write_text(text, encoding="utf-8")


def _read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest; an empty one for a checkpoint of ``transformers`` or an earlier version."""
    path = directory / MANIFEST
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"files": {}}


def saved_run_id(directory: Path) -> str | None:
    """Return the id of the run that wrote a checkpoint; None: unknown."""
    try:
        return _read_manifest(directory).get("run") or None
    except ValueError:
        return None


def damage(directory: Path) -> str:
    """Return the first difference between a checkpoint and its manifest, if it has both, or ""."""
    try:
        files = _read_manifest(directory)["files"]
    except ValueError:
        return f"{MANIFEST} is cut or overwritten"
    for name, written in files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        found = path.stat().st_size
        if found != written["bytes"]:
            return f"{name} has {found} bytes instead of {written['bytes']}"
        if "sha256" in written and fingerprint(path) != written:
            return f"{name} has other contents than were written"
    return ""


def is_complete(directory: Path) -> bool:
    """Return True if a run can be resumed from ``directory``.

    ``enable_jit_checkpoint`` creates the directory before anything is saved.
    """
    has_state = any(directory.glob(STATE.format(rank="*")))
    return has_state and (directory / trainer_state_name()).is_file()


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
    """Write the rollout state of one rank.

    Raises:
        ConfigError: it holds values that a checkpoint cannot contain.
    """
    os.makedirs(directory, exist_ok=True)
    saved = host_copy({**state, "world_size": world_size}, "state")
    torch.save(saved, os.path.join(directory, STATE.format(rank=rank)))


def load_state(directory: str, rank: int, world_size: int) -> dict[str, Any]:
    """Read the rollout state of one rank.

    Raises:
        ConfigError: the checkpoint was written by another number of processes, another trainer or another
            version.
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
    try:
        state = load(path, EntropyControl, LeftoverGroups, EvaluatedCompletion)
    except UnpicklingError as error:
        raise ConfigError(
            f"checkpoint {directory!r} holds records that this version of groupwise does not have; resume "
            "with the version that wrote it, or start a new run with the checkpoint as its model"
        ) from error
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
