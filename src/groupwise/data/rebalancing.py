"""An accumulation window cut anew: without rows that have no gradient, in micro-batches of about equal cost.

The weights of all tokens are known by then, so neither changes the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from groupwise.core.metrics import Mean, Metrics
from groupwise.core.partition import balanced_parts
from groupwise.policy.layouts.packed import Shape, shape_of
from groupwise.records import MicroBatch, TokenBatch

_CACHE_TOKENS = 1024  # of a part on a CPU, unless one group has more


@dataclass(frozen=True)
class MicroBatchBudget:
    """How a window may be cut.

    fixed: not at all.
    rows: sequences that a micro-batch may have by the configuration.
    completion_length: tokens that a completion may have by the configuration.
    skip_zero_advantage: rows whose advantages are zero have no gradient.
    ranks, rank: processes that share the rows, and which of them this is.
    """

    fixed: bool
    rows: int
    completion_length: int
    skip_zero_advantage: bool
    ranks: int = 1
    rank: int = 0


@dataclass(frozen=True)
class WindowStats:
    """How much of a window there was, and how much of it was computed: this rank's share.

    rows, skipped_rows: sequences, and those left out.
    tokens: prompt and completion tokens of all rows.
    computed_tokens: tokens that go through the model, padding included, prompts as often as computed.
    padding: padding among those.
    """

    rows: float = 0
    skipped_rows: float = 0
    tokens: float = 0
    computed_tokens: int = 0
    padding: int = 0

    def metrics(self) -> Metrics:
        return {
            "skipped_share": Mean(self.skipped_rows, self.rows),
            "padding_share": Mean(float(self.padding), float(self.computed_tokens)),
        }


def rebalance(
    window: Sequence[MicroBatch],
    layout: str,
    cut: MicroBatchBudget,
    join: Callable[[MicroBatch], MicroBatch] = lambda batch: batch,
) -> tuple[list[MicroBatch | None], WindowStats]:
    """As many micro-batches as before, of which the first are None where fewer suffice.

    Rows move between ranks, so that all of them have about the same to do in every micro-batch. Without
    padding, a micro-batch takes as many tokens as the configured number of rows has at their greatest length:
    that is what it was given memory for. Completions of a prompt stay together as far as that allows.

    Args:
        window: this rank's micro-batches, with advantages and weights.
        layout: what will compute them.
        join: this rank's rows to those of all ranks in rank order.

    Returns:
        this rank's micro-batches, and what was saved.
    """
    batch = MicroBatch.concatenate(window)
    batch = batch if cut.fixed else join(batch)
    shape = shape_of(batch)
    everything = list(range(len(batch)))
    if cut.fixed:
        whole = [everything[start : start + len(window[0])] for start in everything[:: len(window[0])]]
        return list(window), _work(shape, everything, whole, "padded", 1)
    rows = _rows_with_gradient(batch.loss_mask_BT, batch.advantages_BX, cut.skip_zero_advantage)
    plan = {"padded": _by_length, "packed": _by_tokens, "shared_prefix": _by_groups}[layout]
    # Neighbours in the plan cost about the same: they become the same micro-batch of different ranks.
    parts = plan(shape, rows, cut, len(window))[cut.rank :: cut.ranks]
    # A rank without rows still takes part in every forward, with a row that counts for nothing.
    batches = [
        batch.select(part) if part else _weightless(batch.select([_shortest(shape)])) for part in parts
    ]
    if cut.rank == 0:
        # What is averaged over windows counts a window as one, however much of it was skipped.
        computed = set(rows)
        skipped = [row for row in everything if row not in computed]
        batches[-1] = _with_share(batches[-1], batch.sequence_weight_B1[skipped].sum())  # type: ignore[index]
    return [None] * (len(window) - len(batches)) + batches, _work(shape, rows, parts, layout, cut.ranks)


def _work(shape: Shape, rows: list[int], parts: list[list[int]], layout: str, ranks: int) -> WindowStats:
    """Rows and tokens are those of all ranks, shared evenly; what is computed is this rank's."""
    tokens = _tokens(shape, range(len(shape.prompts))) / ranks
    own = [row for part in parts for row in part]
    computed = {
        "padded": sum(shape.padded_tokens(part) for part in parts),
        "packed": _tokens(shape, own),
        "shared_prefix": sum(shape.shared_tokens(part) for part in parts),
    }[layout]
    padding = computed - _tokens(shape, own) if layout == "padded" else 0
    total = len(shape.prompts)
    return WindowStats(total / ranks, (total - len(rows)) / ranks, tokens, computed, padding)


def cache_sized(batch: MicroBatch, layout: str) -> list[MicroBatch]:
    """Parts of a micro-batch whose activations a processor's cache holds better, without computing more.

    A CPU gains nothing from more rows in a product than these have, and writes less to memory.
    """
    shape = shape_of(batch)
    groups = shape.groups() if layout == "shared_prefix" else [[row] for row in range(len(batch))]
    parts: list[list[int]] = []
    room = 0
    for group in groups:
        cost = _piece_cost(shape, group)
        if cost > room:
            parts.append([])
            room = _CACHE_TOKENS
        parts[-1] += group
        room -= cost
    return [batch] if len(parts) == 1 else [batch.select(part) for part in parts]


