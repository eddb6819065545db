"""Rebalance the micro-batches of an accumulation window across ranks.

Rows without gradient are skipped; the others are assigned to micro-batches of about equal cost. Token weights
are set before, from counts of the whole window, so neither step changes the gradient. Two ranks, a window of
two micro-batches of two rows, one letter per token; rows 2 and 5 have advantage zero::

    window            rank 0   [0 aaaaaa] [2 cccc    ]      rank 1   [4 eeee] [6 gg    ]
                               [1 bb    ] [3 d       ]               [5 ff  ] [7 hhhhhh]

    WindowRows.of     lengths 6 2 4 1, gradient 1 1 0 1     lengths 4 2 2 6, gradient 1 0 1 1
    gather            every rank has the lengths 6 2 4 1 4 2 2 6 of rows 0 to 7

    plan              longest first: 0 7 | 4 1 | 6 | 3      (padded layout: similar lengths together)
    (same everywhere) rank 0: [0 7] [6]                     rank 1: [1 4] [3]

    exchange          receives rows 6 and 7                 receives rows 1 and 3
    micro-batches              [0 aaaaaa] [6 gg]                     [1 bb  ] [3 d]
                               [7 hhhhhh]                            [4 eeee]

A row index counts all rows of the window in rank order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch

from groupwise.core.metrics import Mean, Metrics, Scalar
from groupwise.data.budget import MicroBatchBudget
from groupwise.data.exchange import exchange
from groupwise.records import MicroBatch, TokenBatch
from groupwise.records.tensors import Shape

#: Row indices of every micro-batch: ``plan[rank][micro_batch]``.
Plan = list[list[list[int]]]

#: Layouts in which rows that share a prompt must stay together for it to be computed once.
SHARES_PROMPTS = ("shared_prefix", "forked")


_WEIGHTS = ("loss_mask_BT", "token_weights_BT", "entropy_mask_BT", "entropy_weights_BT", "sequence_weight_B1")


@dataclass(frozen=True)
class WindowStats:
    """Size of an accumulation window and of its computed part: this rank's share.

    rows: sequences.
    skipped_rows: sequences without gradient, which are not computed.
    tokens: prompt and completion tokens of all rows.
    computed_tokens: input tokens of the model, padding included; a shared prompt counts once per use.
    padding_tokens: padding among the computed tokens.
    skipped_weight: sum of ``sequence_weight_B1`` over the skipped rows that this rank sampled.
    """

    rows: float = 0
    skipped_rows: float = 0
    tokens: float = 0
    computed_tokens: int = 0
    padding_tokens: int = 0
    skipped_weight: Scalar = 0.0

    @property
    def has_no_gradient(self) -> bool:
        """True if no row of any rank has a gradient: what is computed all the same has no weight."""
        return 0 < self.rows == self.skipped_rows

    def metrics(self) -> Metrics:
        return {
            "skipped_share": Mean(self.skipped_rows, self.rows),
            "padding_share": Mean(float(self.padding_tokens), float(self.computed_tokens)),
        }


@dataclass(frozen=True)
class WindowRows:
    """Lengths of the rows of a window: all that a plan needs, and all that a rank receives of every row.

    Example: two ranks with one completion each of the prompt ``[5, 6]``, the second without gradient::

        WindowRows([2, 2], [3, 4], group_ids=[0, 0], has_gradient=[True, False], rows_per_rank=[1, 1], fields)

    prompt_lengths: prompt tokens by row.
    completion_lengths: completion tokens by row.
    group_ids: number of each row's prompt, NaN if no layout shares it; completions of one are adjacent.
    has_gradient: rows that must be computed.
    rows_per_rank: number of rows on each rank.
    fields: names of the tensor fields that are not None on some rank.
    """

    prompt_lengths: list[int]
    completion_lengths: list[int]
    group_ids: list[float]
    has_gradient: list[bool]
    rows_per_rank: list[int]
    fields: frozenset[str]

    @classmethod
    def of(cls, batch: MicroBatch, budget: MicroBatchBudget) -> WindowRows:
        """Read the lengths of rows of this rank: one transfer to the host."""
        gradient_B = rows_with_gradient(batch, batch.advantages_BX, budget)
        lengths = (batch.prompt_mask_BL.sum(-1), batch.completion_mask_BT.sum(-1))  # (B,) tokens each
        columns = (*lengths, batch.group_ids_B, gradient_B.long())
        prompts, completions, group_ids, flags = torch.stack(columns).tolist()  # (4, B): one synchronization
        gradient = [bool(flag) for flag in flags]
        for row, tokens in enumerate(batch.context_tokens()):  # of a rollout of several rows
            completions[row] += tokens
        for row, inputs in enumerate(batch.images or ()):
            if inputs.end >= prompts[row]:  # images in the completion: no layout shares its prompt
                group_ids[row] = math.nan  # a run of its own
        return cls(prompts, completions, group_ids, gradient, [len(batch)], frozenset(batch.tensors()))

    @classmethod
    def concatenate(cls, ranks: Sequence[WindowRows]) -> WindowRows:
        """Join the rows of all ranks in rank order."""
        joined = {f.name: [value for rank in ranks for value in getattr(rank, f.name)] for f in fields(cls)}
        return cls(**{**joined, "fields": frozenset(joined["fields"])})  # type: ignore[arg-type]

    @property
    def shape(self) -> Shape:
        """Lengths, and runs of rows with the same prompt."""
        # Equal ids are the same prompt: no rank has the token ids of another's prompts.
        repeats = [one == other for one, other in pairwise(self.group_ids)]
        return Shape(self.prompt_lengths, self.completion_lengths, [False, *repeats])

    def of_rank(self, rank: int) -> range:
        """Return the indices of the rows that ``rank`` holds."""
        start = sum(self.rows_per_rank[:rank])
        return range(start, start + self.rows_per_rank[rank])


def rows_with_gradient(
    tokens: TokenBatch, advantages_BX: torch.Tensor, budget: MicroBatchBudget
) -> torch.Tensor:
    """Return (B,) bool: rows that must be computed. A dropped row never is: all its weights are zero."""
    if not budget.skip_masked:  # an overridden loss may have a gradient without loss tokens
        return tokens.kept_B
    counts_BT = tokens.loss_mask_BT.bool()
    return ((advantages_BX != 0) & counts_BT if budget.skip_zero_advantage else counts_BT).any(-1)


def rebalance(
    window: Sequence[MicroBatch],
    layout: str,
    budget: MicroBatchBudget,
    gather: Callable[[list[WindowRows]], list[WindowRows]] = list,
    all_to_all: Callable[[list[MicroBatch | None]], list[MicroBatch | None]] = list,
) -> tuple[list[MicroBatch | None], WindowStats]:
    """Assign the rows of an accumulation window to as few micro-batches as hold them, alike on all ranks.

    In a layout without padding, a micro-batch holds up to the tokens of ``micro_batch_size`` rows of the
    greatest length: the memory that was configured. Completions of a prompt stay together where they fit.

    Args:
        window: this rank's micro-batches, with token weights.
        layout: ``padded``, ``packed``, ``shared_prefix`` or ``forked``.
        gather: joins the lists of all ranks in rank order.
        all_to_all: sends entry r to rank r and returns the entries for this rank, in rank order.

    Returns:
        this rank's micro-batches, as many as before: None first, where fewer suffice; and the work saved.
    """
    own = WindowRows.concatenate([WindowRows.of(batch, budget) for batch in window])
    own, count = replace(own, rows_per_rank=[sum(own.rows_per_rank)]), sum(own.rows_per_rank)  # B rows
    if budget.fixed:  # the loss is not a sum over rows, so no row may change its micro-batch
        size = len(window[0])
        whole = [list(range(start, min(start + size, count))) for start in range(0, count, size)]
        return list(window), _window_stats(own.shape, count, whole, "padded", 1)
    rows = WindowRows.concatenate(gather([own]))  # N rows of all ranks: lengths alone
    planned = plan(rows, layout, budget, len(window))
    mine = planned[budget.rank]
    # Log-probs of a separate sampler, which only other ranks have.
    window = [batch.with_fields(rows.fields) for batch in window]
    kept = sorted(row for part in mine for row in part)
    received = window  # with one rank no copy: rows keep their places
    place = {row: index for index, row in enumerate(kept if budget.world_size > 1 else range(count))}
    if budget.world_size > 1:
        held = [rows.of_rank(rank) for rank in range(budget.world_size)]
        received = exchange(window, held, planned, budget.rank, all_to_all)
    # Without rows, a rank computes its shortest one with weight zero: every rank runs as many forwards.
    shortest = min(range(count), key=lambda row: own.shape.group_tokens([row]))
    batches = [
        batch if len(batch) else _without_weight(MicroBatch.regroup(window, [[shortest]])[0])
        for batch in MicroBatch.regroup(received, [[place[row] for row in part] for part in mine])
    ]
    skipped = [row for row, has_gradient in enumerate(own.has_gradient) if not has_gradient]
    stats = replace(
        _window_stats(rows.shape, sum(rows.has_gradient), mine, layout, budget.world_size),
        # They count in the logs, with loss zero.
        skipped_weight=torch.cat([batch.sequence_weight_B1 for batch in window])[skipped].sum(),
    )
    return [None] * (len(window) - len(batches)) + batches, stats


def _window_stats(
    shape: Shape, num_computed: int, parts: list[list[int]], layout: str, world_size: int
) -> WindowStats:
    """Count rows and tokens of all ranks in equal shares, computed tokens of this rank."""
    total = len(shape.prompts)  # N rows of all ranks; ``shape`` has no others
    counts = [layout_tokens(shape, part, layout) for part in parts]
    return WindowStats(
        rows=total / world_size,
        skipped_rows=(total - num_computed) / world_size,
        tokens=(sum(shape.prompts) + sum(shape.completions)) / world_size,
        computed_tokens=sum(tokens for tokens, _ in counts),
        padding_tokens=sum(padding for _, padding in counts),
    )


def layout_tokens(shape: Shape, rows: Sequence[int], layout: str) -> tuple[int, int]:
    """Return the input tokens of a micro-batch of ``rows`` in a layout, and the padding among them."""
    tokens = sum(shape.prompts[row] + shape.completions[row] for row in rows)
    if layout == "padded":  # every row is as long as the longest prompt and the longest completion
        length = max((shape.prompts[row] for row in rows), default=0)
        padded = len(rows) * (length + max((shape.completions[row] for row in rows), default=0))
        return padded, padded - tokens
    if layout in ("packed", "equal_length"):
        return tokens, 0
    if layout == "forked":
        from groupwise.policy.layouts.forked import count_tokens  # loaded by the runs that have it

        return count_tokens(shape, rows)
    return sum(shape.group_tokens(group) for group in shape.groups_of(rows)), 0


def rows_needing_logps(
    tokens: TokenBatch, advantages_BX: torch.Tensor, budget: MicroBatchBudget, micro_batch_size: int
) -> list[int]:
    """Return the rows that will have a gradient, and so need old and reference log-probs.

    With several ranks, at least one row of every micro-batch: all ranks must run the same number of forwards.

    Args:
        tokens: this rank's rows, B.
        micro_batch_size: rows per forward.
    """
    if budget.fixed:
        return list(range(len(tokens)))
    gradient_B = rows_with_gradient(tokens, advantages_BX, budget)
    rows = set(gradient_B.nonzero().flatten().tolist())
    if budget.world_size > 1:
        for start in range(0, len(tokens), micro_batch_size):  # one forward of every rank
            if rows.isdisjoint(range(start, start + micro_batch_size)):
                rows.add(start)  # under ZeRO-3 and FSDP a rank without a forward would dead-lock the others
    return sorted(rows)


def plan(rows: WindowRows, layout: str, budget: MicroBatchBudget, num_available: int) -> Plan:
    """Assign the rows with gradient to micro-batches; the result depends on nothing but the arguments.

    Args:
        num_available: micro-batches per rank in the window.

    Returns:
        row indices of the micro-batches of every rank: equally many, at most ``num_available``; some may be
        empty.
    """
    computed = [row for row, has_gradient in enumerate(rows.has_gradient) if has_gradient]
    if layout in ("padded", "equal_length"):
        parts = _by_length(rows.shape, computed, budget)
    else:
        shared = layout in SHARES_PROMPTS
        parts = _by_tokens(rows.shape, computed, budget, num_available, shared=shared)
    # Neighbours cost about the same. They become the same micro-batch of different ranks, which wait for
    # each other wherever parameters are sharded.
    return [parts[rank :: budget.world_size] for rank in range(budget.world_size)]


def _by_length(shape: Shape, rows: list[int], budget: MicroBatchBudget) -> list[list[int]]:
    """Put rows of similar length together, at most ``micro_batch_size``: least padding."""
    # The fewest that hold the rows, a multiple of the number of ranks, and at least one per rank.
    count = budget.world_size * max(-(-len(rows) // (budget.micro_batch_size * budget.world_size)), 1)
    longest_first = sorted(rows, key=lambda row: (-shape.group_tokens([row]), row))
    size, larger = divmod(len(rows), count)  # the first ``larger`` parts have one row more
    ends = [sum(size + (part < larger) for part in range(done)) for done in range(count + 1)]
    return [sorted(longest_first[start:end]) for start, end in pairwise(ends)]


def _by_tokens(
    shape: Shape, rows: list[int], budget: MicroBatchBudget, num_available: int, *, shared: bool
) -> list[list[int]]:
    """Distribute rows over the fewest micro-batches that hold them, equally many on every rank.

    Rows that share a prompt stay together where they fit, else they are cut into as few pieces as fit. Every
    piece computes the prompt again: a prompt of 100 tokens with two completions of 10 and 20 in a capacity of
    125 gives two pieces, of 110 and 120 tokens; one alone would have 130.
    """
    # Tokens of ``micro_batch_size`` rows of the greatest length: the memory that was configured.
    capacity = budget.micro_batch_size * (max(shape.prompts) + budget.max_completion_length)
    computed = set(rows)
    pieces: list[list[int]] = []
    for group in shape.groups(shared=shared):
        piece: list[int] = []
        for row in (row for row in group if row in computed):
            if piece and shape.group_tokens([*piece, row]) > capacity:
                pieces.append(piece)
                piece = []
            piece.append(row)
        pieces += [piece] if piece else []
    costs = [shape.group_tokens(piece) for piece in pieces]
    # Per rank: as many as the total needs, then more until no part is larger than the capacity.
    count = min(max(-(-sum(costs) // (capacity * budget.world_size)), 1), num_available)
    parts = balanced_parts(costs, count * budget.world_size)  # indices of ``pieces``
    while count < num_available and max(sum(costs[i] for i in part) for part in parts) > capacity:
        count += 1
        parts = balanced_parts(costs, count * budget.world_size)
    if budget.world_size > 1:  # a rank without a piece would wait for the others
        pieces = _at_least(shape, pieces, count * budget.world_size)
        costs = [shape.group_tokens(piece) for piece in pieces]
        parts = balanced_parts(costs, count * budget.world_size)
    parts.sort(key=lambda part: -sum(costs[index] for index in part))  # largest first, see :func:`plan`
    return [sorted(row for index in part for row in pieces[index]) for part in parts]


def _at_least(shape: Shape, pieces: list[list[int]], number: int) -> list[list[int]]:
    """Halve the largest pieces until there are ``number``, or every piece is a single row."""
    while 0 < len(pieces) < number:
        # The largest piece that can be halved; single rows come last.
        largest = max(pieces, key=lambda piece: (len(piece) > 1, shape.group_tokens(piece)))
        if len(largest) == 1:
            break
        half = len(largest) // 2
        pieces = [piece for piece in pieces if piece is not largest] + [largest[:half], largest[half:]]
    return pieces


def _without_weight(batch: MicroBatch) -> MicroBatch:
    """Set every weight and loss mask to zero: no gradient, no metric."""
    zeros: dict[str, Any] = {
        name: torch.zeros_like(tensor) for name, tensor in batch.tensors().items() if name in _WEIGHTS
    }
    return replace(batch, **zeros)


def balanced_parts(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Partition the indices of ``costs`` into lists of about equal total cost, the largest first.

    The largest total is at most 4/3 of the optimum (Graham, 1969). Deterministic, so that every rank computes
    the same partition.

    Returns:
        ``parts`` sorted lists of indices; some are empty if there are fewer costs than parts.
    """
    loads = [(0.0, part) for part in range(parts)]  # a heap: the part with the least work first
    result: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):  # largest first, ties in order
        load, part = heapq.heappop(loads)
        result[part].append(index)  # to the least loaded part
        heapq.heappush(loads, (load + costs[index], part))
    return [sorted(part) for part in result]
