"""Evaluation metrics pass@k, avg@n and maj@k with confidence intervals.

Later evaluations also report their paired difference to the first one, with an interval that stays valid when
every evaluation of a run is looked at.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from transformers import EvalPrediction

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.advantages import total_rewards
from groupwise.errors import RewardError, boundary
from groupwise.records import RewardBatch, RolloutBatch, Row, copied
from groupwise.reporting.metrics import checked_metrics, first_values

logger = logging.getLogger(__name__)

#: Column of answers for the majority vote (``log_extra("answer_parsed", values)``).
ANSWER_COLUMN = "answer_parsed"

#: Values of the column that are not a vote; the accuracy rewards log the second one.
_NO_ANSWER = (None, "[unparseable]")

#: ``Trainer``'s, with lists: ``predictions`` are completions, ``label_ids`` dataset rows, ``inputs`` prompts.
ComputeMetrics = Callable[[EvalPrediction], dict[str, float]]

#: One value per prompt, by metric; NaN where it is undefined.
PromptValues = dict[str, list[float]]


@dataclass(frozen=True)
class EvaluatedCompletion:
    """One completion of an evaluation.

    position: (batch, row of the global batch).
    rewards: the aggregated reward, then one per function; NaN for None.
    answer: vote of maj@k.
    sample: completion, dataset row and prompt, for ``compute_metrics``; None without it, and of a failed
        rollout.
    value: of the column ``metrics_by``; "" without one.
    """

    position: tuple[int, int]
    prompt: str
    rewards: list[float]
    answer: str | None
    sample: tuple[Any, Row, Any] | None = None
    value: str = ""


@dataclass
class EvaluationMetrics:
    """Completions of the running evaluation, and the values of the first evaluation of each name.

    Nothing is stored without ``eval_pass_at_k`` and ``compute_metrics``.

    first: by evaluation name, a digest of the prompts and the values by prompt.
    looks: by evaluation name, the number of gains computed so far.
    """

    completions: list[EvaluatedCompletion] = field(default_factory=list)
    num_batches: int = 0
    first: dict[str, tuple[str, PromptValues]] = field(default_factory=dict)
    looks: dict[str, int] = field(default_factory=dict)

    def add(
        self,
        rollouts: RolloutBatch,
        rewards: RewardBatch,
        config: GRPOConfig,
        compute_metrics: ComputeMetrics | None = None,
        column: str = "",
    ) -> None:
        """Store this rank's valid completions of a batch, without padding, and their values of ``column``."""
        if not config.eval_pass_at_k and compute_metrics is None:
            return
        sums = rewards.with_step_sums()
        total_N = total_rewards(sums, config.multi_objective_aggregation)
        answers = rewards.columns.get(ANSWER_COLUMN, [_text(text) for text in rollouts.texts])
        completions = []
        for index, row in enumerate(range(rewards.local.start, min(rewards.local.stop, len(total_N)))):
            completions.append(
                EvaluatedCompletion(
                    position=(self.num_batches, row),
                    prompt=str(rollouts.prompts[index]),
                    rewards=[total_N[row].item(), *sums.rewards_NF[row].tolist()],
                    answer=None if answers[index] in _NO_ANSWER else str(answers[index]),
                    sample=None
                    if compute_metrics is None or rollouts.completions[index].dropped
                    else (rollouts.texts[index], rollouts.rows[index], rollouts.prompts[index]),
                    value="" if (value := rollouts.rows[index].get(column)) is None else str(value),
                )
            )
        # Replaced, not changed in place: a failed evaluation is rolled back.
        self.completions = [*self.completions, *completions]
        self.num_batches += 1

    def compute(
        self,
        name: str,
        config: GRPOConfig,
        functions: Sequence[str],
        gather: Callable[[list[EvaluatedCompletion]], list[EvaluatedCompletion]],
        compute_metrics: ComputeMetrics | None = None,
    ) -> dict[str, float]:
        """Return the metrics of the evaluation that ended, and clear its completions.

        Args:
            name: evaluations of the same name are compared with the first one.
            functions: names of the reward functions.
            gather: concatenates the lists of all ranks.
            compute_metrics: called with all completions of the evaluation, on every rank, without failed
                rollouts.
        """
        if not config.eval_pass_at_k and compute_metrics is None:
            return {}
        completions = sorted(gather(self.completions), key=lambda one: one.position)
        self.completions, self.num_batches = [], 0
        own = {} if compute_metrics is None else own_metrics(compute_metrics, completions, name)
        if not config.eval_pass_at_k:
            return own
        size = config.generations_per_eval_prompt
        groups = [completions[i : i + size] for i in range(0, len(completions), size)]
        values = prompt_values(groups, config.eval_pass_at_k, config.eval_pass_threshold, functions)
        digest = hashlib.sha256("\0".join(group[0].prompt for group in groups).encode()).hexdigest()
        metrics = _summary(values) | _means_by_value(values, [group[0].value for group in groups])
        first_digest, first_values = self.first.get(name, (digest, values))
        self.first = {**self.first, name: (first_digest, first_values)}
        if first_digest != digest:
            logger.warning("evaluation %r has other prompts than the first time: no gain is computed", name)
        elif first_values is not values:
            self.looks = {**self.looks, name: self.looks.get(name, 0) + 1}
            metrics.update(_gains(values, first_values, self.looks[name]))
        return {**metrics, **own}

    def snapshot(self) -> dict[str, Any]:
        """Return the state; every value is replaced, never changed in place."""
        return dict(vars(self))

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Return to the state of a snapshot."""
        vars(self).update(snapshot)


def own_metrics(
    compute_metrics: ComputeMetrics, completions: Sequence[EvaluatedCompletion], name: str
) -> dict[str, float]:
    """Call the user's function with ``predictions``, ``label_ids`` and ``inputs``; return its metrics.

    Raises:
        RewardError: it raised, or did not return numbers by names that are not the trainer's.
    """
    samples = [one.sample for one in completions if one.sample is not None]
    if not samples:
        return {}
    columns = [list(column) for column in zip(*samples, strict=True)]  # completions, rows, prompts
    with boundary(RewardError, "compute_metrics"):
        found = compute_metrics(EvalPrediction(*map(copied, columns)))
    return checked_metrics(
        found, "compute_metrics", RewardError, name_of=lambda key: str(key).removeprefix(f"{name}_")
    )


def prompt_values(
    groups: Sequence[Sequence[EvaluatedCompletion]],
    ks: Sequence[int],
    threshold: float,
    functions: Sequence[str],
) -> PromptValues:
    """Compute pass@k, maj@k and avg@n of every prompt.

    The aggregated reward gives ``pass@k``; with several functions, each one also gives
    ``rewards/<name>/pass@k``. Completions without a reward are excluded, and a prompt with fewer than k
    others has no value for this k.
    """
    from groupwise.core.pass_at_k import majority_at_k, mean_with_interval, pass_at_k

    values: PromptValues = {}
    sources = [("", 0)]
    if len(functions) > 1:
        sources += [(f"rewards/{name}/", 1 + i) for i, name in enumerate(functions)]
    for prefix, column in sources:
        for group in groups:
            rewarded = [one for one in group if not math.isnan(one.rewards[column])]
            passed = [one.rewards[column] > threshold for one in rewarded]
            answers = [one.answer for one in rewarded]
            found = {f"avg@{len(group)}": [one.rewards[column] for one in rewarded]}
            for k in ks:
                enough = len(rewarded) >= k
                found[f"pass@{k}"] = [pass_at_k(len(rewarded), sum(passed), k)] if enough else []
                if k > 1:
                    found[f"maj@{k}"] = [majority_at_k(answers, passed, k)] if enough else []
            for name, entries in found.items():
                mean, _ = mean_with_interval(entries)
                values.setdefault(prefix + name, []).append(mean)
    return values


def _summary(values: PromptValues) -> dict[str, float]:
    """Return mean and 95 % margin of error of each metric over prompts."""
    from groupwise.core.pass_at_k import mean_with_interval

    metrics: dict[str, float] = {}
    for name, by_prompt in values.items():
        mean, interval = mean_with_interval([value for value in by_prompt if not math.isnan(value)])
        metrics[name] = mean
        metrics[f"{name}_ci95"] = interval
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def _means_by_value(values: PromptValues, value_of: Sequence[str]) -> dict[str, float]:
    """Return the mean of each metric over the prompts of each value, ``<metric>/<value>``."""
    shown, found = first_values({*value_of} - {""}), dict[str, list[float]]()
    for metric, by_prompt in values.items():
        for number, value in zip(by_prompt, value_of, strict=True):
            if value and not math.isnan(number):
                found.setdefault(f"{metric}/{value if value in shown else 'other'}", []).append(number)
    return {name: fmean(numbers) for name, numbers in found.items()}


def _gains(values: PromptValues, first: PromptValues, look: int) -> dict[str, float]:
    """Return the paired differences to the first evaluation.

    The variance between prompts cancels in a paired difference, so its interval is that of the change. pass@k
    and maj@k are in [0, 1] and also get ``_gain_low`` and ``_gain_high``: over all looks of a run, these
    intervals miss their gains with probability 5 % at most.
    """
    from groupwise.core.confidence import gain_interval

    gains = {
        f"{name}_gain": [now - then for now, then in zip(by_prompt, first[name], strict=True)]
        for name, by_prompt in values.items()
        if name in first
    }
    metrics = _summary(gains)
    for name, by_prompt in gains.items():
        differences = [gain for gain in by_prompt if not math.isnan(gain)]
        if differences and name.rpartition("/")[2].startswith(("pass@", "maj@")):  # of a single reward, too
            low, high = gain_interval(torch.tensor(differences).clamp(-1, 1), look)
            metrics.update({f"{name}_low": low, f"{name}_high": high})
    return metrics


def _text(completion: str | Sequence[Mapping[str, object]]) -> str:
    """Return the text of a completion, its vote where no answer was extracted."""
    if isinstance(completion, str):
        return completion.strip()
    return "\n".join(str(message.get("content", "")).strip() for message in completion)
