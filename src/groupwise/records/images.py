"""Image inputs of a vision-language model, stored per sequence and collated just before a forward pass."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class ExpandedSpan(NamedTuple):
    """Tokens of a sequence in which the processor expanded image tokens.

    start: first position in the sequence.
    end: position after the last one.
    token_ids: the tokens before the expansion, one image token per image.
    """

    start: int
    end: int
    token_ids: Sequence[int]


@dataclass(frozen=True)
class ImageInputs:
    """Model inputs of one sequence beside its token ids, in host memory.

    arrays: pixel values, grids and sizes by name of the model input; empty for a text-only sequence. The
        first axis is the processor's (images, tiles or patches).
    token_types: by name, one number per token from the start of the sequence; tokens beyond its end are 0
        (text).
    images: the images before processing, in order, for engines with a processor of their own. Not part of a
        checkpoint.
    spans: spans whose image tokens are expanded, in order; for the same engines.
    end: position after the last image token; 0 without images.
    """

    arrays: Mapping[str, torch.Tensor] = field(default_factory=dict)
    token_types: Mapping[str, Sequence[int]] = field(default_factory=dict)
    images: Sequence[Any] = field(default=(), metadata={"saved": False})
    spans: Sequence[ExpandedSpan] = field(default=(), metadata={"saved": False})
    end: int = 0

    @cached_property
    def digest(self) -> str:
        """Hash of the arrays; empty without images."""
        if not self.arrays:
            return ""
        found = hashlib.blake2b(digest_size=16)
        for name in sorted(self.arrays):
            array = self.arrays[name].contiguous()
            found.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
            found.update(array.reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def has_same_arrays(self, other: ImageInputs) -> bool:
        """Return True if the images are those of ``other``; completions of a prompt share one object."""
        return self is other or self.digest == other.digest

    def unexpanded(self, token_ids: Sequence[int]) -> list[int]:
        """Return the sequence with one image token per image."""
        result, end = list[int](), 0
        for span in self.spans:
            result += [*token_ids[end : span.start], *span.token_ids]
            end = span.end
        return [*result, *token_ids[end:]]

    def without_first(self, count: int) -> ImageInputs:
        """Return the inputs of the sequence without its first ``count`` tokens, which belong to no image."""
        types = {name: numbers[count:] for name, numbers in self.token_types.items()}
        spans = [
            ExpandedSpan(max(start - count, 0), end - count, token_ids[max(count - start, 0) :])
            for start, end, token_ids in self.spans
        ]
        return replace(self, token_types=types, spans=spans, end=max(self.end - count, 0))

    def followed_by(self, other: ImageInputs, start: int) -> ImageInputs:
        """Append the image inputs of tokens that begin at position ``start`` of the sequence."""
        arrays = {
            name: _concatenate([part.arrays[name] for part in (self, other) if name in part.arrays])
            for name in dict.fromkeys([*self.arrays, *other.arrays])
        }
        types = {}
        for name in dict.fromkeys([*self.token_types, *other.token_types]):
            own = list(self.token_types.get(name, ()))[:start]
            types[name] = [*own, *[0] * (start - len(own)), *other.token_types.get(name, ())]
        moved = [ExpandedSpan(first + start, end + start, ids) for first, end, ids in other.spans]
        last = start + other.end if other.arrays else self.end
        return ImageInputs(arrays, types, [*self.images, *other.images], [*self.spans, *moved], last)


def has_images(rows: Sequence[ImageInputs] | None) -> bool:
    """Return True if a row has an image."""
    return any(row.arrays for row in rows or ())


def join_images(
    rows: Sequence[ImageInputs], starts: Sequence[int], width: int, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Collate the image inputs of a batch.

    Arrays are concatenated in row order, their other axes zero-padded to a common size; models read the real
    sizes from grids, sizes or masks among the arrays.

    Args:
        rows: image inputs, B.
        starts: column of each row's first token, B.
        width: columns of the batch.

    Returns:
        arrays by name, and token types (B, width) by name; no arrays if no row has an image.
    """
    joined = {
        name: _concatenate([row.arrays[name] for row in rows if name in row.arrays]).to(device)
        for name in dict.fromkeys(name for row in rows for name in row.arrays)
    }
    for name in dict.fromkeys(name for row in rows for name in row.token_types):
        types = torch.zeros(len(rows), width, dtype=torch.long)
        for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
            numbers = torch.tensor(row.token_types.get(name, ()), dtype=torch.long)[: width - start]
            types[index, start : start + len(numbers)] = numbers
        joined[name] = types.to(device)
    return joined


def _concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    sizes = torch.tensor([part.shape[1:] for part in parts]).amax(0).tolist() if parts[0].ndim > 1 else []
    padded = []
    for part in parts:
        gaps = [size - own for size, own in zip(sizes, part.shape[1:], strict=True)]
        padded.append(F.pad(part, [n for gap in reversed(gaps) for n in (0, gap)]) if any(gaps) else part)
    return torch.cat(padded)
