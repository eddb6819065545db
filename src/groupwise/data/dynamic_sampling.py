"""Dynamic sampling (DAPO, section 3.2): groups whose rewards do not vary give way to further prompts.

    carried groups + rounds of (prompts -> completions -> rewards) -> a batch with variance + the rest

Every decision follows from the rewards of all ranks, which every rank knows: so all of them decide the same
and take part in the same exchanges. Axis suffixes: N completions of all ranks, F reward functions, P groups,
G completions of a group.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from groupwise.core.advantages import AGGREGATIONS, GroupRewards, total_rewards
from groupwise.core.metrics import Mean, Metrics
from groupwise.data.prompt_source import PromptSource
from groupwise.errors import ConfigError
from groupwise.records import Completion, RewardBatch, RolloutBatch

logger = logging.getLogger(__name__)

#: A spread of rewards below this share of the largest one is rounding.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Sample:
    """One completion with all that later stages need to know of it.

    values: its entries in the fields of a ``RolloutBatch``, by field.
    columns: what reward functions logged for it.
    rewards: one per function, NaN for None; steps: those of process-supervised functions, by function.
    """

    values: dict[str, Any]
    columns: dict[str, Any]
    rewards: list[float]
    steps: dict[int, list[tuple[int, float]]]

    @property
    def completion(self) -> Completion:
        return self.values["completions"]


Group = list[Sample]


@dataclass(frozen=True)
class FillSettings:
    """num_prompts: groups of a full batch; aggregation: a name in ``AGGREGATIONS``; ranks: processes, which
    share its completions evenly.
    """

    num_prompts: int
    num_generations: int
    max_rounds: int
    aggregation: str = "sum_then_normalize"
    ranks: int = 1
    rank: int = 0


@dataclass
class LeftoverGroups:
    """What one step leaves to the next: the same on every rank.

    groups: with variance, beyond what a step could use, with the log-probs of the policy that sampled them.
    share_with_variance: of the groups of the last step.
    """

    groups: list[Group] = field(default_factory=list)
    share_with_variance: float = 1.0

    def state_dict(self) -> dict[str, Any]:
        """Plain values; groups with others (images, for example) are left out."""
        kept = [group for group in self.groups if all(_is_plain(vars(sample)) for sample in group)]
        if len(kept) < len(self.groups):
            logger.warning(
                "%d carried groups are not part of the checkpoint, because their rows hold other things than "
                "text and numbers; a resumed run samples new ones in their place",
                len(self.groups) - len(kept),
            )
        plain = [[asdict(sample) for sample in group] for group in kept]
        return {"groups": plain, "share_with_variance": self.share_with_variance}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> LeftoverGroups:
        groups = [
            [
                Sample(**{**plain, "values": {**plain["values"], "completions": Completion(**completion)}})
                for plain in group
                for completion in [plain["values"]["completions"]]
            ]
            for group in state["groups"]
        ]
        return cls(groups, state["share_with_variance"])


@dataclass(frozen=True)
class Filled:
    """A full batch.

    rollouts, rewards: the completions of this rank, and the rewards of all.
    surplus: groups with variance that found no place, on every rank.
    from_carry: groups in the batch that an earlier policy sampled.
    share_with_variance: of the groups sampled.
    num_unfilled: places that groups without variance had to take.
    """

    rollouts: RolloutBatch
    rewards: RewardBatch
    surplus: list[Group]
    from_carry: int
    share_with_variance: float
    num_unfilled: int
    metrics: Metrics


@dataclass
class Feed:
    """Where the rows of a run come from when its loader only counts, and what a step has left over.

    source: None where the loader gives the rows.
    warned: that a batch could not be filled has been said.
    """

    source: PromptSource | None = None
    carry: LeftoverGroups = field(default_factory=LeftoverGroups)
    warned: bool = False

    def state_dict(self) -> dict[str, Any]:
        queue = None if self.source is None else self.source.queue.state_dict()
        return {"queue": queue, "carry": self.carry.state_dict(), "warned": self.warned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was made.

        Raises:
            ConfigError: it was made without a queue and there is one now, or the other way round.
        """
        if (self.source is None) != (state["queue"] is None):
            raise ConfigError(
                "the checkpoint and this run take their prompts in different ways: dynamic_sampling, or "
                "whether train_dataset is a stream, has changed; resume with the same settings"
            )
        if self.source is not None:
            self.source.queue.load_state_dict(state["queue"])
        self.carry, self.warned = LeftoverGroups.from_state(state["carry"]), state["warned"]

    def warn_of_flat_groups(self, filled: Filled, settings: FillSettings) -> None:
        """Once in a run."""
        if filled.num_unfilled and not self.warned:
            self.warned = True
            logger.warning(
                "dynamic sampling: after dynamic_sampling_max_rounds=%d rounds, %d of the %d groups of the "
                "batch have rewards that do not vary, and nothing can be learned from those. The prompts may "
                "be too easy or too hard, or the reward constant; dynamic_sampling/unfilled_share shows more",
                settings.max_rounds,
                filled.num_unfilled,
                settings.num_prompts,
            )


