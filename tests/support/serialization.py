"""Values as a checkpoint holds them."""

from __future__ import annotations

import io
from typing import Any

import torch

from groupwise.core.entropy import EntropyControl
from groupwise.records.serialization import host_copy, load


def reloaded(value: Any) -> Any:
    """Write and read a value as checkpoints do."""
    file = io.BytesIO()
    torch.save(host_copy(value), file)
    file.seek(0)
    return load(file, EntropyControl)
