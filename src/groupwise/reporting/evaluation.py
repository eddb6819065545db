"""How many prompts a policy solves: pass@k, avg@n and maj@k of an evaluation, and against the first one."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.core.advantages import total_rewards
from groupwise.core.pass_at_k import majority_at_k, mean_with_interval, pass_at_k
from groupwise.records import RewardBatch, RolloutBatch

logger = logging.getLogger(__name__)

#: What a reward function logs for the majority vote (``log_extra("answer_parsed", values)``).
ANSWER_COLUMN = "answer_parsed"

#: Entries that are no vote; the second is how the accuracy rewards write it.
_NO_ANSWER = (None, "[unparseable]")

#: One value per prompt, by metric; NaN where it is not known.
PromptValues = dict[str, list[float]]


@dataclass(frozen=True)
class Judged:
    """One completion of an evaluation.

    place: (batch, row of the global batch).
    rewards: weighted sum first, then one per function; NaN for None.
    answer: what it votes for.
    """

    place: tuple[int, int]
    prompt: str
    rewards: list[float]
    answer: str | None


@dataclass
class EvaluationRecord:
    """The completions of the evaluation that is going on, and what the first one of each name found.

    ks: values of k; empty: nothing is kept.
    threshold: a completion passes when its reward is above it.
    functions: names of the reward functions.
    aggregation: combines their rewards into the one that is compared with the threshold.
    first: per evaluation name a digest of its prompts, and its values by prompt.
    """

    ks: Sequence[int]
    threshold: float
    functions: Sequence[str]
    aggregation: str = "sum_then_normalize"
    judged: list[Judged] = field(default_factory=list)
    batches: int = 0
    first: dict[str, tuple[str, PromptValues]] = field(default_factory=dict)

    def add(self, rollouts: RolloutBatch, scored: RewardBatch) -> None:
        """This rank's completions of one batch, without those that only fill it up."""
        if not self.ks:
            return
        rewards_NF, rollout = scored.rewards.rewards_NF, rollouts
        total_N = total_rewards(scored.rewards, self.aggregation)
        answers = scored.columns.get(ANSWER_COLUMN, [_text(text) for text in rollout.texts])
        for index, row in enumerate(range(scored.local.start, min(scored.local.stop, len(total_N)))):
            self.judged.append(
                Judged(
                    place=(self.batches, row),
                    prompt=str(rollout.prompts[index]),
                    rewards=[total_N[row].item(), *rewards_NF[row].tolist()],
                    answer=None if answers[index] in _NO_ANSWER else str(answers[index]),
                )
            )
        self.batches += 1

    def close(
        self, name: str, num_generations: int, gather: Callable[[list[Judged]], list[Judged]]
    ) -> dict[str, float]:
        """The metrics of the evaluation that has ended.

        Args:
            name: evaluations of the same name are compared.
            gather: joins the lists of all ranks.
        """
        if not self.ks:
            return {}
        judged = sorted(gather(self.judged), key=lambda one: one.place)
        self.judged, self.batches = [], 0
        groups = [judged[i : i + num_generations] for i in range(0, len(judged), num_generations)]
        values = prompt_values(groups, self.ks, self.threshold, self.functions)
        prompts = hashlib.sha256("\0".join(group[0].prompt for group in groups).encode()).hexdigest()
        metrics = _summary(values)
        known_prompts, before = self.first.setdefault(name, (prompts, values))
        if known_prompts != prompts:
            logger.warning("evaluation %r has other prompts than the first time: no gain is computed", name)
        elif before is not values:
            metrics.update(_gains(values, before))
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {name: [prompts, values] for name, (prompts, values) in self.first.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = {name: (prompts, values) for name, (prompts, values) in state.items()}


def prompt_values(
    groups: Sequence[Sequence[Judged]], ks: Sequence[int], threshold: float, functions: Sequence[str]
) -> PromptValues:
    """pass@k, maj@k and avg@n of every prompt, of the weighted reward and, if there are several, of each
    function.

    Completions without a reward are left out; a prompt with fewer than k others has no value for this k.
    """
    values: PromptValues = {}
    sources = [("", 0)]
    if len(functions) > 1:
        sources += [(f"rewards/{name}/", 1 + i) for i, name in enumerate(functions)]
    for prefix, column in sources:
        for group in groups:
            known = [one for one in group if not math.isnan(one.rewards[column])]
            passed = [one.rewards[column] > threshold for one in known]
            answers = [one.answer for one in known]
            found = {f"avg@{len(group)}": [one.rewards[column] for one in known]}
            for k in ks:
                enough = len(known) >= k
                found[f"pass@{k}"] = [pass_at_k(len(known), sum(passed), k)] if enough else []
                if k > 1:
                    found[f"maj@{k}"] = [majority_at_k(answers, passed, k)] if enough else []
            for name, entries in found.items():
                mean, _ = mean_with_interval(entries)
                values.setdefault(prefix + name, []).append(mean)
    return values


def _summary(values: PromptValues) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, by_prompt in values.items():
        mean, interval = mean_with_interval([value for value in by_prompt if not math.isnan(value)])
        metrics[name] = mean
        metrics[f"{name}_ci95"] = interval
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def _gains(values: PromptValues, before: PromptValues) -> dict[str, float]:
    """Differences by prompt: what prompts have in common cancels, so the interval is that of the change."""
    gains = {
        f"{name}_gain": [now - then for now, then in zip(by_prompt, before[name], strict=True)]
        for name, by_prompt in values.items()
        if name in before
    }
    return _summary(gains)


def _text(completion: Any) -> str:
    """A completion as what it votes for, where no answer was extracted."""
    if isinstance(completion, str):
        return completion.strip()
    return "\n".join(str(message.get("content", "")).strip() for message in completion)