def fill_batch(
    carry: LeftoverGroups,
    settings: FillSettings,
    sample: Callable[[int], tuple[RolloutBatch, RewardBatch]],
    gather: Callable[[list[Any]], list[Any]],
) -> Filled:
    """Sample groups until enough of them have variance, in at most ``max_rounds`` rounds.

    Args:
        carry: groups left by the step before; they come first.
        sample: completions with rewards for the next so many prompts; called by every rank alike.
        gather: joins the lists of all ranks in rank order.
    """
    wanted = settings.num_prompts
    carried = carry.groups[:wanted]
    share = carry.share_with_variance
    varied: list[tuple[int, int]] = []  # (round, group of that round)
    flat: list[tuple[int, int]] = []
    rounds: list[tuple[RolloutBatch, RewardBatch]] = []
    num_unfilled = wanted - len(carried)
    while not rounds or (num_unfilled > 0 and len(rounds) < settings.max_rounds):
        rounds.append(sample(round_size(num_unfilled, share, settings)))
        varies_P = has_variance(rounds[-1][1].rewards, settings.aggregation)
        for number, varies in enumerate(varies_P):
            (varied if varies else flat).append((len(rounds) - 1, number))
        share = len(varied) / (len(varied) + len(flat))
        num_unfilled = max(wanted - len(carried) - len(varied), 0)
    groups = carried + _collect(rounds, varied + flat[:num_unfilled], gather)
    rollouts, rewards = _as_scored([one for group in groups[:wanted] for one in group], settings, rounds[0])
    return Filled(
        rollouts=rollouts,
        rewards=rewards,
        surplus=carry.groups[wanted:] + groups[wanted:],
        from_carry=len(carried),
        share_with_variance=share,
        num_unfilled=num_unfilled,
        metrics={
            "dynamic_sampling/rounds": Mean(float(len(rounds))),
            "dynamic_sampling/unfilled_share": Mean(float(num_unfilled), wanted),
            "dynamic_sampling/carried": Mean(float(len(carried))),
            "dynamic_sampling/discarded_share": Mean(
                float(len(flat) - num_unfilled), len(flat) + len(varied)
            ),
        },
    )


