"""Repetition of rollouts whose environment failed, and placeholders of those that are dropped."""

from __future__ import annotations

import logging
from collections.abc import Callable

from groupwise.core.metrics import Mean, Metrics
from groupwise.errors import AgentError
from groupwise.generation.base import GenerationBackend
from groupwise.records import Completion

logger = logging.getLogger(__name__)


class RolloutRetries:
    """Policy for rollouts that fail: raise the error, or repeat the rollout.

    Args:
        max_retries: repetitions of a failed rollout, after which its completion is dropped; None: the error
            of a rollout is raised.
        any_rank: returns True if its argument is True on any rank, where ranks must generate together.
    """

    def __init__(self, max_retries: int | None, any_rank: Callable[[bool], bool]) -> None:
        self.max_retries, self.any_rank = max_retries, any_rank
        self._warned: set[str] = set()

    def check(self, error: AgentError) -> None:
        """Raise the error of a rollout; with retries, warn once per kind of error."""
        if self.max_retries is None:
            raise error
        kind = type(error.__cause__ or error).__name__
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(
                "a rollout failed (%s); failed rollouts are repeated in a fresh environment, at most "
                "rollout_retries=%d times, and then dropped from their group; see the metrics rollouts/*",
                error,
                self.max_retries,
            )

    def run(self, attempt: Callable[[list[int]], list[int]], num_rows: int) -> Metrics:
        """Run the rollouts of all rows, then repeat failed ones.

        Args:
            attempt: runs the rollouts of some rows and returns the rows that failed.

        Returns:
            ``rollouts/retry_frequency``, repeated rollouts per completion; empty without retries.
        """
        failed, num_repeated = attempt(list(range(num_rows))), 0
        if self.max_retries is None:
            return {}
        for _ in range(self.max_retries):
            if not self.any_rank(bool(failed)):
                break
            num_repeated += len(failed)
            failed = attempt(failed)
        return {"rollouts/retry_frequency": Mean(float(num_repeated), float(num_rows))}


def dropped_completion(backend: GenerationBackend) -> Completion:
    """Return the placeholder of a failed rollout: one token without loss."""
    return Completion(sorted(backend.end_tokens)[:1] or [0], loss_mask=[0], dropped=True)
