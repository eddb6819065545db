"""Layouts without padding: the sequences of a micro-batch as one row of tokens.

`packed` puts sequence after sequence. `shared_prefix` holds the prompt of a group once, followed by its
completions, whose positions all restart at the prompt end; a completion attends to the prompt and to
itself. Everything but attention works on single tokens and sees no difference; attention gathers its queries
and keys in blocks of rows of similar length.

Axes: T tokens of the stream, N scored tokens, B sequences, C completion tokens; in a block R rows, Q queries,
S keys; H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from groupwise.core.padding import pad_sequences
from groupwise.policy.attention import grouped_query_attention
from groupwise.records import TokenBatch

_NEVER = torch.iinfo(torch.long).max  # position of a padded key: after every query


@dataclass(frozen=True)
class Block:
    """Rows of attention that are computed together.

    query_RQ, key_RS: places in the stream; padding repeats the row's first place.
    query_position_RQ, key_position_RS: positions in the sequence; of padded keys, after every query.
    same: the keys are the queries, so that without a window plain causal attention needs no mask.
    """

    query_RQ: torch.Tensor
    key_RS: torch.Tensor
    query_position_RQ: torch.Tensor
    key_position_RS: torch.Tensor
    same: bool

    def mask(self, window: int | None) -> torch.Tensor | None:
        """(R, 1, Q, S), true where a query sees a key; None is plain causal attention."""
        if self.same and (window is None or window >= self.key_RS.shape[1]):
            return None
        query_R1Q1, key_R11S = self.query_position_RQ[:, None, :, None], self.key_position_RS[:, None, None]
        seen = key_R11S <= query_R1Q1
        return seen if window is None else seen & (key_R11S > query_R1Q1 - window)

    def to(self, device: torch.device) -> Block:
        moved = {name: value.to(device) for name, value in vars(self).items() if name != "same"}
        return replace(self, **moved)


@dataclass(frozen=True)
class StreamAttention:
    """The attention of a stream; an ``attend`` of ``groupwise.policy.attention``.

    order_T: the place of each token of the stream in the outputs of all blocks, one after the other.
    """

    blocks: Sequence[Block]
    order_T: torch.Tensor
    _masks: dict[tuple[int, int | None], Any] = field(default_factory=dict, repr=False)

    @torch.compiler.disable  # blocks differ in number and shape from one micro-batch to the next
    def __call__(
        self,
        query_1HTD: torch.Tensor,
        key_1KTD: torch.Tensor,
        value_1KTD: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        outputs = []
        for index, block in enumerate(self.blocks):
            if (index, window) not in self._masks:  # the same for all layers
                self._masks[index, window] = block.mask(window)
            out_RHQD = grouped_query_attention(
                _gather(query_1HTD, block.query_RQ),
                _gather(key_1KTD, block.key_RS),
                _gather(value_1KTD, block.key_RS),
                self._masks[index, window],
                scale,
            )
            outputs.append(out_RHQD.transpose(1, 2).flatten(0, 1).flatten(1))
        rows = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return F.embedding(self.order_T, rows).unflatten(1, (query_1HTD.shape[1], -1)).unsqueeze(0)


def _gather(heads_1HTD: torch.Tensor, places_RQ: torch.Tensor) -> torch.Tensor:
    """(R, H, Q, D). An embedding's backward sums the uses of a row fast, and on CUDA in a fixed order."""
    rows_RQE = F.embedding(places_RQ, heads_1HTD[0].transpose(0, 1).flatten(1))
    return rows_RQE.unflatten(2, (heads_1HTD.shape[1], -1)).transpose(1, 2)


@dataclass(frozen=True)
class Stream:
    """A micro-batch as the input of one forward.

    token_ids_1S, position_ids_1S: the model's input.
    logit_index_N: the place whose output predicts a completion token; places repeat where prompts are shared.
    target_N: that completion token.
    output_index_N: its place in the flattened (B, C) of the batch.
    cu_seqlens: of `packed`, 0 and where each sequence ends.
    longest: tokens of the longest of those.
    """

    token_ids_1S: torch.Tensor
    position_ids_1S: torch.Tensor
    logit_index_N: torch.Tensor
    target_N: torch.Tensor
    output_index_N: torch.Tensor
    attention: StreamAttention
    cu_seqlens: torch.Tensor
    longest: int

    def bounds(self) -> dict[str, Any]:
        """What transformers would otherwise read back from the positions, in every layer."""
        both = {"cu_seq_lens": self.cu_seqlens, "max_length": self.longest}
        return {f"{name}_{side}": value for name, value in both.items() for side in "qk"}


@dataclass(frozen=True)
class Shape:
    """What a stream needs to know on the host: one transfer, whatever the batch holds.

    prompts, completions: token counts by row.
    repeats: whether a row has the prompt of the row before it.
    """

    prompts: list[int]
    completions: list[int]
    repeats: list[bool]

    def padded_tokens(self, rows: Sequence[int]) -> int:
        """Tokens of a rectangle that holds the rows."""
        width = max((self.prompts[row] for row in rows), default=0)
        return len(rows) * (width + max((self.completions[row] for row in rows), default=0))

    def shared_tokens(self, rows: Sequence[int]) -> int:
        """Tokens of a stream of the rows in which each group's prompt stands once."""
        kept = set(rows)
        first = [min(kept.intersection(group)) for group in self.groups() if kept.intersection(group)]
        return sum(self.prompts[row] for row in first) + sum(self.completions[row] for row in rows)

    def groups(self) -> list[list[int]]:
        """Runs of rows with one prompt."""
        runs: list[list[int]] = []
        for row, repeats in enumerate(self.repeats):
            if repeats:
                runs[-1].append(row)
            else:
                runs.append([row])
        return runs


