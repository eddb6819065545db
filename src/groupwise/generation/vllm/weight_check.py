"""Comparison of the trainer's weights with those that engines compute with, by their digests."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from groupwise.errors import BackendError
from groupwise.policy.digests import tensor_digest
from groupwise.policy.weight_iterator import LoRAWeights

logger = logging.getLogger(__name__)

_MODULUS = 2**64

#: See :meth:`groupwise.generation.vllm.weight_places.DigestReport.result`.
Report = Mapping[str, Any]

#: Asks all workers for a report of their weights, or if the first argument is True for one of each of their
#: adapters, the latest first. Returns (engine, dtype, reports of each worker) of each engine.
Fetch = Callable[[bool, dict[str, Any]], Iterable[tuple[str, str, list[list[Report]]]]]


@dataclass(frozen=True)
class _Own:
    """Digests of one of the trainer's tensors.

    by_dtype: int64 scalars by the dtype that an engine rounds it to, and "" for one that does not round it.
    """

    shape: torch.Size
    by_dtype: Mapping[str, torch.Tensor]


class WeightCheck:
    """Comparison of the trainer's weights with those of all engines after each sync.

    Args:
        mode: ``vllm_weight_check``.
        dtypes: names of the dtypes that the engines compute in.
        fetch: see :data:`Fetch`.
        compare_others: called with the name of an engine that has the weights and the reports of its workers;
            raises a BackendError if a data-parallel copy of it has others. None: there are no copies.

    Attributes:
        done: the engines were compared since they started.
        num_syncs: number of compared syncs.
        base: digest of the weights below an adapter.
        own: digests of the tensors of this sync; empty if it is not to be compared.
    """

    def __init__(
        self,
        mode: str,
        dtypes: Sequence[str],
        fetch: Fetch,
        compare_others: Callable[[str, Sequence[Report]], None] | None = None,
    ) -> None:
        self.mode, self.dtypes, self.fetch = mode, tuple(dict.fromkeys(dtypes)), fetch
        self.compare_others = compare_others
        self.done, self.num_syncs, self.base = False, 0, ""
        self.own: dict[str, _Own] = {}

    @property
    def needs_base(self) -> bool:
        """True if the weights below an adapter were not compared since the engines started."""
        return self.mode != "off" and not self.done

    def record(
        self, weights: Iterable[tuple[str, torch.Tensor]], scales: Mapping[str, float] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the weights of a sync and take their digests, if it is to be compared.

        Args:
            scales: of an adapter: factors by name that an engine multiplies tensors with after rounding them.

        Raises:
            BackendError: a name occurs twice.
        """
        self.own = {}  # of this pass: a source may begin another one for its metadata, before it reads this
        if self.mode == "off" or (self.mode == "first" and self.done):
            return iter(weights)
        return self._record(weights, self.own, scales or {})

    @torch.no_grad()
    def _record(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        found: dict[str, _Own],
        scales: Mapping[str, float],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name in found:
                raise BackendError(f"the policy has two tensors named {name}; an engine would load only one")
            value, scale = tensor.detach(), scales.get(name, 1.0)
            by_dtype = {"": tensor_digest(value if scale == 1 else value * scale)}
            for dtype in self.dtypes:
                rounded = value.to(getattr(torch, dtype)) if value.is_floating_point() else value
                if rounded is value:
                    by_dtype[dtype] = by_dtype[""]
                else:
                    by_dtype[dtype] = tensor_digest(rounded if scale == 1 else rounded * scale)
            found[name] = _Own(value.shape, by_dtype)
            yield name, tensor

    def compare(self, *, adapter: bool = False) -> str | None:
        """Compare the recorded weights with those of all engines.

        Args:
            adapter: they are an adapter's: one of those that each worker has must be equal.

        Returns:
            the digest of all tensors with their names, 16 hexadecimal digits; None if nothing was recorded.

        Raises:
            BackendError: an engine has other weights.
        """
        if not self.own:
            return None
        shapes = {name: list(own.shape) for name, own in self.own.items()}
        for engine, dtype, of_workers in self.fetch(adapter, {"shapes": shapes}):
            failures = [BackendError(f"{engine} has no adapter")]
            for reports in zip(*of_workers, strict=True):
                try:
                    self._check(engine, dtype, reports)
                    break
                except BackendError as failure:
                    failures.append(failure)
            else:
                raise failures[:2][-1]  # of the latest adapter
            if self.compare_others is not None:
                self.compare_others(engine, reports)
        digest = hashlib.blake2b(self.base.encode(), digest_size=8)
        values = torch.stack([own.by_dtype[self.dtypes[0]] for own in self.own.values()]).tolist()
        for name, value in sorted(zip(self.own, values, strict=True)):
            digest.update(f"{name} {value} ".encode())
        self.num_syncs, self.own = self.num_syncs + 1, {}
        return digest.hexdigest()

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
        return self.compare(adapter=True)

    def _check(self, engine: str, dtype: str, reports: Sequence[Report]) -> None:
        """Compare with a report of each worker of an engine."""
        opaque = {name for report in reports for name in report["opaque"]}
        if opaque and self.num_syncs == 0:
            logger.warning(
                "%d of %d tensors of %s cannot be compared, because it transforms them in loading them: %s",
                *(len(opaque), len(self.own), engine, _some(sorted(opaque))),
            )
        problems = [
            f"{name} {problem}"
            for name, own in self.own.items()
            if name not in opaque and (problem := _problem(name, own, dtype, reports))
        ]
        problems += [f"{name} got no weights" for report in reports for name in report["empty"]]
        if problems:
            raise BackendError(
                f"{engine} does not compute with the trainer's weights: {_some(problems)} ({len(problems)} "
                f"problems, {len(self.own)} tensors). Its completions would be those of another model; "
                "vllm_weight_check='off' skips the comparison"
            )


def _problem(name: str, own: _Own, dtype: str, reports: Sequence[Report]) -> str:
    found = [report["tensors"][name] for report in reports if name in report["tensors"]]
    if not found:
        return "was not loaded"
    held, expected = (getattr(torch, one) for one in (found[0][2], dtype))
    if held.is_floating_point and held != expected and held.itemsize <= expected.itemsize:
        return f"is held in {found[0][2]}, not in {dtype}"
    copies, rest = divmod(sum(count for _, count, _ in found), own.shape.numel())
    if rest or not copies:
        return "was loaded in part"
    digest = own.by_dtype[dtype if held == expected else ""]
    if (sum(part for part, _, _ in found) - copies * digest.item()) % _MODULUS:
        return "has other values"
    return ""


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:3]) + (", ..." if len(texts) > 3 else "")
