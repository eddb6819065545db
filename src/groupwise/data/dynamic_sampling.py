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
from dataclasses import dataclass, field, replace

import torch
from accelerate.utils import gather_object

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.advantages import AGGREGATIONS, GroupRewards, total_rewards
from groupwise.core.metrics import Mean, Metrics
from groupwise.distributed import rows_of_rank
from groupwise.errors import ConfigError
from groupwise.records import Completion, RewardBatch, RolloutBatch, Row, SamplerSettings
from groupwise.records.images import ImageInputs
from groupwise.records.serialization import host_copy

logger = logging.getLogger(__name__)

#: A reward range below this share of the largest reward is rounding.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Sample:
    """One completion with its entry in every column of a ``RolloutBatch`` and a ``RewardBatch``.

    row, prompt, prompt_ids, completion, text, extra, images: its entries in the rollout batch.
    columns: values that reward functions logged.
    rewards: one per function, NaN for None.
    step_rewards: (index of the step's last token, reward) of process-supervised functions, by function.
    """

    row: Row
    prompt: object
    prompt_ids: list[int]
    completion: Completion
    text: object
    extra: dict[str, object]
    images: ImageInputs | None
    columns: dict[str, object]
    rewards: list[float]
    step_rewards: dict[int, list[tuple[int, float]]]


#: The G samples of one prompt.
Group = list[Sample]


