"""Digests of weights, by which trainer and engines compare all values without moving them.

The digest of a tensor with C columns (its last axis; the axes before it are rows) is

    D = Σ_i u_i Σ_j v_j b_ij   modulo 2^64

b_ij: the bits of element (i, j) as float32, read as a signed 32-bit integer; -0 counts as 0. u, v: fixed
pseudo-random odd numbers of 64 bits. Integers are summed, so D is the same on every device and in any order,
and the digests of parts of a tensor add up to D: of the rows of a fused matrix, of the shards of several
GPUs. Conversion to float32 is exact for narrower types: a bfloat16 tensor and a float32 tensor with the same
values have equal digests.

A change of one element always changes D: u_i v_j is odd, and the difference of two b is less than 2^32. For
other changes, let 2^k be the largest power of 2 that divides all differences, k < 32. For random u and v, the
sums of the rows with a difference are uniform among multiples of at least 2^k, and so is D in turn. The
probability that D stays the same is largest if only sign bits change (k = 31), and is then below 2^-26.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from groupwise.errors import BackendError

logger = logging.getLogger(__name__)

_ROW, _COLUMN = 0x2545F4914F6CDD1D, 0x1B873593CC9E2D51  # seeds of u and v
_MIX_1, _MIX_2 = 0x3F58476D1CE4E5B9, 0x14D049BB133111EB
_MODULUS = 2**64

#: Elements that are multiplied at a time: within the cache of a CPU core, and enough to occupy a GPU.
_CHUNK = {"cpu": 2**17}
_CHUNK_ON_DEVICE = 2**24

#: Columns of a matrix that an engine reads back through its kernel in one sync.
NUM_SAMPLED = 16

#: Tensors of a report: name: [digest, number of elements, dtype]; digest and number are sums over all places
#: that a worker computes with.
Report = Mapping[str, Any]


def position_weights(index: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the odd pseudo-random int64 weight of each position in ``index``."""
    mixed = (index + seed) * _MIX_1
    mixed = (mixed ^ (mixed >> 31)) * _MIX_2
    return (mixed ^ (mixed >> 29)) | 1


@lru_cache(maxsize=64)  # a model has few shapes
def _weights(
    first: int, sizes: tuple[int, ...], steps: tuple[int, ...], device: torch.device, seed: int
) -> torch.Tensor:
    """Return the weights of the positions along axes of these sizes and steps, flat."""
    positions = torch.tensor(first, device=device)
    for size, step in zip(sizes, steps, strict=True):
        positions = positions.unsqueeze(-1) + torch.arange(size, device=device) * step
    return position_weights(positions.flatten(), seed)


