"""Places of a checkpoint's tensors in the parameters of an engine, and digests taken there.

An engine has other parameters than the checkpoint: q, k and v in one matrix, shards of several GPUs. Its own
loader knows where each tensor goes. It is run once without values, from and to tensors on the meta device,
and every copy is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from groupwise.compat.torch import observed_operations, storage_id
from groupwise.policy.digests import columns_of, digest_of_rows, part_digest, tensor_digest

Key = TypeVar("Key")


class Place(NamedTuple):
    """Part of a parameter and the part of a checkpoint's tensor that is loaded there, element by element."""

    name: str  # in the checkpoint
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # in the parameter
    offset: int
    own_strides: tuple[int, ...]  # in the checkpoint's tensor
    own_offset: int


@dataclass
class Places:
    """Places of all tensors of a checkpoint.

    by_parameter: places by the key of the parameter.
    shapes: shapes of the parameters by key.
    opaque: names of tensors that are transformed before they are copied, or are copied to buffers or to
        parameters with gaps.
    empty: keys of parameters that have elements without values.
    """

    by_parameter: dict[Any, list[Place]] = field(default_factory=dict)
    shapes: dict[Any, tuple[int, ...]] = field(default_factory=dict)
    opaque: set[str] = field(default_factory=set)
    empty: list[Any] = field(default_factory=list)


def find_places(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    shapes: Mapping[str, Sequence[int]],
    parameters: Mapping[Key, torch.Tensor],
    dtype: torch.dtype,
) -> Places:
    """Load a checkpoint without values, and return where its tensors go.

    Args:
        load: loader of the engine; called with (name, tensor) pairs.
        shapes: shapes of the checkpoint's tensors.
        parameters: the engine's parameters on the meta device.
    """
    found, copies, weights = Places(), _Copies(), []
    for name, shape in shapes.items():
        device = "meta" if torch.Size(shape).numel() > 1 else "cpu"  # loaders read the value of a scalar
        weights.append((name, torch.zeros(tuple(shape), dtype=dtype, device=device)))
        copies.sources[storage_id(weights[-1][1])] = name
    with observed_operations(copies.observe):
        load(iter(weights))
    keys = {storage_id(tensor): key for key, tensor in parameters.items()}
    filled = dict.fromkeys(parameters, 0)
    for storage, place in copies.places:
        if (key := keys.get(storage)) is None or not parameters[key].is_contiguous():
            found.opaque.add(place.name)
        else:
            found.by_parameter.setdefault(key, []).append(place)
            filled[key] += torch.Size(place.sizes).numel()
    for storage, count in copies.constants:
        if (key := keys.get(storage)) is not None:
            filled[key] += count
    found.shapes = {key: tuple(tensor.shape) for key, tensor in parameters.items()}
    found.empty = [key for key, tensor in parameters.items() if filled[key] < tensor.numel()]
    scalars = {name for name, shape in shapes.items() if torch.Size(shape).numel() == 1}
    found.opaque |= set().union(*copies.transformed.values()) | (
        scalars - {place.name for _, place in copies.places}
    )
    return found


class _Copies:
    """Record of the copies from known tensors.

    Attributes:
        sources: names of the known tensors by storage.
        places: (storage of the target, place) of each copy.
        constants: (storage, number of elements) of each assignment of other values.
        transformed: names by the storage of tensors that were computed from known ones.
    """

    def __init__(self) -> None:
        self.sources: dict[int, str] = {}
        self.places: list[tuple[int, Place]] = []
        self.constants: list[tuple[int, int]] = []
        self.transformed: dict[int, set[str]] = {}
        self._alive: list[torch.Tensor] = []  # the identity of a freed storage may be used again

    def observe(self, operation: str, tensors: Sequence[torch.Tensor], result: object) -> None:
        """Record an operation of torch."""
        if operation == "copy_":
            target, value = tensors
            name = self.sources.get(storage_id(value))
            if target.numel() == 0:  # this worker has no rows of a sharded tensor
                return
            if name is not None and value.shape == target.shape:
                place = Place(name, tuple(target.shape), *_geometry(target), *_geometry(value))
                self.places.append((storage_id(target), place))
            elif name is not None or storage_id(value) in self.transformed:
                self.constants.append((storage_id(target), target.numel()))
        elif operation in ("fill_", "zero_"):
            self.constants.append((storage_id(tensors[0]), tensors[0].numel()))
        elif isinstance(result, torch.Tensor) and storage_id(result) not in self.sources:
            storages = [storage_id(tensor) for tensor in tensors]
            names = {self.sources[one] for one in storages if one in self.sources}
            if names := names.union(*(self.transformed.get(one, ()) for one in storages)):
                self.transformed[storage_id(result)] = names
                self._alive.append(result)


