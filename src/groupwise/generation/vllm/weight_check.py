"""Comparison of the trainer's weights with those that vLLM's workers compute with.

:class:`WeightCheck` runs in the trainer, the reports inside vLLM's workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from groupwise.compat import vllm_weights
from groupwise.errors import BackendError
from groupwise.policy.digests import Report, WeightDigests, row_digests
from groupwise.policy.weight_iterator import LoRAWeights
from groupwise.policy.weight_places import DigestReport, Places, find_places

logger = logging.getLogger(__name__)

#: Methods of the workers, for ``collective_rpc``.
WEIGHTS, ADAPTERS, SAME = "groupwise_weight_report", "groupwise_adapter_reports", "groupwise_same_reports"

#: Begins the message of :func:`same_reports`.
DIFFERS = "it differs from the first data-parallel engine in"

#: Calls a method of all workers; returns (engine, dtype, answers of its workers) of each engine.
Call = Callable[[str, dict[str, Any]], Iterable[tuple[str, str, list[Any]]]]


class WeightCheck:
    """Comparison of the trainer's weights with those of all engines after each sync.

    Args:
        mode: ``vllm_weight_check``.
        dtypes: names of the dtypes that the engines compute in.
        call: see :data:`Call`.
        compare_others: called with the name of an engine that has the weights and the reports of its workers;
            raises a BackendError if a data-parallel copy of it has others. None: there are no copies.

    Attributes:
        done: the engines were compared since they started.
    """

    def __init__(
        self,
        mode: str,
        dtypes: Sequence[str],
        call: Call,
        compare_others: Callable[[str, Sequence[Report]], None] | None = None,
    ) -> None:
        self.mode, self.dtypes, self.call = mode, tuple(dict.fromkeys(dtypes)), call
        self.compare_others = compare_others
        self.done = False
        self.num_syncs = 0
        self.base = ""  # digest of the weights below an adapter
        self._sent: WeightDigests | None = None
        self._unrounded: set[str] = set()  # see WeightDigests

    @property
    def needs_base(self) -> bool:
        """True if the weights below an adapter were not compared since the engines started."""
        return self.mode != "off" and not self.done

    def record(
        self, weights: Iterable[tuple[str, torch.Tensor]], scales: Mapping[str, float] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the weights of a sync and take their digests, if it is to be compared."""
        due = self.mode == "every_sync" or (self.mode == "first" and not self.done)
        self._sent = WeightDigests(self.dtypes, self.num_syncs, self.base, scales or {}) if due else None
        if self._sent is None:
            return iter(weights)
        self._sent.unrounded = self._unrounded if scales is None and self.done else None
        return self._sent.recorded(weights)

    def compare(self, method: str = WEIGHTS) -> str | None:
        """Compare recorded weights with those of all engines.

        Args:
            method: of the workers; one of the reports that each returns must have the values.

        Returns:
            the digest of all tensors; None if nothing was recorded.

        Raises:
            BackendError: an engine has other weights.
        """
        sent, self._sent = self._sent, None
        if sent is None:
            return None
        for engine, dtype, of_workers in self.call(method, {"shapes": sent.shapes(), "sync": sent.sync}):
            failures = [BackendError(f"{engine} has no adapter")]
            for reports in zip(*of_workers, strict=True):
                try:
                    sent.check(engine, dtype, reports)
                    break
                except BackendError as failure:
                    failures.append(failure)
            else:
                raise failures[:2][-1]  # of the latest adapter
            if self.compare_others is not None:
                self.compare_others(engine, reports)
        self.num_syncs, self._unrounded = self.num_syncs + 1, sent.wider
        return sent.combined()

    def compare_base(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Compare the weights below an adapter."""
        self.base = ""
        for _ in self.record(weights):
            pass
        self.base = self.compare() or ""

    def compare_adapter(self, adapter: LoRAWeights) -> str | None:
        """Compare an adapter. See :meth:`compare`."""
        for _ in self.record(adapter.tensors.items(), adapter.scaling):
            pass
        return self.compare(ADAPTERS)


@torch.no_grad()
def weight_report(worker: Any, shapes: Mapping[str, Sequence[int]], sync: int) -> list[dict[str, Any]]:
    """Return one report: the digests of a worker's weights by checkpoint name, without adapters.

    Args:
        shapes: shapes of the checkpoint's tensors.
        sync: chooses the columns that are read back from kernels with repacked weights.

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
                if key == (path, name) and tuple(parameter.shape) == shape:
                    report.add(own, parameter)
                elif kernel is None and key == (path, name):
                    report.opaque.update(place.name for place in own)
                if kernel is not None:
                    rows_N = getattr(kernel, "row_digests", None)
                    read = vllm_weights.kernel_reader(module, kernel, shape[1])
                    report.add_repacked(own, (shape[0], shape[1]), read, rows_N, sync)
    return _kept(worker, [report.result()])


def _find_places(model: Any, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> Places:
    with vllm_weights.on_meta_device(model) as parameters:
        try:
            return find_places(model.load_weights, shapes, parameters, dtype)
        except Exception as error:
            logger.warning("the loader of %s fails without values (%r)", type(model).__name__, error)
            return Places(opaque=set(shapes))


@torch.no_grad()
def adapter_reports(worker: Any, shapes: Mapping[str, Sequence[int]], sync: int) -> list[dict[str, Any]]:
    """Return one report per LoRA adapter of a worker, the latest first.

    Args:
        shapes: shapes of the adapter's tensors by their names in the format of PEFT.
        sync: without effect, as all values can be read.
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
        name
        for part in ("tensors", "sampled")
        for name, values in first[part].items()
        if latest.get(part, {}).get(name) != values
    } or {"the tensors that can be compared"}
    raise ValueError(f"{DIFFERS} {', '.join(sorted(names)[:3])}")
