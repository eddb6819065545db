"""Rollouts of several rows as one sequence of trained tokens each.

A row is a prompt and the completion that the policy sampled after it: one call of an agent that calls the
policy several times. A row that continues an earlier one is joined to it, so that its tokens are computed
once; one that does not, such as a sub-agent's or one after a compacted history, starts a line of its own::

    rows of a rollout       P a        P a r b        Q c          (P, Q prompts; a, b, c sampled; r a result)

    lines                   P [a r b]      Q [c]
    token_ids               [ a r b | c ]                          of the completion
    loss_mask               [ 1 0 1 | 1 ]
    contexts                            3: Q                       tokens from index 3 on follow Q
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any

from groupwise.core.metrics import Mean, Metrics
from groupwise.records import Completion
from groupwise.records.rollout import runs_of_ones
from groupwise.tokenization.text import is_truncated


@dataclass
class _Line:
    """Tokens that the model computes as one sequence; those after ``context`` belong to the completion."""

    context: list[int]
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)

    @property
    def sequence(self) -> list[int]:
        return self.context + self.token_ids

    def append(self, token_ids: Sequence[int], loss_mask: Sequence[int], logps: Sequence[float]) -> None:
        self.token_ids += token_ids
        self.loss_mask += loss_mask
        self.logps += logps

    def is_trained(self, position: int) -> bool:
        """Return True for a loss token at ``position`` of the sequence."""
        index = position - len(self.context)
        return index >= 0 and self.loss_mask[index] == 1


def join_rollouts(
    rows: Sequence[dict[str, Any]],
    ends: Sequence[int],
    extra: dict[str, list[Any]],
    end_tokens: frozenset[int],
) -> tuple[list[list[int]], list[Completion], dict[str, list[Any]], Metrics]:
    """Join the rows of each rollout; the arguments are checked (``call_rollout_function``).

    Args:
        rows: R rows with ``prompt_ids`` and ``completion_ids``, and perhaps ``logprobs`` and ``env_mask``.
        ends: for each of B rollouts the index after its last row.
        extra: columns for the rewards, B entries each.
        end_tokens: a rollout is truncated if its last row does not end in one of these.

    Returns:
        prompt token ids, completions and columns, ``rollout_rows`` among them, B entries each; metrics.
    """
    rollouts = [rows[start:end] for start, end in pairwise([0, *ends])]
    joined = [_join(rollout, end_tokens) for rollout in rollouts]
    columns = {
        **extra,
        "rollout_rows": [[(r["prompt_ids"], r["completion_ids"]) for r in rows] for rows in rollouts],
    }
    given = sum(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows)
    computed = sum(
        len(prompt) + completion.num_context_tokens + len(completion.token_ids)
        for prompt, completion in joined
    )
    metrics: Metrics = {
        "rollouts/rows": Mean(float(len(rows)), float(len(rollouts))),
        "rollouts/computed_share": Mean(float(computed), float(given)),
    }
    return [prompt for prompt, _ in joined], [completion for _, completion in joined], columns, metrics


def _join(rows: Sequence[dict[str, Any]], end_tokens: frozenset[int]) -> tuple[list[int], Completion]:
    """Return prompt and completion of a rollout."""
    lines: list[_Line] = []
    places = [_place(row, lines) for row in rows]  # in the order in which they were sampled
    offsets = {id(line): sum(len(one.token_ids) for one in lines[:i]) for i, line in enumerate(lines)}
    begins = [offsets[id(line)] + start for line, start in places]  # of the completion of each row
    masks = [row.get("env_mask") or [1] * len(row["completion_ids"]) for row in rows]
    completion = Completion(
        token_ids=[token for each in lines for token in each.token_ids],
        loss_mask=[flag for each in lines for flag in each.loss_mask],
        logps=[logp for each in lines for logp in each.logps] if "logprobs" in rows[0] else None,
        truncated=is_truncated(rows[-1]["completion_ids"], end_tokens),
        contexts=tuple((offsets[id(each)], each.context) for each in lines[1:] if each.token_ids),
        last_row=(begins[-1], begins[-1] + len(rows[-1]["completion_ids"])),
        turns=tuple(
            (begin + start, begin + end)
            for begin, mask in zip(begins, masks, strict=True)
            for start, end in runs_of_ones(mask)
        ),
    )
    return lines[0].context, completion


def _place(row: dict[str, Any], lines: list[_Line]) -> tuple[_Line, int]:
    """Add a row to the line that it continues or lies in, or to a new one; a token is trained once.

    Returns:
        the line, and the index at which the row's completion begins in its tokens.
    """
    prompt, own = row["prompt_ids"], row["completion_ids"]
    sequence, begin = prompt + own, len(prompt)
    mask, logps = list(row.get("env_mask") or [1] * len(own)), row.get("logprobs") or [math.nan] * len(own)
    home = None
    for line in lines:
        pairs = zip(line.sequence, sequence, strict=False)
        common = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])  # tokens that both begin with
        if home is None and common in (len(line.sequence), len(sequence)) and len(line.context) <= begin:
            home = line
        # The same token after the same tokens, trained where it was first sampled: also in another line that
        # this row lies in.
        for position in range(begin, common):
            mask[position - begin] *= not line.is_trained(position)
    if home is None:
        home = _Line(prompt)
        lines.append(home)
    start = begin - len(home.context)  # of this row's completion among the tokens of its line
    between = sequence[len(home.sequence) : begin]  # results of tools, and what a template adds
    home.append(between, [0] * len(between), [math.nan] * len(between))
    for index in range(len(home.token_ids) - start):  # tokens of this row that the line has already
        if index < len(own) and mask[index] and not home.loss_mask[start + index]:
            home.loss_mask[start + index], home.logps[start + index] = 1, logps[index]
    known = len(home.token_ids) - start
    home.append(own[known:], mask[known:], logps[known:])
    return home, start