def shape_of(batch: TokenBatch) -> Shape:
    """Lengths and repeated prompts of ``batch``; one transfer to the host."""
    ids, mask = batch.prompt_ids_BL, batch.prompt_mask_BL
    same = ((ids[1:] == ids[:-1]) & (mask[1:] == mask[:-1])).all(-1)
    repeats = F.pad(same, (1, 0))
    columns = torch.stack([mask.sum(-1), batch.completion_mask_BT.sum(-1), repeats.long()])
    prompts, completions, flags = columns.tolist()
    return Shape(prompts, completions, [bool(flag) for flag in flags])


def build_stream(batch: TokenBatch, shape: Shape, *, shared: bool) -> Stream:
    """The stream of ``batch``.

    Args:
        shared: compute the prompt of consecutive rows that have the same one once.
    """
    device = batch.prompt_ids_BL.device
    width, prompt_width = batch.completion_ids_BT.shape[1], batch.prompt_ids_BL.shape[1]
    groups = shape.groups() if shared else [[row] for row in range(len(batch))]
    source: list[int] = []  # places in the padded (B, P + C)
    positions: list[int] = []
    predictors: list[int] = []
    slots: list[int] = []
    sequences: list[range] = []  # attended causally
    branches: list[tuple[range, range]] = []  # a shared prompt and a completion
    for rows in groups:
        prompt = shape.prompts[rows[0]]
        start = len(source)
        offset = rows[0] * (prompt_width + width) + prompt_width
        source += range(offset - prompt, offset)
        positions += range(prompt)
        for row in rows:
            length, first = shape.completions[row], len(source)
            offset = row * (prompt_width + width) + prompt_width
            source += range(offset, offset + length)
            positions += range(prompt, prompt + length)
            if length:
                predictors += [start + prompt - 1, *range(first, first + length - 1)]
                slots += range(row * width, row * width + length)
                if len(rows) > 1:
                    branches.append((range(start, start + prompt), range(first, first + length)))
        sequences.append(range(start, start + prompt) if len(rows) > 1 else range(start, len(source)))
    position_T = torch.tensor(positions)
    trunks, forks = _similar(sequences, len), _similar(branches, lambda branch: len(branch[1]))
    blocks = [_sequence_block(rows, position_T) for rows in trunks]
    blocks += [_branch_block(rows, position_T) for rows in forks]
    queries = [*trunks, *([completion for _, completion in rows] for rows in forks)]
    tokens = torch.cat([batch.prompt_ids_BL, batch.completion_ids_BT], dim=1).flatten()
    output_index_N = torch.tensor(slots, dtype=torch.long).to(device)
    return Stream(
        token_ids_1S=tokens[torch.tensor(source).to(device)].unsqueeze(0),
        position_ids_1S=position_T.to(device).unsqueeze(0),
        logit_index_N=torch.tensor(predictors, dtype=torch.long).to(device),
        target_N=batch.completion_ids_BT.flatten()[output_index_N],
        output_index_N=output_index_N,
        attention=StreamAttention(
            [block.to(device) for block in blocks], _order(queries, len(source)).to(device)
        ),
        cu_seqlens=torch.tensor([0, *(rows.stop for rows in sequences)], dtype=torch.int32).to(device),
        longest=max(map(len, sequences)),
    )


def _similar(rows: Sequence[Any], length: Any) -> list[list[Any]]:
    """Rows by length, such that none in a block is shorter than half of its longest."""
    blocks: list[list[Any]] = []
    for row in sorted(rows, key=length, reverse=True):
        if blocks and 2 * length(row) >= length(blocks[-1][0]):
            blocks[-1].append(row)
        else:
            blocks.append([row])
    return blocks


def _sequence_block(rows: Sequence[range], position_T: torch.Tensor) -> Block:
    places, keys = _places(rows), _key_positions(rows, position_T)
    return Block(places, places, position_T[places], keys, same=True)


def _branch_block(rows: Sequence[tuple[range, range]], position_T: torch.Tensor) -> Block:
    queries = _places([completion for _, completion in rows])
    seen = [[*prompt, *completion] for prompt, completion in rows]
    return Block(queries, _places(seen), position_T[queries], _key_positions(seen, position_T), same=False)


def _places(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    places = pad_sequences(rows, -1)
    return torch.where(places < 0, places[:, :1], places)


def _key_positions(rows: Sequence[Sequence[int]], position_T: torch.Tensor) -> torch.Tensor:
    places = pad_sequences(rows, -1)
    return torch.where(places < 0, _NEVER, position_T[places])


def _order(blocks: Sequence[Sequence[range]], tokens: int) -> torch.Tensor:
    """Where each token of the stream stands in the blocks' outputs, given each block's queries by row."""
    order_T = torch.empty(tokens, dtype=torch.long)
    start = 0
    for rows in blocks:
        width = max(len(row) for row in rows)
        for index, row in enumerate(rows):
            first = start + index * width
            order_T[row.start : row.stop] = torch.arange(first, first + len(row))
        start += len(rows) * width
    return order_T
