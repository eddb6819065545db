"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): replace groups without reward variance.

    leftover groups + rounds of (prompts -> completions -> rewards) -> a batch with variance + leftover groups

Every decision follows from the rewards of all ranks, which every rank has, so that all ranks sample the same
number of rounds. Axis suffixes: N completions of all ranks, F reward functions, P groups, G completions of a
group.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from accelerate.utils import gather_object

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.advantages import has_variance
from groupwise.core.metrics import Mean, Metrics
from groupwise.distributed import rows_of_rank
from groupwise.errors import ConfigError
from groupwise.records import RewardBatch, RolloutBatch, SamplerSettings
from groupwise.records.serialization import host_copy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeftoverGroups:
    """Groups that one step leaves to the next: the same on every rank.

    rollouts: groups with variance beyond a full batch, completions of all ranks with the log-probs of the
        policy that sampled them; None: no group is left.
    rewards: rewards of the same rows.
    share_with_variance: share of the groups of the last step that had variance.
    has_warned: the run has warned that a batch could not be filled.
    """

    rollouts: RolloutBatch | None = None
    rewards: RewardBatch | None = None
    share_with_variance: float = 1.0
    has_warned: bool = False

    def __len__(self) -> int:
        return 0 if self.rollouts is None else len(self.rollouts) // self.rollouts.num_generations

    def select(self, groups: Sequence[int]) -> LeftoverGroups:
        """Select groups."""
        if self.rollouts is None or self.rewards is None or not groups:
            return replace(self, rollouts=None, rewards=None)
        size = self.rollouts.num_generations
        rows = [row for group in groups for row in range(group * size, (group + 1) * size)]
        return replace(self, rollouts=self.rollouts.select(rows), rewards=self.rewards.select(rows))

    def savable(self) -> LeftoverGroups:
        """Return the state for a checkpoint; groups with unusual values (images) are left out."""
        kept = [group for group in range(len(self)) if _can_be_saved(self.select([group]))]
        if len(kept) < len(self):
            logger.warning(
                "%d leftover groups are not part of the checkpoint: their rows hold values other than text "
                "and numbers; a resumed run samples new groups in their place",
                len(self) - len(kept),
            )
        return self.select(kept)

    def without_groups(self, reason: str) -> LeftoverGroups:
        """Drop the groups; a warning gives the reason if there are any."""
        if len(self):
            logger.warning("%d leftover groups of dynamic sampling are dropped: %s", len(self), reason)
        return self.select([])

    def local_rollouts(self, config: GRPOConfig, sampler: SamplerSettings) -> RolloutBatch | None:
        """Return this rank's part of the completions, to compute their log-probs; None without groups.

        Every rank gets the same number: the last completion is repeated.
        """
        if self.rollouts is None:
            return None
        last, size = len(self.rollouts) - 1, -(-len(self.rollouts) // config.world_size)
        own = range(size * config.world_size)[rows_of_rank(config.process_index, size)]
        return replace(self.rollouts.select([min(row, last) for row in own]), sampler=sampler)

    def with_behavior_logps(self, logps: Sequence[list[float]]) -> LeftoverGroups:
        """Set the log-probs of each completion under the policy that sampled it.

        Args:
            logps: one list per completion of ``local_rollouts`` on all ranks, in rank order.
        """
        if self.rollouts is None:
            return self
        pairs = zip(self.rollouts.completions, logps, strict=False)  # the last completion is repeated
        completions = [replace(completion, old_logps=own) for completion, own in pairs]
        return replace(self, rollouts=replace(self.rollouts, completions=completions))


#: Completions of one rank: position of each in the chosen groups, rollouts and rewards.
RankPart = tuple[list[int], RolloutBatch, RewardBatch]


class DynamicBatch:
    """Accumulate rounds of rollouts until enough groups have reward variance.

    Groups left over by the step before come first, then groups with variance in the order of sampling, then
    groups without variance where the rounds did not suffice.

    >>> batch = DynamicBatch(leftover_groups, config)
    >>> while not batch.is_full:
    ...     batch.add(*sample(prompts.take(batch.num_to_sample)))
    >>> rollouts, rewards, leftover_groups = batch.finish()

    Args:
        leftover: groups of the step before.
        config: settings of the step.
        gather: joins the lists of all ranks in rank order.
    """

    def __init__(
        self,
        leftover: LeftoverGroups,
        config: GRPOConfig,
        gather: Callable[[list[RankPart]], list[RankPart]] = gather_object,
    ) -> None:
        self.config, self.num_prompts = config, config.prompts_per_batch
        self._leftover = leftover
        self._gather = gather
        self._num_reused = min(len(leftover), self.num_prompts)  # groups that an earlier policy sampled
        self._rounds: list[tuple[RolloutBatch, RewardBatch]] = []
        # (round, group of that round)
        self._with_variance: list[tuple[int, int]] = []
        self._without_variance: list[tuple[int, int]] = []

    @property
    def is_full(self) -> bool:
        """True if no further round is needed or allowed: the same on every rank."""
        if not self._rounds:
            return False
        return not self.num_unfilled or len(self._rounds) == self.config.dynamic_sampling_max_rounds

    @property
    def num_unfilled(self) -> int:
        """Number of groups with variance that the batch still lacks."""
        return max(self.num_prompts - self._num_reused - len(self._with_variance), 0)

    @property
    def num_to_sample(self) -> int:
        """Number of prompts of the next round."""
        return round_size(self.num_unfilled, self._share_with_variance, self.config)

    @property
    def metrics(self) -> Metrics:
        """Metrics ``dynamic_sampling/…`` of the rounds so far."""
        num_unfilled, num_flat = self.num_unfilled, len(self._without_variance)
        return {
            "dynamic_sampling/rounds": Mean(float(len(self._rounds))),
            "dynamic_sampling/unfilled_share": Mean(float(num_unfilled), self.num_prompts),
            "dynamic_sampling/carried": Mean(float(self._num_reused)),
            "dynamic_sampling/discarded_share": Mean(
                float(num_flat - num_unfilled), num_flat + len(self._with_variance)
            ),
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

    def finish(self) -> tuple[RolloutBatch, RewardBatch, LeftoverGroups]:
        """Return the batch and the groups that it has no place for. Collective.

        Returns:
            this rank's rollouts; the rewards of all ranks; leftover groups, which still lack the log-probs of
            this step's samples (``LeftoverGroups.with_behavior_logps``).
        """
        num_unfilled, num_prompts = self.num_unfilled, self.num_prompts
        rollouts, rewards = self._collect(self._with_variance + self._without_variance[:num_unfilled])
        groups = LeftoverGroups(
            rollouts, rewards, self._share_with_variance, self._leftover.has_warned or num_unfilled > 0
        )
        batch, leftover = groups.select(range(num_prompts)), groups.select(range(num_prompts, len(groups)))
        if num_unfilled and not self._leftover.has_warned:
            logger.warning(
                "dynamic sampling: after dynamic_sampling_max_rounds=%d rounds, %d of the %d groups of the "
                "batch have no reward variance, and so no gradient. The prompts may be too easy or too hard, "
                "or the reward constant; see the metric dynamic_sampling/unfilled_share",
                self.config.dynamic_sampling_max_rounds,
                num_unfilled,
                num_prompts,
            )
        assert batch.rollouts is not None and batch.rewards is not None  # P groups
        longest = max(len(completion.token_ids) for completion in batch.rollouts.completions)
        own = rows_of_rank(self.config.process_index, len(batch.rollouts) // self.config.world_size)
        rollouts = batch.rollouts.select(range(len(batch.rollouts))[own])
        return rollouts, replace(batch.rewards.of_rank(own), num_tokens=longest), leftover

    @property
    def _share_with_variance(self) -> float:
        """Share of the sampled groups with variance; that of the step before until a round is added."""
        total = len(self._with_variance) + len(self._without_variance)
        return len(self._with_variance) / total if total else self._leftover.share_with_variance

    def _collect(self, chosen: Sequence[tuple[int, int]]) -> tuple[RolloutBatch, RewardBatch]:
        """Return the leftover groups and the chosen ones, in this order, on every rank.

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
        if self._leftover.rollouts is not None and self._leftover.rewards is not None:
            rollouts = RolloutBatch.concatenate([self._leftover.rollouts, rollouts])
            rewards = RewardBatch.concatenate([self._leftover.rewards, rewards])
        return replace(rollouts, row_ids=list(range(len(rollouts)))), rewards


def round_size(num_unfilled: int, share_with_variance: float, config: GRPOConfig) -> int:
    """Return the prompts of a round: enough to expect the missing groups, at most a full batch.

    The completions of a round divide evenly over the ranks.
    """
    unit = config.world_size // math.gcd(config.world_size, config.num_generations)
    most = config.prompts_per_batch
    expected = math.ceil(max(num_unfilled, 1) / max(share_with_variance, 1 / most))
    return min(-(-expected // unit) * unit, most)


def _without_environments(rollouts: RolloutBatch) -> RolloutBatch:
    """Drop the environments: a process reuses its own, and they may hold what cannot be sent or saved."""
    return replace(rollouts, extra={n: column for n, column in rollouts.extra.items() if n != "environments"})


def _can_be_saved(group: LeftoverGroups) -> bool:
    try:
        host_copy(group)
    except ConfigError:
        return False
    return True
