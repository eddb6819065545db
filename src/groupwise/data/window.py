"""Accumulation window: the micro-batches of one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupwise.compat.trl import WithoutKeys
from groupwise.core.metrics import Mean
from groupwise.data.rebalancing import WindowStats
from groupwise.errors import TrainingError
from groupwise.records import MicroBatch


class AccumulationWindow(WithoutKeys):
    """Micro-batches of one optimizer step of this rank, taken one after the other.

    ``Trainer`` receives the window once per micro-batch, as ``inputs`` that it counts and does not read.

    Args:
        batches: micro-batches; None where rebalancing needed fewer of them, and in a window to be made.
        stats: size of the window and of its computed part; None: the batches are still to be made.

    Attributes:
        size: number of micro-batches of the step.
        entropy: entropy of the tokens of the entropy bonus, over the micro-batches computed so far.
        current: micro-batch that was taken last.
    """

    def __init__(self, batches: Sequence[MicroBatch | None], stats: WindowStats | None = None) -> None:
        self.batches, self.size = list(batches), len(batches)
        self.is_made = stats is not None
        self.stats = stats or WindowStats()
        self.entropy = Mean(0.0, 0.0)
        self.current: Any = None
        self._taken = 0

    @classmethod
    def to_be_made(cls, size: int) -> AccumulationWindow:
        """Return a window of ``size`` micro-batches that the first ``training_step`` replaces."""
        return cls([None] * size)

    def take(self) -> MicroBatch | None:
        """Return the next micro-batch.

        Raises:
            TrainingError: the step has no further micro-batch.
        """
        if self._taken == self.size:
            raise TrainingError(
                f"super().training_step was called more than {self.size} times in a step of {self.size} "
                "micro-batches; call it once per training_step. To compute a micro-batch several times, "
                "override compute_loss(model, batch)"
            )
        self.current = self.batches[self._taken]
        self._taken += 1
        return self.current