def row_digests(matrix: torch.Tensor, first_column: int = 0) -> torch.Tensor:
    """Return Σ_j v_j b_ij of the rows of a matrix (R, C) as (R,) int64; v begins at ``first_column``."""
    num_rows, num_columns = matrix.shape
    weights_C = _weights(first_column, (num_columns,), (1,), matrix.device, _COLUMN)
    sums_R = torch.empty(num_rows, dtype=torch.int64, device=matrix.device)
    step = max(1, _CHUNK.get(matrix.device.type, _CHUNK_ON_DEVICE) // max(num_columns, 1))
    rows = min(step, num_rows)
    floats = torch.empty(rows, num_columns, dtype=torch.float32, device=matrix.device)
    products = torch.empty(rows, num_columns, dtype=torch.int64, device=matrix.device)
    for start in range(0, num_rows, step):
        part = matrix[start : start + step]
        product = products[: len(part)]
        if part.is_floating_point():
            part = torch.add(part, 0.0, out=floats[: len(part)]).view(torch.int32)  # -0 + 0 = 0
        torch.sum(product.copy_(part).mul_(weights_C), 1, out=sums_R[start : start + step])
    return sums_R


def digest_of_rows(
    sums_R: torch.Tensor, first: int, sizes: tuple[int, ...], steps: tuple[int, ...]
) -> torch.Tensor:
    """Return Σ_i u_i s_i, an int64 scalar, for row digests s.

    Args:
        first: index of the first row.
        sizes, steps: of the axes that the rows are made of, flattened; steps count rows.
    """
    return (sums_R * _weights(first, sizes, steps, sums_R.device, _ROW)).sum()


def part_digest(values: torch.Tensor, offset: int, strides: Sequence[int], num_columns: int) -> torch.Tensor:
    """Return what part of a tensor adds to its digest, as an int64 scalar.

    Args:
        values: elements of the part, with any axes and strides.
        offset: position of the first element in the tensor, flattened.
        strides: distance of positions per axis of ``values``.
        num_columns: C of the tensor.

    Raises:
        ValueError: the part is not made of whole ranges of rows and columns.
    """
    axes = sorted((axis for axis in range(values.dim()) if values.shape[axis] > 1), key=lambda a: -strides[a])
    steps = [strides[axis] for axis in axes]
    first_row, first_column = divmod(offset, num_columns)
    view = values.permute(*axes, *(a for a in range(values.dim()) if a not in axes)).reshape(
        [values.shape[axis] for axis in axes]
    )
    if not steps or steps[-1] != 1:
        view, steps = view.unsqueeze(-1), [*steps, 1]
    if view.shape[-1] > num_columns and first_column == 0 and view.shape[-1] % num_columns == 0:
        view, steps = view.unflatten(-1, (-1, num_columns)), [*steps[:-1], num_columns, 1]
    if first_column + view.shape[-1] > num_columns or any(step % num_columns for step in steps[:-1]):
        raise ValueError(f"no ranges of rows and columns: offset {offset}, strides {tuple(strides)}")
    sums_R = row_digests(view.reshape(-1, view.shape[-1]), first_column)
    row_steps = tuple(step // num_columns for step in steps[:-1])
    return digest_of_rows(sums_R, first_row, tuple(view.shape[:-1]), row_steps)


def tensor_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the digest of a whole tensor as an int64 scalar on its device."""
    strides = torch.empty(tensor.shape, device="meta").stride()
    return part_digest(tensor, 0, strides, columns_of(tensor.shape))


def columns_of(shape: Sequence[int]) -> int:
    """Return C of a tensor: the size of its last axis."""
    return max(shape[-1], 1) if len(shape) else 1


def sampled_columns(sync: int, num_columns: int) -> range:
    """Return the columns that are read back in a sync; consecutive syncs cover all of them."""
    first = sync % -(-num_columns // NUM_SAMPLED) * NUM_SAMPLED
    return range(first, min(first + NUM_SAMPLED, num_columns))


@dataclass(frozen=True)
class _Own:
    """Digests of one of the trainer's tensors.

    by_dtype: int64 scalars by the dtype that an engine rounds it to, and "" for one that does not round it,
        if there may be one.
    sampled: of the columns :func:`sampled_columns` by dtype; empty for a vector.
    num_sampled: number of their elements.
    """

    shape: tuple[int, ...]
    numel: int
    by_dtype: Mapping[str, torch.Tensor]
    sampled: Mapping[str, torch.Tensor]
    num_sampled: int


@dataclass
class WeightDigests:
    """Digests of all tensors of a sync on the trainer's side.

    Args:
        dtypes: names of the dtypes that the engines compute in.
        sync: number of the sync, which chooses the columns that are read back.
        base: digest of the weights below an adapter.
        scales: factors by name that an engine multiplies a tensor with after it has rounded it.
        unrounded: names of tensors that an engine holds in a wider dtype than its own; None: not known yet.

    Attributes:
        wider: names of those that are, by the reports of :meth:`check`.
    """

    dtypes: Sequence[str]
    sync: int = 0
    base: str = ""
    scales: Mapping[str, float] = field(default_factory=dict)
    unrounded: Collection[str] | None = None
    wider: set[str] = field(default_factory=set)
    own: dict[str, _Own] = field(default_factory=dict)

    @torch.no_grad()
    def recorded(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over ``weights`` and record the digest of each.

        Raises:
            BackendError: a name occurs twice.
        """
        for name, tensor in weights:
            if name in self.own:
                raise BackendError(f"the policy has two tensors named {name}; an engine would load only one")
            self.own[name] = self._digests(name, tensor.detach())
            yield name, tensor

    def _digests(self, name: str, tensor: torch.Tensor) -> _Own:
        by_dtype: dict[str, torch.Tensor] = {}
        sampled: dict[str, torch.Tensor] = {}
        scale = self.scales.get(name, 1.0)
        columns = sampled_columns(self.sync, columns_of(tensor.shape))
        for dtype in self.dtypes:
            value = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
            value = value if scale == 1 else value * scale
            by_dtype[dtype] = tensor_digest(value)
            if tensor.dim() == 2:
                part = value[:, columns.start : columns.stop]
                sampled[dtype] = part_digest(part, columns.start, (tensor.shape[1], 1), tensor.shape[1])
            if value.dtype.itemsize >= tensor.dtype.itemsize and scale == 1:
                by_dtype[""] = by_dtype[dtype]  # not rounded
        if "" not in by_dtype and (self.unrounded is None or name in self.unrounded):
            by_dtype[""] = tensor_digest(tensor if scale == 1 else tensor * scale)
        num_sampled = tensor.numel() // columns_of(tensor.shape) * len(columns)
        return _Own(tuple(tensor.shape), tensor.numel(), by_dtype, sampled, num_sampled)

    def shapes(self) -> dict[str, list[int]]:
        """Return the shapes of the tensors by name."""
        return {name: list(own.shape) for name, own in self.own.items()}

    def combined(self) -> str:
        """Return one digest of all tensors with their names: 16 hexadecimal digits."""
        digest = hashlib.blake2b(self.base.encode(), digest_size=8)
        values = torch.stack([own.by_dtype[self.dtypes[0]] for own in self.own.values()]).tolist()
        for name, value in sorted(zip(self.own, values, strict=True)):
            digest.update(f"{name} {value} ".encode())
        return digest.hexdigest()

    def check(self, engine: str, dtype: str, reports: Sequence[Report]) -> None:
        """Compare with the reports of all workers of an engine.

        Args:
            engine: name of the engine, for messages.
            dtype: the dtype that it computes in.
            reports: see :meth:`groupwise.policy.weight_places.DigestReport.result`.

        Raises:
            BackendError: a tensor has other values, another dtype, or is missing, with its name.
        """
        opaque = {name for report in reports for name in report["opaque"]}
        for report in reports:
            self.wider |= {name for name, (_, _, held) in report["tensors"].items() if held != dtype}
        if opaque and self.sync == 0:
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
    copies, rest = divmod(sum(count for _, count, _ in found), own.numel)
    if rest or not copies:
        return "was loaded in part"
    digest = own.by_dtype.get(dtype if held == expected else "")
    if digest is None:
        return f"is held in {found[0][2]}, and was held in {dtype} before"
    if (sum(part for part, _, _ in found) - copies * digest.item()) % _MODULUS:
        return "has other values"
    read = [report["sampled"][name] for report in reports if name in report["sampled"]]
    if not read:
        return ""
    copies = sum(count for _, count in read) // own.num_sampled
    if (sum(part for part, _ in read) - copies * own.sampled[dtype].item()) % _MODULUS:
        return "has other values in the copy that its kernel reads"
    return ""


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:3]) + (", ..." if len(texts) > 3 else "")
