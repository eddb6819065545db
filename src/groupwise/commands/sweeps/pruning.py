"""Stop the losing runs of a sweep, with a bounded probability of a wrong stop over all looks and runs.

Every look compares the leader, the run with the highest mean, with each other run on the same held-out
prompts. The interval of their paired difference has the level α / (pairs · k (k + 1)) at look k = 1, 2, …: it
holds for all pairs, whichever run leads, and for all looks together. A paired difference is without the
variance between prompts, which is most of that of a run's mean.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers.trainer_utils import IntervalStrategy

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.advantages import total_rewards
from groupwise.core.confidence import LEAST_PROMPTS, gain_interval
from groupwise.errors import ConfigError
from groupwise.records import RewardBatch, RolloutBatch
from groupwise.reporting.evaluation import EvaluationMetrics

#: Settings of the scores, and of the steps that have them.
_COMMON = (
    *("eval_strategy", "eval_steps", "eval_pass_threshold", "eval_max_samples", "num_generations_eval"),
    *("reward_weights", "multi_objective_aggregation"),
)
#: Probability that a sweep stops any run although no other one is better.
ALPHA = 0.05


@dataclass(frozen=True)
class LosingRun:
    """Run that is worse than another one at the level of the sweep.

    name: the run.
    leader: run with the highest mean at this look.
    difference: mean of its scores minus the leader's.
    upper: upper end of the interval of the difference, below 0.
    step: optimizer step of the evaluation.
    """

    name: str
    leader: str
    difference: float
    upper: float
    step: int

    def __str__(self) -> str:
        return (
            f"run {self.name!r} passes {-self.difference:.1%} fewer completions than {self.leader!r} after "
            f"step {self.step}, at least {-self.upper:.1%} at the level of the sweep"
        )


class Pruning:
    """Rule of ``Sweep(..., prune=True)``.

    The runs that the sweep begins with are compared at each evaluation, as soon as all active ones have its
    scores: evaluation k of the settings is look k, also in a sweep that is resumed. A run that is added
    later, such as a copy of the leader, has no part in the level: it stops no run and is not stopped.

    Args:
        runs: configurations of the runs that the sweep begins with.
        reward_funcs: of the sweep.
        eval_dataset: held-out prompts.
        share_base: all runs train side by side.

    Raises:
        ConfigError: the runs have no common held-out prompts, rewards and evaluations.
    """

    def __init__(
        self, runs: Mapping[str, GRPOConfig], reward_funcs: Any, eval_dataset: Any, *, share_base: bool = True
    ) -> None:
        self.names = list(runs)
        first, *others = [{name: getattr(args, name) for name in _COMMON} for args in runs.values()]
        number = len(eval_dataset) if hasattr(eval_dataset, "column_names") else 0
        number = min(number, first["eval_max_samples"] or number)
        by_run = list(reward_funcs.values()) if isinstance(reward_funcs, Mapping) else [reward_funcs]
        if any(given != by_run[0] for given in by_run):
            raise ConfigError("prune=True compares rewards, and the runs have different reward functions")
        if number < LEAST_PROMPTS:
            raise ConfigError(
                f"prune=True needs an eval_dataset of {LEAST_PROMPTS} prompts or more, not a dictionary of "
                f"datasets or a stream; an evaluation has {number}"
            )
        by_steps = first["eval_strategy"] == IntervalStrategy.STEPS and first["eval_steps"] >= 1
        if any(other != first for other in others) or not by_steps:
            raise ConfigError(
                "prune=True needs eval_strategy='steps' with a whole number of eval_steps, and the same "
                f"{', '.join(_COMMON)} in all runs"
            )
        if not share_base:
            raise ConfigError("prune=True compares runs that train side by side, and one has no adapter")
        self.eval_steps = int(first["eval_steps"])
        self._compared = 0  # newest step whose scores were compared

    def losing_runs(
        self, scores: Mapping[str, Mapping[int, torch.Tensor]], active: Collection[str]
    ) -> list[LosingRun]:
        """Return the runs to stop now; none before all active runs have the scores of a further evaluation.

        Args:
            scores: by run and optimizer step, (P,) scores of the held-out prompts.
            active: runs that still train.
        """
        # An evaluation of a script between those of the settings is no look of its own.
        waited_for = [
            {step for step in scores[name] if step % self.eval_steps == 0}
            for name in self.names
            if name in active
        ]
        step = max(set.intersection(*waited_for), default=0) if waited_for else 0
        if step <= self._compared:  # no evaluation since; at step 0 all runs are equal
            return []
        self._compared = step
        present = {name: scores[name][step] for name in self.names if step in scores[name]}
        found = losing_runs(present, step, step // self.eval_steps, len(self.names))
        return [run for run in found if run.name in active]


def losing_runs(
    scores: Mapping[str, torch.Tensor], step: int, look: int, num_runs: int, alpha: float = ALPHA
) -> list[LosingRun]:
    """Compare the leader with every other run.

    Args:
        scores: by run, (P,) scores in [0, 1] of the same P prompts in one order.
        step: optimizer step of the evaluation.
        look: number of the comparison, counted from 1.
        num_runs: runs that are ever compared: they share the level.
        alpha: probability that any run is returned at any look although no other one is better.
    """
    leader = max(scores, key=lambda name: scores[name].mean().item())
    pairs = max(num_runs * (num_runs - 1) // 2, 1)
    found = []
    for name, score_P in scores.items():
        difference_P = score_P - scores[leader]
        _, upper = gain_interval(difference_P, look, alpha / pairs)
        if upper < 0:  # never of the leader itself, whose differences are 0
            found.append(LosingRun(name, leader, difference_P.mean().item(), upper, step))
    return found


class HeldOutScores(EvaluationMetrics):
    """Evaluation metrics that also keep, by prompt, the share of completions that pass.

    Args:
        scores: receives the shares (P,) by optimizer step.
        global_step: returns the present step.
    """

    def __init__(self, scores: dict[int, torch.Tensor], global_step: Callable[[], int]) -> None:
        super().__init__()
        self._scores, self._global_step = scores, global_step
        self._passed: list[torch.Tensor] = []

    def add(
        self, rollouts: RolloutBatch, rewards: RewardBatch, config: GRPOConfig, *others: Any, **named: Any
    ) -> None:
        super().add(rollouts, rewards, config, *others, **named)
        totals_N = total_rewards(rewards.with_step_sums(), config.multi_objective_aggregation)
        # A completion without a reward (NaN) does not pass.
        self._passed.append((totals_N[: rewards.num_valid] > config.eval_pass_threshold).double().cpu())

    def compute(self, name: str, config: GRPOConfig, *arguments: Any) -> dict[str, float]:
        passed_PG = torch.cat(self._passed).view(-1, config.generations_per_eval_prompt)
        self._scores[self._global_step()], self._passed = passed_PG.mean(1), []
        return super().compute(name, config, *arguments)

    def snapshot(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(EvaluationMetrics)}

    def restore(self, snapshot: dict[str, Any]) -> None:
        super().restore(snapshot)
        self._passed = []  # of an evaluation that failed