def rows_to_score(
    tokens: TokenBatch, advantages_BX: torch.Tensor, cut: MicroBatchBudget, micro_batch_size: int
) -> list[int]:
    """Return the rows that will have a gradient, and so need old and reference log-probs.

    With several ranks, at least one row of every micro-batch: all ranks take part in every forward pass.
    """
    if cut.fixed:
        return list(range(len(tokens)))
    rows = _rows_with_gradient(tokens.loss_mask_BT, advantages_BX, cut.skip_zero_advantage)
    if cut.ranks > 1:
        chosen = set(rows)
        for start in range(0, len(tokens), micro_batch_size):
            if chosen.isdisjoint(range(start, start + micro_batch_size)):
                chosen.add(start)
        rows = sorted(chosen)
    return rows


def _rows_with_gradient(
    loss_mask_BT: torch.Tensor, advantages_BX: torch.Tensor, skip_zero_advantage: bool
) -> list[int]:
    has_gradient_BT = loss_mask_BT.bool()
    if skip_zero_advantage:
        has_gradient_BT = (advantages_BX != 0) & has_gradient_BT
    return has_gradient_BT.any(-1).nonzero().flatten().tolist()


def _by_length(shape: Shape, rows: list[int], cut: MicroBatchBudget, available: int) -> list[list[int]]:
    """Rows of similar length together, at most the configured number: least padding."""
    count = cut.ranks * max(-(-len(rows) // (cut.rows * cut.ranks)), 1)
    longest_first = sorted(rows, key=lambda row: (-shape.prompts[row] - shape.completions[row], row))
    size, larger = divmod(len(rows), count)
    ends = [sum(size + (part < larger) for part in range(done)) for done in range(count + 1)]
    return [sorted(longest_first[start:end]) for start, end in pairwise(ends)]


def _by_tokens(shape: Shape, rows: list[int], cut: MicroBatchBudget, available: int) -> list[list[int]]:
    return _balanced(shape, [[row] for row in rows], cut, available)


def _by_groups(shape: Shape, rows: list[int], cut: MicroBatchBudget, available: int) -> list[list[int]]:
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
    return _balanced(shape, pieces, cut, available)


def _balanced(
    shape: Shape, pieces: list[list[int]], cut: MicroBatchBudget, available: int
) -> list[list[int]]:
    """The fewest parts that hold the pieces, the same number for every rank, made about equal."""
    capacity = _capacity(shape, cut)
    costs = [_piece_cost(shape, piece) for piece in pieces]
    count = min(max(-(-sum(costs) // (capacity * cut.ranks)), 1), available)
    while count < available and _largest(balanced_parts(costs, count * cut.ranks), costs) > capacity:
        count += 1
    if cut.ranks > 1:  # nobody should wait for a rank that has what could have been shared
        pieces = _at_least(shape, pieces, count * cut.ranks)
        costs = [_piece_cost(shape, piece) for piece in pieces]
    parts = balanced_parts(costs, count * cut.ranks)
    parts.sort(key=lambda part: -sum(costs[index] for index in part))
    return [sorted(row for index in part for row in pieces[index]) for part in parts]


def _at_least(shape: Shape, pieces: list[list[int]], number: int) -> list[list[int]]:
    """The pieces, the largest halved until there are ``number`` or nothing is left to halve."""
    while 0 < len(pieces) < number:
        largest = max(pieces, key=lambda piece: (len(piece) > 1, _piece_cost(shape, piece)))
        if len(largest) == 1:
            break
        half = len(largest) // 2
        pieces = [piece for piece in pieces if piece is not largest] + [largest[:half], largest[half:]]
    return pieces


def _piece_cost(shape: Shape, piece: Sequence[int]) -> int:
    """Tokens of rows that share a prompt."""
    return shape.prompts[piece[0]] + sum(shape.completions[row] for row in piece)


def _capacity(shape: Shape, cut: MicroBatchBudget) -> int:
    return cut.rows * (max(shape.prompts) + cut.completion_length)


def _largest(parts: Sequence[Sequence[int]], costs: Sequence[int]) -> int:
    return max(sum(costs[index] for index in part) for part in parts)


def _tokens(shape: Shape, rows: Sequence[int]) -> int:
    return sum(shape.prompts[row] + shape.completions[row] for row in rows)


def _shortest(shape: Shape) -> int:
    return min(range(len(shape.prompts)), key=lambda row: shape.prompts[row] + shape.completions[row])


def _weightless(batch: MicroBatch) -> MicroBatch:
    """The batch with every weight, mask and share zero: no gradient, no metric."""
    zeroed = (
        "loss_mask_BT",
        "token_weights_BT",
        "entropy_mask_BT",
        "entropy_weights_BT",
        "sequence_weight_B1",
    )
    tensors = batch.tensors()
    zeros: dict[str, Any] = {name: torch.zeros_like(tensors[name]) for name in zeroed if name in tensors}
    return replace(batch, **zeros)


def _with_share(batch: MicroBatch, missing: torch.Tensor) -> MicroBatch:
    assert batch.sequence_weight_B1 is not None
    sequence_weight_B1 = batch.sequence_weight_B1.clone()
    sequence_weight_B1[0] += missing
    return replace(batch, sequence_weight_B1=sequence_weight_B1)
