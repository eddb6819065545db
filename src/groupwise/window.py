"""An accumulation window cut anew: without rows that have no gradient, in micro-batches of about equal cost.

The weights of all tokens are known by then, so neither changes the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from groupwise.core.metrics import Mean, Metrics
from groupwise.core.partition import balanced_parts
from groupwise.layout.stream import Shape, shape_of
from groupwise.stages import TrainBatch


@dataclass(frozen=True)
class Cut:
    """How a window may be cut.

    fixed: not at all.
    rows: sequences that a micro-batch may have by the configuration.
    completion_length: tokens that a completion may have by the configuration.
    skip_zero_advantage: rows whose advantages are zero have no gradient.
    """

    fixed: bool
    rows: int
    completion_length: int
    skip_zero_advantage: bool


@dataclass(frozen=True)
class WindowWork:
    """How much of a window there was, and how much of it was computed; on this rank.

    rows, skipped_rows: sequences, and those left out.
    tokens: prompt and completion tokens of all rows.
    computed_tokens: tokens that go through the model, padding included, prompts as often as computed.
    padding: padding among those.
    """

    rows: int = 0
    skipped_rows: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    padding: int = 0

    def metrics(self) -> Metrics:
        return {
            "skipped_share": Mean(float(self.skipped_rows), float(self.rows)),
            "padding_share": Mean(float(self.padding), float(self.computed_tokens)),
        }


def recut(
    window: Sequence[TrainBatch], layout: str, cut: Cut, most: Callable[[int], int] = int
) -> tuple[list[TrainBatch | None], WindowWork]:
    """As many micro-batches as before, of which the first are None where fewer suffice.

    Without padding, a micro-batch takes as many tokens as the configured number of rows has at their
    greatest length: that is what it was given memory for. Completions of a prompt stay together as far as
    that allows.

    Args:
        window: micro-batches with advantages and weights.
        layout: what will compute them.
        most: the largest of all ranks' numbers; every rank runs as many forward passes, at least one.

    Returns:
        the micro-batches, and what was saved.
    """
    batch = TrainBatch.concatenate(window)
    shape = shape_of(batch)
    everything = list(range(len(batch)))
    if cut.fixed:
        whole = [everything[start : start + len(window[0])] for start in everything[:: len(window[0])]]
        return list(window), _work(shape, everything, whole, "padded")
    rows = _rows_with_gradient(batch, cut.skip_zero_advantage)
    plan = {"padded": _by_length, "packed": _by_tokens, "shared_prefix": _by_groups}[layout]
    parts = plan(shape, rows, cut, len(window), most)
    # A rank without rows still takes part in every forward, with a row that counts for nothing.
    idle = _weightless(batch.select([_shortest(shape)]))
    batches = [batch.select(part) if part else idle for part in parts]
    # What is averaged over windows counts a window as one, however much of it was skipped.
    missing = batch.share_B1.sum() - sum(part.share_B1.sum() for part in batches)  # type: ignore[union-attr]
    batches[-1] = _with_share(batches[-1], missing)
    return [None] * (len(window) - len(batches)) + batches, _work(shape, rows, parts, layout)


def _work(shape: Shape, rows: list[int], parts: list[list[int]], layout: str) -> WindowWork:
    real = _tokens(shape, range(len(shape.prompts)))
    counts = {"skipped_rows": len(shape.prompts) - len(rows), "rows": len(shape.prompts), "tokens": real}
    if layout == "padded":
        computed = sum(shape.padded_tokens(part) for part in parts)
        return WindowWork(**counts, computed_tokens=computed, padding=computed - _tokens(shape, rows))
    if layout == "packed":
        return WindowWork(**counts, computed_tokens=_tokens(shape, rows))
    return WindowWork(**counts, computed_tokens=sum(shape.shared_tokens(part) for part in parts))


def _rows_with_gradient(batch: TrainBatch, skip_zero_advantage: bool) -> list[int]:
    counts_BC = batch.loss_mask_BC
    if skip_zero_advantage:
        assert batch.advantages_BX is not None
        counts_BC = (batch.advantages_BX != 0) & counts_BC.bool()
    return counts_BC.any(-1).nonzero().flatten().tolist()


def _by_length(
    shape: Shape, rows: list[int], cut: Cut, available: int, most: Callable[[int], int]
) -> list[list[int]]:
    """Rows of similar length together, at most the configured number: least padding."""
    count = max(most(-(-len(rows) // cut.rows)), 1)
    longest_first = sorted(rows, key=lambda row: (-shape.prompts[row] - shape.completions[row], row))
    size, larger = divmod(len(rows), count)
    ends = [sum(size + (part < larger) for part in range(done)) for done in range(count + 1)]
    return [sorted(longest_first[start:end]) for start, end in pairwise(ends)]


def _by_tokens(
    shape: Shape, rows: list[int], cut: Cut, available: int, most: Callable[[int], int]
) -> list[list[int]]:
    return _balanced(shape, [[row] for row in rows], cut, available, most)


def _by_groups(
    shape: Shape, rows: list[int], cut: Cut, available: int, most: Callable[[int], int]
) -> list[list[int]]:
    """Whole groups where they fit, else as few parts of them as fit."""
    kept = set(rows)
    pieces: list[list[int]] = []
    for group in shape.groups():
        piece: list[int] = []
        for row in (row for row in group if row in kept):
            if piece and _piece_cost(shape, [*piece, row]) > _capacity(shape, cut):
                pieces.append(piece)
                piece = []
            piece.append(row)
        pieces += [piece] if piece else []
    return _balanced(shape, pieces, cut, available, most)


def _balanced(
    shape: Shape, pieces: list[list[int]], cut: Cut, available: int, most: Callable[[int], int]
) -> list[list[int]]:
    """The fewest parts that hold the pieces, made about equal."""
    costs = [_piece_cost(shape, piece) for piece in pieces]
    capacity = _capacity(shape, cut)
    count = max(-(-sum(costs) // capacity), 1)
    while count < available and _largest(balanced_parts(costs, count), costs) > capacity:
        count += 1
    count = max(most(min(count, available)), 1)
    parts = balanced_parts(costs, count)
    return [sorted(row for index in part for row in pieces[index]) for part in parts]


def _piece_cost(shape: Shape, piece: Sequence[int]) -> int:
    """Tokens of rows that share a prompt."""
    return shape.prompts[piece[0]] + sum(shape.completions[row] for row in piece)


def _capacity(shape: Shape, cut: Cut) -> int:
    return cut.rows * (max(shape.prompts) + cut.completion_length)


def _largest(parts: Sequence[Sequence[int]], costs: Sequence[int]) -> int:
    return max(sum(costs[index] for index in part) for part in parts)


def _tokens(shape: Shape, rows: Sequence[int]) -> int:
    return sum(shape.prompts[row] + shape.completions[row] for row in rows)


def _shortest(shape: Shape) -> int:
    return min(range(len(shape.prompts)), key=lambda row: shape.prompts[row] + shape.completions[row])


def _weightless(batch: TrainBatch) -> TrainBatch:
    """The batch with every weight, mask and share zero: no gradient, no metric."""
    zeroed = ("loss_mask_BC", "weights_BC", "keep_BC", "entropy_weights_BC", "share_B1")
    tensors = batch.tensors()
    return replace(batch, **{name: torch.zeros_like(tensors[name]) for name in zeroed if name in tensors})


def _with_share(batch: TrainBatch, missing: torch.Tensor) -> TrainBatch:
    assert batch.share_B1 is not None
    share_B1 = batch.share_B1.clone()
    share_B1[0] += missing
    return replace(batch, share_B1=share_B1)