def round_size(num_unfilled: int, share_with_variance: float, settings: FillSettings) -> int:
    """Prompts of a round: as many as should give the groups that are missing, at most a full batch.

    The completions of a round divide evenly over the ranks.
    """
    unit = settings.ranks // math.gcd(settings.ranks, settings.num_generations)
    expected = math.ceil(max(num_unfilled, 1) / max(share_with_variance, 1 / settings.num_prompts))
    return min(-(-expected // unit) * unit, settings.num_prompts)


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
    varies_P = (present_FPG.any(-1) & (high_FP - low_FP > _ROUNDING * scale_FP)).any(0).tolist()
    for steps_N in rewards.step_rewards.values():
        for number in range(len(varies_P)):
            group = steps_N[number * size : (number + 1) * size]
            varies_P[number] |= len({reward for steps in group for _, reward in steps}) > 1
    return varies_P


def _collect(
    rounds: Sequence[tuple[RolloutBatch, RewardBatch]],
    chosen: Sequence[tuple[int, int]],
    gather: Callable[[list[Any]], list[Any]],
) -> list[Group]:
    """The chosen groups in this order, on every rank; a group may have completions of several ranks."""
    own = []
    for place, (number, group) in enumerate(chosen):
        rollouts, scored = rounds[number]
        size = scored.rewards.num_generations
        for row in range(group * size, (group + 1) * size):
            if scored.local.start <= row < scored.local.stop:
                own.append((place, _sample(rollouts, scored, row)))
    groups: list[Group] = [[] for _ in chosen]
    for place, sample in gather(own):  # in rank order, which is the order within a group
        groups[place].append(sample)
    return groups


def _sample(rollouts: RolloutBatch, scored: RewardBatch, row: int) -> Sample:
    index = row - scored.local.start
    return Sample(
        values=_entries(rollouts, index),
        columns={name: values[index] for name, values in scored.columns.items()},
        rewards=scored.rewards.rewards_NF[row].tolist(),
        steps={function: list(steps[row]) for function, steps in scored.rewards.step_rewards.items()},
    )


def _entries(rollout: RolloutBatch, index: int) -> dict[str, Any]:
    values = {f.name: getattr(rollout, f.name) for f in fields(rollout)}
    entries = {name: value[index] for name, value in values.items() if isinstance(value, (list, tuple))}
    return {**entries, "extra": {name: column[index] for name, column in rollout.extra.items()}}


def as_rollout(samples: Sequence[Sample]) -> RolloutBatch:
    """The samples as one rollout; what only some of them have is None for the others."""
    extra = {name: None for sample in samples for name in sample.values["extra"]}
    values: dict[str, Any] = {name: [sample.values[name] for sample in samples] for name in samples[0].values}
    columns = {name: [sample.values["extra"].get(name) for sample in samples] for name in extra}
    return RolloutBatch(**{**values, "extra": columns})


def _as_scored(
    samples: Sequence[Sample], settings: FillSettings, round_: tuple[RolloutBatch, RewardBatch]
) -> tuple[RolloutBatch, RewardBatch]:
    share = len(samples) // settings.ranks
    local = slice(settings.rank * share, (settings.rank + 1) * share)
    functions = sorted({function for sample in samples for function in sample.steps})
    rewards = replace(
        round_[1].rewards,
        rewards_NF=torch.tensor(
            [sample.rewards for sample in samples], dtype=round_[1].rewards.rewards_NF.dtype
        ),
        step_rewards={i: [sample.steps.get(i, []) for sample in samples] for i in functions},
        num_tokens=max(len(sample.completion.token_ids) for sample in samples),
    )
    own = samples[local]
    names = {name: None for sample in own for name in sample.columns}
    columns = {name: [sample.columns.get(name) for sample in own] for name in names}
    rollouts = replace(as_rollout(own), num_generations=settings.num_generations)
    return rollouts, RewardBatch(rewards, local, columns)


def with_old_logps(
    groups: Sequence[Group],
    settings: FillSettings,
    score: Callable[[RolloutBatch], list[list[float]]],
    gather: Callable[[list[Any]], list[Any]],
) -> list[Group]:
    """Groups that know how probable their tokens are under the current policy, before it changes.

    Args:
        score: log-probs of the completions of a rollout; every rank calls it with as many of them.
    """
    samples = [sample for group in groups for sample in group]
    if not samples:
        return []
    share = -(-len(samples) // settings.ranks)
    own = [samples[min(settings.rank * share + i, len(samples) - 1)] for i in range(share)]
    scored = [
        replace(sample, values={**sample.values, "completions": replace(sample.completion, old_logps=logps)})
        for sample, logps in zip(own, score(as_rollout(own)), strict=True)
    ]
    gathered = gather(scored)[: len(samples)]
    size = settings.num_generations
    return [gathered[start : start + size] for start in range(0, len(gathered), size)]


def _is_plain(value: Any) -> bool:
    value = vars(value) if isinstance(value, Completion) else value
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(entry) for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(entry) for entry in value)
    return type(value) in (str, int, float, bool, type(None))