def _geometry(tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
    return tensor.stride(), int(tensor.storage_offset())


class DigestReport:
    """Digests of an engine's weights by checkpoint name, summed over all places.

    Args:
        shapes: shapes of the checkpoint's tensors.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self.shapes = shapes
        self.opaque: set[str] = set()
        self.empty: list[str] = []
        self._tensors: dict[str, tuple[Any, int, str]] = {}  # digest, number of elements, dtype

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Add a whole tensor; it may have further rows and columns of zeros."""
        self._add(name, tensor_digest(tensor), torch.Size(self.shapes[name]).numel(), tensor.dtype)

    def add(self, places: Sequence[Place], parameter: torch.Tensor) -> None:
        """Add the places in a parameter with the axes that it was loaded with."""
        values = parameter.detach().contiguous()
        for place in places:
            part = values.as_strided(place.sizes, place.strides, values.storage_offset() + place.offset)
            columns = columns_of(self.shapes[place.name])
            try:
                digest = part_digest(part, place.own_offset, place.own_strides, columns)
            except ValueError:
                self.opaque.add(place.name)
            else:
                self._add(place.name, digest, part.numel(), values.dtype)

    def add_repacked(
        self,
        places: Sequence[Place],
        width: int,
        dtype: torch.dtype,
        read: Callable[[], torch.Tensor],
        rows_N: torch.Tensor | None,
    ) -> None:
        """Add a matrix whose values only a kernel has.

        Args:
            width: number of its columns.
            dtype: dtype in which the kernel has it.
            read: returns the matrix from its kernel.
            rows_N: digests of the rows, taken when the matrix was repacked; None: it is read.
        """
        # Rows of the matrix are rows of the checkpoint's tensors, from the first to the last column.
        aligned = all(
            place.strides == (width, 1) == place.own_strides
            and place.sizes[1] == width
            and place.offset % width == place.own_offset % width == 0
            for place in places
        )
        if rows_N is None or not aligned:
            self.add(places, read())
            return
        for place in places:
            first, count = place.offset // width, place.sizes[0]
            digest = digest_of_rows(rows_N[first : first + count], place.own_offset // width, (count,), (1,))
            self._add(place.name, digest, count * width, dtype)

    def _add(self, name: str, digest: torch.Tensor, numel: int, dtype: torch.dtype) -> None:
        before, count, held = self._tensors.get(name, (0, 0, str(dtype).removeprefix("torch.")))
        self._tensors[name] = before + digest, count + numel, held  # int64 wraps around

    def result(self) -> dict[str, Any]:
        """Return lists and plain values, for :class:`groupwise.generation.vllm.weight_check.WeightCheck`.

        ``tensors``: name: [digest, number of elements, dtype], the first two summed over all places that the
        worker computes with; ``opaque``: names that cannot be compared; ``empty``.
        """
        digests = [digest for digest, _, _ in self._tensors.values()]
        values = torch.stack(digests).tolist() if digests else []  # one transfer from the device
        tensors = {
            name: [value, count, held]
            for (name, (_, count, held)), value in zip(self._tensors.items(), values, strict=True)
        }
        return {"tensors": tensors, "opaque": sorted(self.opaque), "empty": self.empty}