@dataclass(frozen=True)
class LeftoverGroups:
    """Groups that one step leaves to the next: the same on every rank.

    groups: groups with variance beyond a full batch, with log-probs of the policy that sampled them.
    share_with_variance: share of the groups of the last step that had variance.
    has_warned: the run has warned that a batch could not be filled.
    """

    groups: list[Group] = field(default_factory=list)
    share_with_variance: float = 1.0
    has_warned: bool = False

    def savable(self) -> LeftoverGroups:
        """Return the state for a checkpoint; groups with unusual values (images) are left out."""
        kept = [group for group in self.groups if _can_be_saved(group)]
        if len(kept) < len(self.groups):
            logger.warning(
                "%d leftover groups are not part of the checkpoint: their rows hold values other than text "
                "and numbers; a resumed run samples new groups in their place",
                len(self.groups) - len(kept),
            )
        return replace(self, groups=kept)

    def without_groups(self, reason: str) -> LeftoverGroups:
        """Drop the groups; a warning gives the reason if there are any."""
        if self.groups:
            logger.warning("%d leftover groups of dynamic sampling are dropped: %s", len(self.groups), reason)
        return replace(self, groups=[])

    def local_rollouts(self, config: GRPOConfig, sampler: SamplerSettings) -> RolloutBatch | None:
        """Return this rank's share of the completions, to compute their log-probs; None without groups.

        Every rank gets the same number: the last completion is repeated.
        """
        samples = [sample for group in self.groups for sample in group]
        if not samples:
            return None
        num_rows = -(-len(samples) // config.world_size)
        samples += [samples[-1]] * (num_rows * config.world_size - len(samples))
        own = samples[rows_of_rank(config.process_index, num_rows)]
        return replace(_rollout_batch(own, config.num_generations), sampler=sampler)

    def with_behavior_logps(self, logps: Sequence[list[float]]) -> LeftoverGroups:
        """Set the log-probs of each completion under the policy that sampled it.

        Args:
            logps: one list per completion of ``local_rollouts`` on all ranks, in rank order.
        """
        entries = iter(logps)
        groups = [
            [
                replace(sample, completion=replace(sample.completion, old_logps=next(entries)))
                for sample in group
            ]
            for group in self.groups
        ]
        return replace(self, groups=groups)


class DynamicBatch:
    """Accumulate rounds of rollouts until enough groups have reward variance.

    Groups left over by the step before come first, then groups with variance in the order of sampling, then
    groups without variance where the rounds did not suffice. Without dynamic sampling, the first round is the
    batch, unchanged.

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
        gather: Callable[[list[tuple[int, Sample]]], list[tuple[int, Sample]]] = gather_object,
    ) -> None:
        self.config, self.num_prompts = config, config.prompts_per_batch
        self._leftover = leftover
        self._gather = gather
        self._reused = leftover.groups[: self.num_prompts]  # sampled by an earlier policy
        self._rounds: list[tuple[RolloutBatch, RewardBatch]] = []
        # (round, group of that round)
        self._with_variance: list[tuple[int, int]] = []
        self._without_variance: list[tuple[int, int]] = []

    @property
    def is_full(self) -> bool:
        """True if no further round is needed or allowed: the same on every rank."""
        if not self._rounds:
            return False
        was_last = len(self._rounds) == self.config.dynamic_sampling_max_rounds
        return not self.config.dynamic_sampling or not self.num_unfilled or was_last

    @property
    def num_unfilled(self) -> int:
        """Number of groups with variance that the batch still lacks."""
        return max(self.num_prompts - len(self._reused) - len(self._with_variance), 0)

    @property
    def num_to_sample(self) -> int:
        """Number of prompts of the next round."""
        if not self.config.dynamic_sampling:
            return self.num_prompts
        return round_size(self.num_unfilled, self._share_with_variance, self.config)

    @property
    def metrics(self) -> Metrics:
        """Metrics ``dynamic_sampling/…`` of the rounds so far; empty without dynamic sampling."""
        if not self.config.dynamic_sampling:
            return {}
        num_unfilled, num_flat = self.num_unfilled, len(self._without_variance)
        return {
            "dynamic_sampling/rounds": Mean(float(len(self._rounds))),
            "dynamic_sampling/unfilled_share": Mean(float(num_unfilled), self.num_prompts),
            "dynamic_sampling/carried": Mean(float(len(self._reused))),
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
        if self.config.dynamic_sampling:
            variance_P = has_variance(rewards, self.config.multi_objective_aggregation)
            for group, varies in enumerate(variance_P):
                groups = self._with_variance if varies else self._without_variance
                groups.append((len(self._rounds) - 1, group))

    def finish(self) -> tuple[RolloutBatch, RewardBatch, LeftoverGroups]:
        """Return the batch and the groups that it has no place for. Collective with dynamic sampling.

        Returns:
            this rank's rollouts; the rewards of all ranks; leftover groups, which still lack the log-probs of
            this step's samples (``LeftoverGroups.with_behavior_logps``).
        """
        if not self.config.dynamic_sampling:
            return *self._rounds[0], self._leftover
        num_unfilled, num_prompts = self.num_unfilled, self.num_prompts
        chosen = self._with_variance + self._without_variance[:num_unfilled]
        groups = self._reused + self._collect(chosen)
        samples = [sample for group in groups[:num_prompts] for sample in group]
        first_rollouts, first_rewards = self._rounds[0]
        rollouts, rewards = _to_batches(samples, self.config, first_rewards)
        rollouts = replace(rollouts, sampler=first_rollouts.sampler)
        leftover = LeftoverGroups(
            self._leftover.groups[num_prompts:] + groups[num_prompts:],
            self._share_with_variance,
            self._leftover.has_warned or num_unfilled > 0,
        )
        if num_unfilled and not self._leftover.has_warned:
            logger.warning(
                "dynamic sampling: after dynamic_sampling_max_rounds=%d rounds, %d of the %d groups of the "
                "batch have no reward variance, and so no gradient. The prompts may be too easy or too hard, "
                "or the reward constant; see the metric dynamic_sampling/unfilled_share",
                self.config.dynamic_sampling_max_rounds,
                num_unfilled,
                num_prompts,
            )
        return rollouts, rewards, leftover

    @property
    def _share_with_variance(self) -> float:
        """Share of the sampled groups with variance; that of the step before until a round is added."""
        total = len(self._with_variance) + len(self._without_variance)
        return len(self._with_variance) / total if total else self._leftover.share_with_variance

    def _collect(self, chosen: Sequence[tuple[int, int]]) -> list[Group]:
        """Gather the chosen groups in this order on every rank; a group may have samples of several ranks."""
        size = self.config.num_generations
        own = []
        for place, (number, group) in enumerate(chosen):
            rollouts, rewards = self._rounds[number]
            for row in range(group * size, (group + 1) * size):
                if rewards.local.start <= row < rewards.local.stop:
                    own.append((place, _sample(rollouts, rewards, row)))
        groups: list[Group] = [[] for _ in chosen]
        for place, sample in self._gather(own):  # in rank order, which is the order within a group
            groups[place].append(sample)
        return groups


def round_size(num_unfilled: int, share_with_variance: float, config: GRPOConfig) -> int:
    """Return the prompts of a round: enough to expect the missing groups, at most a full batch.

    The completions of a round divide evenly over the ranks.
    """
    unit = config.world_size // math.gcd(config.world_size, config.num_generations)
    most = config.prompts_per_batch
    expected = math.ceil(max(num_unfilled, 1) / max(share_with_variance, 1 / most))
    return min(-(-expected // unit) * unit, most)


def has_variance(rewards: GroupRewards, aggregation: str = "sum_then_normalize") -> list[bool]:
    """Return for each group whether its rewards differ; missing rewards are ignored.

    Args:
        aggregation: the aggregated reward must differ; with one that normalises each function first, a
            difference in the rewards of any single function is enough.
    """
    size = rewards.num_generations
    if AGGREGATIONS[aggregation].normalize_first:
        values_FN = rewards.rewards_NF.T
    else:
        values_FN = total_rewards(rewards, aggregation).unsqueeze(0)
    values_FPG = values_FN.reshape(len(values_FN), -1, size)
    present_FPG = ~values_FPG.isnan()
    high_FP = values_FPG.masked_fill(~present_FPG, -torch.inf).amax(-1)
    low_FP = values_FPG.masked_fill(~present_FPG, torch.inf).amin(-1)
    scale_FP = torch.maximum(high_FP.abs(), low_FP.abs())
    varies_P = (present_FPG.any(-1) & (high_FP - low_FP > _ROUNDING * scale_FP)).any(0)
    return (varies_P.cpu() | rewards.steps_vary()).tolist()


def _sample(rollouts: RolloutBatch, rewards: RewardBatch, row: int) -> Sample:
    """Read one completion of this rank; ``row`` counts the completions of all ranks."""
    index = row - rewards.local.start
    return Sample(
        row=rollouts.rows[index],
        prompt=rollouts.prompts[index],
        prompt_ids=rollouts.prompt_ids[index],
        completion=rollouts.completions[index],
        text=rollouts.texts[index],
        # Without environments: a process reuses its own, and they may hold what cannot be sent or saved.
        extra={name: column[index] for name, column in rollouts.extra.items() if name != "environments"},
        images=None if rollouts.images is None else rollouts.images[index],
        columns={name: values[index] for name, values in rewards.columns.items()},
        rewards=rewards.rewards_NF[row].tolist(),
        step_rewards={i: list(steps[row]) for i, steps in rewards.step_rewards.items()},
    )


def _rollout_batch(samples: Sequence[Sample], num_generations: int) -> RolloutBatch:
    """Join samples to a rollout batch; an extra column that some lack is None there."""
    names = {name: None for sample in samples for name in sample.extra}
    images = [sample.images for sample in samples if sample.images is not None]
    return RolloutBatch(
        rows=[sample.row for sample in samples],
        prompts=[sample.prompt for sample in samples],
        prompt_ids=[sample.prompt_ids for sample in samples],
        completions=[sample.completion for sample in samples],
        texts=[sample.text for sample in samples],
        num_generations=num_generations,
        extra={name: [sample.extra.get(name) for sample in samples] for name in names},
        images=images or None,
    )


def _to_batches(
    samples: Sequence[Sample], config: GRPOConfig, like: RewardBatch
) -> tuple[RolloutBatch, RewardBatch]:
    """Join the samples of all ranks to this rank's rollout batch and the rewards of all ranks."""
    local = rows_of_rank(config.process_index, len(samples) // config.world_size)
    own = samples[local]
    names = {name: None for sample in own for name in sample.columns}
    functions = sorted({function for sample in samples for function in sample.step_rewards})
    rewards = replace(
        like,
        rewards_NF=torch.tensor([sample.rewards for sample in samples], dtype=like.rewards_NF.dtype),
        step_rewards={i: [sample.step_rewards.get(i, []) for sample in samples] for i in functions},
        num_tokens=max(len(sample.completion.token_ids) for sample in samples),
        local=local,
        columns={name: [sample.columns.get(name) for sample in own] for name in names},
        metrics={},
    )
    return _rollout_batch(own, config.num_generations), rewards


def _can_be_saved(group: Group) -> bool:
    try:
        host_copy(group)
    except ConfigError:
        return False
    return True
