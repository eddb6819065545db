"""Rows of the generations to come, so that a server can sample them while the current one trains.

With ``rollout_staleness`` = k, a generation is asked for k generations before it is trained on. Its tokens
then come from weights that are up to k generations old; each says from which, and the correction for the
sampler (``core.corrections``) reweights for the difference.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from groupwise.core.metrics import Max, Mean, Metrics
from groupwise.stages import Completion

logger = logging.getLogger(__name__)

Rows = list[dict[str, Any]]


class LookAhead:
    """Passes on what an iterator yields, and shows what it will yield."""

    def __init__(self, iterator: Iterator[Rows]) -> None:
        self.iterator = iterator
        self._seen: deque[Rows] = deque()

    def __iter__(self) -> LookAhead:
        return self

    def __next__(self) -> Rows:
        return self._seen.popleft() if self._seen else next(self.iterator)

    def peek(self, distance: int) -> Rows | None:
        """What comes after ``distance`` further items; None beyond the end."""
        while len(self._seen) <= distance:
            try:
                self._seen.append(next(self.iterator))
            except StopIteration:
                return None
        return self._seen[distance]


class Pipeline:
    """Looks as many generations ahead as the configuration allows; not at all without staleness.

    It sees to the end of the epoch: the first generations of the next one are asked for when it begins.

    Args:
        config: a ``GRPOConfig``; each of its generations trains for whole optimizer steps.
        one_turn: a completion is one request, known before it begins: no agents, no ``rollout_func``.
    """

    def __init__(self, config: Any, *, one_turn: bool = True) -> None:
        self.depth = config.rollout_staleness if one_turn else 0
        if config.rollout_staleness and not one_turn:
            logger.warning(
                "rollout_staleness=%d is without effect: with tools, environments or a rollout_func, what is "
                "generated is not known ahead",
                config.rollout_staleness,
            )
        self.uses = config.steps_per_generation * config.num_iterations
        self.steps = self.uses // config.gradient_accumulation_steps
        self._rows: LookAhead | None = None

    def over(self, rows: Iterator[Rows]) -> Iterator[Rows]:
        """The iterator, such that ``upcoming`` can look into it."""
        if self.depth == 0 or isinstance(rows, LookAhead):
            return rows
        if self._rows is None or self._rows.iterator is not rows:
            self._rows = LookAhead(rows)
        return self._rows

    def upcoming(self, step: int, last: int) -> Iterator[tuple[int, Rows]]:
        """The following generations: the optimizer step that begins with each, and its rows.

        Call it when the rows of a generation have just been taken from the iterator.

        Args:
            step: optimizer steps done.
            last: optimizer steps of the whole run.
        """
        for number in range(1, self.depth + 1):
            if self._rows is None or step + number * self.steps >= last:
                return
            rows = self._rows.peek(number * self.uses - 1)
            if rows is None:
                return
            yield step + number * self.steps, rows


def staleness(completions: Sequence[Completion], step: int) -> Metrics:
    """How many optimizer steps behind the weights were that sampled each token."""
    behind = [step - version for c in completions for version in c.versions or ()]
    if not behind:
        return {}
    return {
        "staleness": Mean(float(sum(behind)), float(len(behind))),
        "staleness/max": Max(float(max(behind))),
    }
