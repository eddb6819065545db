"""Comparison of the trainer's weights with those that vLLM's workers compute with, in the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from groupwise.errors import BackendError
from groupwise.generation.vllm.plugin import ADAPTERS, WEIGHTS
from groupwise.policy.digests import Report, WeightDigests
from groupwise.policy.weight_iterator import LoRAWeights

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
