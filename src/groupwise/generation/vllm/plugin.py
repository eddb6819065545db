"""Entry point ``vllm.general_plugins``, which vLLM calls in each of its processes."""

from __future__ import annotations

import shutil
import tempfile
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.compat.vllm import register_weight_transfer_engine
from groupwise.compat.vllm_weights import add_worker_method
from groupwise.generation.vllm.weight_check import (
    ADAPTERS,
    SAME,
    WEIGHTS,
    adapter_reports,
    same_reports,
    weight_report,
)

#: Name of the weight-transfer engine that needs no GPU.
BACKEND = "groupwise"

#: Method of the workers that makes the files of a LoRA adapter available.
PLACE_ADAPTER = "groupwise_place_adapter"


def register() -> None:
    """Register both sides of the weight-transfer engine of this package, and methods of vLLM's workers.

    May be called more than once.
    """
    room = "groupwise.generation.vllm"
    register_weight_transfer_engine(
        BACKEND, (f"{room}.receiver", "CheckpointReceiver"), (f"{room}.transfer", "BucketSender")
    )
    add_worker_method(WEIGHTS, weight_report)
    add_worker_method(ADAPTERS, adapter_reports)
    add_worker_method(SAME, same_reports)
    add_worker_method(PLACE_ADAPTER, place_adapter)


def place_adapter(worker: Any, path: str, files: Mapping[str, str] | None = None) -> str | None:
    """Return the directory from which this worker can load a LoRA adapter; None: it needs the files.

    Args:
        path: directory of the trainer, which is used if this machine can read it.
        files: contents in base64 by file name, to write to a directory of this machine. Empty: remove that.
    """
    own = Path(tempfile.gettempdir(), "groupwise-adapters", Path(path).name)
    for name, content in (files or {}).items():  # workers of one machine write the same
        own.mkdir(parents=True, exist_ok=True, mode=0o700)
        (own / name).write_bytes(b64decode(content))
    if files == {}:
        shutil.rmtree(own, ignore_errors=True)
    return str(own) if files else path if Path(path).is_dir() else None
