"""Records as bytes, for checkpoints and for other ranks."""

from __future__ import annotations

import gzip
import io
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import IO, Any

import numpy as np
import torch

from groupwise.core.metrics import Max, Mean, Min, Sum
from groupwise.errors import ConfigError
from groupwise.records.images import ImageInputs
from groupwise.records.rollout import Completion, RewardBatch, RolloutBatch, SamplerSettings
from groupwise.records.sampling_mask import SamplingMask
from groupwise.records.tensors import Experience, MicroBatch

_PLAIN = {type(None), bool, int, float, str, bytes, range, slice}

#: Classes that :func:`load` reads beside tensors and plain values.
_CLASSES = (
    *(range, slice, Mean, Sum, Max, Min),
    *(ImageInputs, SamplingMask, SamplerSettings, Completion, RolloutBatch, RewardBatch),
    *(Experience, MicroBatch),
)


@dataclass(frozen=True)
class NotSaved:
    """Part of a snapshot that only this process can use: None in :func:`host_copy`."""

    value: Any


def host_copy(value: Any, name: str = "value", _known: dict[int, Any] | None = None) -> Any:
    """Return tensors, containers and records on the host, in the form that ``torch.save`` writes.

    What is there already is not copied, but a tensor without the larger storage that it is a view of. A
    record or tensor that occurs several times stays one object, as the image inputs of a group. Fields with
    ``saved=False`` in their metadata, and those that a record of an earlier version lacks, get their default.

    Args:
        name: expression of ``value``, for the message.

    Raises:
        ConfigError: some value can be neither saved nor sent; the message names its place.
    """
    kind, known = type(value), {} if _known is None else _known
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        if id(value) not in known:
            on_host = value.detach().cpu()
            is_part = on_host.untyped_storage().nbytes() > on_host.nbytes
            known[id(value)] = on_host.clone() if is_part else on_host
        return known[id(value)]
    if isinstance(value, np.generic):
        return host_copy(value.item(), name)
    if isinstance(value, NotSaved):
        return None
    if isinstance(value, list | tuple):
        if kind not in (list, tuple) or not set(map(type, value)) <= _PLAIN:  # most lists are token ids
            value = [host_copy(entry, f"{name}[{i}]", known) for i, entry in enumerate(value)]
        return tuple(value) if issubclass(kind, tuple) else value
    if isinstance(value, dict):
        return {
            host_copy(key, f"a key of {name}"): host_copy(entry, f"{name}[{key!r}]", known)
            for key, entry in value.items()
        }
    if is_dataclass(value) and not isinstance(value, type):
        if id(value) not in known:
            saved = [f.name for f in fields(value) if f.name in vars(value) and f.metadata.get("saved", True)]
            known[id(value)] = kind(**{n: host_copy(vars(value)[n], f"{name}.{n}", known) for n in saved})
        return known[id(value)]
    raise ConfigError(
        f"{name} holds a {kind.__name__}, which a checkpoint cannot contain; allowed: tensors, numbers, "
        "strings, and lists, tuples and dictionaries of them"
    )


def to_bytes(value: Any, name: str = "value", *, compressed: bool = False) -> bytes:
    """Return what ``torch.save`` writes of :func:`host_copy`, or a gzip file of it."""
    content = io.BytesIO()
    with gzip.GzipFile("", "wb", 1, content) if compressed else nullcontext(content) as file:
        torch.save(host_copy(value, name), file)  # type: ignore[arg-type]
    return content.getvalue()


def load(file: str | IO[bytes], *classes: type) -> Any:
    """Read what ``torch.save`` has written of :func:`host_copy`; no other code is run.

    Args:
        classes: further dataclasses that the file may contain.
    """
    with torch.serialization.safe_globals([*_CLASSES, *classes]):
        return torch.load(file, map_location="cpu", weights_only=True)
