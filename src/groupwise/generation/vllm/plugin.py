"""Entry point ``vllm.general_plugins``, which vLLM calls in each of its processes: methods of its workers."""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import uuid
from base64 import b64decode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from groupwise.compat import vllm_weights
from groupwise.compat.vllm import register_weight_transfer_engine
from groupwise.generation.vllm.weight_check import Report
from groupwise.generation.vllm.weight_places import DigestReport, Places, find_places
from groupwise.policy.digests import row_digests

logger = logging.getLogger(__name__)

#: Name of the weight-transfer engine that needs no GPU.
BACKEND = "groupwise"

#: Methods of the workers, for ``collective_rpc``.
WEIGHTS, ADAPTERS, SAME = "groupwise_weight_report", "groupwise_adapter_reports", "groupwise_same_reports"
PLACE_ADAPTER = "groupwise_place_adapter"

#: Files of an adapter, in the format of PEFT.
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
_PLAIN_NAME = re.compile(r"\w[\w.:-]*", re.ASCII)

#: Begins the message of :func:`same_reports`.
DIFFERS = "it differs from the first data-parallel engine in"


def register() -> None:
    """Register the weight-transfer engine of this package, and methods of vLLM's workers.

    May be called more than once.
    """
    register_weight_transfer_engine(BACKEND, "groupwise.generation.vllm.receiver", "CheckpointReceiver")
    methods: dict[str, Any] = {WEIGHTS: weight_report, ADAPTERS: adapter_reports, SAME: same_reports}
    for name, method in (methods | {PLACE_ADAPTER: place_adapter}).items():
        vllm_weights.add_worker_method(name, method)
    _adapter_directory()


@torch.no_grad()
def weight_report(worker: Any, shapes: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Return one report: the digests of a worker's weights by checkpoint name, without adapters.

    Args:
        shapes: shapes of the checkpoint's tensors.

    Returns:
        see :meth:`DigestReport.result`.
    """
    model, report = worker.model_runner.get_model(), DigestReport(shapes)
    if worker.model_config.quantization is not None:  # it computes with other values by intent
        report.opaque.update(shapes)
        return _kept(worker, [report.result()])
    vllm_weights.keep_digests_of_repacked(row_digests)
    with vllm_weights.without_lora_layers(model):
        if getattr(worker, "groupwise_places", (None,))[0] != shapes:
            worker.groupwise_places = (shapes, _find_places(model, shapes, worker.model_config.dtype))
        places: Places = worker.groupwise_places[1]
        report.opaque |= places.opaque
        report.empty += map(".".join, places.empty)
        modules = dict(model.named_modules())
        tied = {id(getattr(modules[path], name)): (path, name) for path, name in places.by_parameter}
        for path, module in modules.items():
            for name, parameter in module.named_parameters(recurse=False):
                # A head tied to the embedding has its parameter, and on a CPU a repacked copy of that.
                key = (path, name) if (path, name) in places.by_parameter else tied.get(id(parameter))
                if key is None:
                    continue
                own, shape = places.by_parameter[key], places.shapes[key]
                kernel = vllm_weights.repacking_kernel(module) if name == "weight" else None
                loaded = vllm_weights.as_loaded(module, name, parameter)
                if key == (path, name) and loaded is not None and tuple(loaded.shape) == shape:
                    report.add(own, loaded)
                elif kernel is None and key == (path, name):
                    report.opaque.update(place.name for place in own)
                if kernel is not None:
                    rows_N = getattr(kernel, "row_digests", None)
                    read = partial(vllm_weights.read_kernel, module, kernel, shape[1])
                    report.add_repacked(own, shape[1], parameter.dtype, read, rows_N)
    return _kept(worker, [report.result()])


def _find_places(model: Any, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> Places:
    with vllm_weights.on_meta_device(model) as parameters:
        try:
            return find_places(model.load_weights, shapes, parameters, dtype)
        except Exception as error:
            logger.warning("the loader of %s fails without values (%r)", type(model).__name__, error)
            return Places(opaque=set(shapes))


@torch.no_grad()
def adapter_reports(worker: Any, shapes: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Return one report per LoRA adapter of a worker, the latest first.

    Args:
        shapes: shapes of the adapter's tensors by their names in the format of PEFT.
    """
    reports = []
    for tensors in vllm_weights.adapter_tensors(worker, shapes):
        report = DigestReport(shapes)
        for name, tensor in tensors.items():
            if tensor is None:
                report.opaque.add(name)
            else:
                report.add_tensor(name, tensor)
        reports.append(report.result())
    return _kept(worker, reports)


def _kept(worker: Any, reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    worker.groupwise_reports = reports
    return reports


def same_reports(worker: Any, reports: Sequence[Report]) -> None:
    """Compare the latest reports of a worker with that of the same worker of its server's first engine.

    vLLM returns what the workers of the first data-parallel engine answer, or an error of any engine.

    Args:
        reports: of the workers of the first engine, by rank.

    Raises:
        ValueError: none of the worker's reports is equal; the message names tensors.
    """
    first = reports[worker.rank]
    if first in worker.groupwise_reports:
        return
    latest: Report = next(iter(worker.groupwise_reports), {})  # empty: no adapter was loaded
    names = {
        name for name, values in first["tensors"].items() if latest.get("tensors", {}).get(name) != values
    } or {"the tensors that can be compared"}
    raise ValueError(f"{DIFFERS} {', '.join(sorted(names)[:3])}")


def place_adapter(worker: Any, path: str, files: Mapping[str, str] | None = None) -> str | None:
    """Return the directory from which this worker can load a LoRA adapter; None: it needs the files.

    Args:
        path: directory of the trainer, which is used if this process can read its files.
        files: contents in base64 by file name, to write to a private directory of this server. Empty: remove
            that.

    Raises:
        ValueError: the adapter or a file has no plain name.
        PermissionError: the directory is another user's, or a link.
    """
    names = [Path(path).name, *(files or ())]
    if not all(map(_PLAIN_NAME.fullmatch, names)):
        raise ValueError(f"not plain names: {names}; allowed: letters, digits and any of _.:-")
    if files is None:
        return path if all(os.access(Path(path, name), os.R_OK) for name in ADAPTER_FILES) else None
    directory = _adapter_directory()
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.is_symlink() or directory.stat().st_uid != os.getuid():
        raise PermissionError(f"{directory} is a link, or another user's")
    own, part = directory / names[0], directory / f"{uuid.uuid4().hex}.part"
    for name, content in files.items():  # workers of one machine, threads too, write the same at once
        own.mkdir(exist_ok=True)
        part.write_bytes(b64decode(content))
        part.replace(own / name)
    if not files:
        shutil.rmtree(own, ignore_errors=True)
        with suppress(OSError):  # it has other adapters
            directory.rmdir()
    return str(own) if files else None


def _adapter_directory() -> Path:
    """Return a temporary directory whose random name all processes of a server inherit from the first one."""
    name = os.environ.setdefault("GROUPWISE_ADAPTER_DIRECTORY", f"groupwise-adapters-{uuid.uuid4().hex}")
    return Path(tempfile.gettempdir(), name)
