"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): replace groups without reward variance.

    rounds of (prompts -> completions -> rewards) -> a batch with variance; surplus groups are discarded

Every decision follows from the rewards of all ranks, which every rank has, so that all ranks sample the same
number of rounds. Axis suffixes: N completions of all ranks, F reward functions, P groups, G completions of a
group.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from accelerate.utils import gather_object

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.advantages import has_variance
from groupwise.core.metrics import Mean, Metrics
from groupwise.distributed import rows_of_rank
from groupwise.errors import warn_once
from groupwise.records import RewardBatch, RolloutBatch

logger = logging.getLogger(__name__)


#: Completions of one rank: position of each in the chosen groups, rollouts and rewards.
RankPart = tuple[list[int], RolloutBatch, RewardBatch]


class DynamicBatch:
    """Accumulate rounds of rollouts until enough groups have reward variance.

    The batch has groups with variance in the order of sampling, then groups without it where the rounds did
    not suffice.

    >>> batch = DynamicBatch(config)
    >>> while not batch.is_full:
    ...     batch.add(*sample(prompts.take(batch.num_to_sample)))
    >>> rollouts, rewards = batch.finish()

    Args:
        config: settings of the step.
        gather: joins the lists of all ranks in rank order.
    """

    def __init__(
        self, config: GRPOConfig, gather: Callable[[list[RankPart]], list[RankPart]] = gather_object
    ) -> None:
        self.config, self.num_prompts = config, config.prompts_per_batch
        self._gather = gather
        self._rounds: list[tuple[RolloutBatch, RewardBatch]] = []
        # (round, group of that round)
        self._with_variance: list[tuple[int, int]] = []
        self._without_variance: list[tuple[int, int]] = []

    @property
    def is_full(self) -> bool:
        """True if no further round is needed or allowed: the same on every rank."""
        return not self.num_unfilled or len(self._rounds) == self.config.dynamic_sampling_max_rounds

    @property
    def num_unfilled(self) -> int:
        """Number of groups with variance that the batch still lacks."""
        return max(self.num_prompts - len(self._with_variance), 0)

    @property
    def num_to_sample(self) -> int:
        """Number of prompts of the next round; the first one has those of a batch."""
        num_sampled = len(self._with_variance) + len(self._without_variance)
        share = len(self._with_variance) / num_sampled if num_sampled else 1.0
        return round_size(self.num_unfilled, share, self.config)

    @property
    def metrics(self) -> Metrics:
        """Metrics ``dynamic_sampling/…`` of the rounds so far."""
        num_sampled = len(self._with_variance) + len(self._without_variance)
        return {
            "dynamic_sampling/rounds": Mean(float(len(self._rounds))),
            "dynamic_sampling/unfilled_share": Mean(float(self.num_unfilled), self.num_prompts),
            "dynamic_sampling/discarded_share": Mean(float(num_sampled - self.num_prompts), num_sampled),
        }

    def add(self, rollouts: RolloutBatch, rewards: RewardBatch) -> None:
        """Add one round.

        Args:
            rollouts: completions of this rank.
            rewards: rewards of all ranks; whole groups.
        """
        self._rounds.append((rollouts, rewards))
        variance_P = has_variance(rewards, self.config.multi_objective_aggregation).tolist()
        for group, varies in enumerate(variance_P):
            groups = self._with_variance if varies else self._without_variance
            groups.append((len(self._rounds) - 1, group))

    def finish(self) -> tuple[RolloutBatch, RewardBatch]:
        """Return this rank's rollouts of the batch, and the rewards of all ranks. Collective."""
        if self.num_unfilled:
            warn_once(
                logger,
                "dynamic sampling: after dynamic_sampling_max_rounds=%d rounds, %d of the %d groups of the "
                "batch have no reward variance, and so no gradient. The prompts may be too easy or too hard, "
                "or the reward constant; see the metric dynamic_sampling/unfilled_share",
                *(self.config.dynamic_sampling_max_rounds, self.num_unfilled, self.num_prompts),
            )
        chosen = [*self._with_variance[: self.num_prompts], *self._without_variance[: self.num_unfilled]]
        rollouts, rewards = self._collect(chosen)
        longest = max(len(completion.token_ids) for completion in rollouts.completions)
        own = rows_of_rank(self.config.process_index, len(rollouts) // self.config.world_size)
        rollouts = rollouts.select(range(len(rollouts))[own])
        return rollouts, replace(rewards.of_rank(own), num_tokens=longest)

    def _collect(self, chosen: Sequence[tuple[int, int]]) -> tuple[RolloutBatch, RewardBatch]:
        """Return the chosen groups on every rank.

        A group may have completions of several ranks; each rank sends its own. Group 1 of round 0 and group 0
        of round 1, G = 2, rounds of 4 and 2 rows on two ranks::

            position in the result    0       1       2       3
            (round, row)            (0, 2)  (0, 3)  (1, 0)  (1, 1)
            sent by rank              1       1       0       1
        """
        size = self.config.num_generations
        wanted = [
            (number, row) for number, group in chosen for row in range(group * size, (group + 1) * size)
        ]
        position = {row: index for index, row in enumerate(wanted)}
        local = [
            (number, row)
            for number, (_, rewards) in enumerate(self._rounds)
            for row in range(rewards.local.start, rewards.local.stop)
        ]
        own = [index for index, row in enumerate(local) if row in position]  # chosen rows of this rank
        rollouts = RolloutBatch.concatenate([_without_environments(rollouts) for rollouts, _ in self._rounds])
        rewards = RewardBatch.concatenate([rewards.local_part() for _, rewards in self._rounds])
        parts = self._gather([([position[local[i]] for i in own], rollouts.select(own), rewards.select(own))])
        positions = [index for part, _, _ in parts for index in part]
        order = sorted(range(len(positions)), key=positions.__getitem__)
        rollouts = RolloutBatch.concatenate([part for _, part, _ in parts]).select(order)
        rewards = RewardBatch.concatenate([part for _, _, part in parts]).select(order)
        return replace(rollouts, row_ids=list(range(len(rollouts)))), rewards


def round_size(num_unfilled: int, share_with_variance: float, config: GRPOConfig) -> int:
    """Return the prompts of a round: enough to expect the missing groups, at most a full batch.

    The completions of a round divide evenly over the ranks.
    """
    unit = config.world_size // math.gcd(config.world_size, config.num_generations)
    most = config.prompts_per_batch
    expected = math.ceil(num_unfilled / max(share_with_variance, 1 / most))
    return min(-(-expected // unit) * unit, most)


def _without_environments(rollouts: RolloutBatch) -> RolloutBatch:
    """Drop the environments: a process reuses its own, and they may hold what cannot be sent or saved."""
    return replace(rollouts, extra={n: column for n, column in rollouts.extra.items() if n != "environments"})
