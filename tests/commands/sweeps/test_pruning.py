"""Pruning: which runs are stopped, and false stops of sweeps whose runs are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from groupwise import GRPOConfig
from groupwise.commands.sweeps.pruning import Pruning, losing_runs
from groupwise.core.confidence import LEAST_PROMPTS, gain_interval, look_level, student_quantile
from groupwise.errors import ConfigError

RUNS, LOOKS, SWEEPS = 4, 20, 2000


def test_a_run_loses_when_the_interval_to_the_leader_is_below_zero():
    generator = torch.Generator().manual_seed(0)
    good_P = torch.randint(2, 5, (100,), generator=generator) / 4
    scores = {"bad": (good_P - 0.5).clamp(min=0), "good": good_P, "near": (good_P - 0.01).clamp(min=0)}
    (found,) = losing_runs(scores, step=10, look=1, num_runs=3)
    assert (found.name, found.leader, found.step) == ("bad", "good", 10)
    difference_P = scores["bad"] - good_P
    # Three pairs share the level of a look.
    assert found.upper == gain_interval(difference_P, 1, 0.05 / 3)[1] < 0
    assert found.difference == pytest.approx(difference_P.mean().item())


def test_a_later_look_and_more_runs_need_a_larger_difference():
    better_P = torch.full((40,), 0.5)
    better_P[:10] = 1.0
    scores = {"a": torch.full((40,), 0.5), "b": better_P}
    assert [run.name for run in losing_runs(scores, 1, 1, 2)] == ["a"]
    assert losing_runs(scores, 1, 30, 2) == [] == losing_runs(scores, 1, 1, 200)
    assert losing_runs({"a": torch.zeros(50)}, 1, 1, 4) == []  # the last run is compared with none


def made(
    tmp_path: Path, *, rewards: Any = None, prompts: int = 20, alone: bool = False, **changes: dict[str, Any]
) -> Pruning:
    common = {"eval_strategy": "steps", "eval_steps": 5, "use_cpu": True, "bf16": False}
    runs: dict[str, GRPOConfig] = {
        name: GRPOConfig(str(tmp_path / name), **{**common, **changes.get(name, {})}) for name in "abc"
    }
    return Pruning(runs, rewards, Dataset.from_dict({"prompt": ["w"] * prompts}), share_base=not alone)


def test_runs_are_compared_once_per_evaluation_when_all_active_ones_have_its_scores(tmp_path):
    pruning, low_P, high_P = made(tmp_path), torch.zeros(20), torch.ones(20)
    scores: dict[str, dict[int, torch.Tensor]] = {name: {0: low_P} for name in "abc"}
    scores["a"][0] = high_P
    assert pruning.losing_runs(scores, "abc") == []  # before the first step
    for name in "abc":  # an evaluation of a script, between those of the settings
        scores[name][3] = scores[name][0]
    assert pruning.losing_runs(scores, "abc") == []
    scores["a"][5], scores["b"][5] = high_P, low_P
    assert pruning.losing_runs(scores, "abc") == []  # c is missing
    scores["c"][5] = high_P
    (found,) = pruning.losing_runs(scores, "abc")
    assert (found.name, found.step) == ("b", 5)
    assert pruning.losing_runs(scores, "abc") == []  # a second look at the same scores
    # A run that has stopped is not waited for, and is not stopped again; a copy is not compared.
    scores["a"][10], scores["c"][10], scores["copy"] = high_P, low_P, {10: high_P}
    (found,) = pruning.losing_runs(scores, ["a", "c", "copy"])
    assert (found.name, found.leader) == ("c", "a")
    assert found.upper == gain_interval(low_P - high_P, 2, 0.05 / 3)[1]
    assert pruning.losing_runs(scores, ["copy"]) == []
    scores["a"][15], scores["c"][15] = high_P, low_P  # c was stopped after this evaluation
    assert pruning.losing_runs(scores, "a") == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": {"a": [len], "b": [max], "c": [len]}}, "different reward functions"),
        ({"prompts": LEAST_PROMPTS - 1}, "eval_dataset of 20 prompts or more.*has 19"),
        ({name: {"eval_max_samples": 7} for name in "abc"}, "an evaluation has 7"),
        ({name: {"eval_steps": 0.1} for name in "abc"}, "a whole number of eval_steps"),
        ({"alone": True}, "one has no adapter"),
        ({"b": {"eval_steps": 6}}, "the same .*reward_weights"),
        ({"c": {"reward_weights": [2.0]}}, "the same .*reward_weights"),
        ({name: {"eval_strategy": "epoch"} for name in "abc"}, "eval_strategy='steps'"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        made(tmp_path, **changes)
    assert made(tmp_path, rewards={name: [len] for name in "abc"}).eval_steps == 5


def rate_of_stops(prompts: int, completions: int, spread: float, worse: float, seed: int) -> float:
    """Share of simulated sweeps that stop a run, which is worse than the others by ``worse``.

    A prompt has a probability to pass, the same for all equal runs, which moves from look to look by
    ``spread`` for each run of its own: runs differ at a prompt, and not on average.
    """
    generator = torch.Generator().manual_seed(seed)
    easy_P = torch.rand(SWEEPS, 1, prompts, generator=generator)
    stopped = torch.zeros(SWEEPS, dtype=torch.bool)
    for look in range(1, LOOKS + 1):
        moved = spread * torch.randn(SWEEPS, RUNS, prompts, generator=generator)
        share = easy_P.expand(-1, RUNS, -1) + moved.clamp(-0.1, 0.1)
        share = 0.1 + 0.8 * share.clamp(0, 1)
        share[:, 0] -= worse
        passed = torch.rand(completions, *share.shape, generator=generator) < share
        scores = passed.float().mean(0)  # (SWEEPS, RUNS, P)
        # Nine tenths of the interval's half-width, for all sweeps at once: where no difference exceeds it, no
        # run can be stopped, and the rule is not asked.
        leader = scores[torch.arange(SWEEPS), scores.mean(-1).argmax(1)].unsqueeze(1)
        behind = leader - scores
        spread_of_mean = (
            ((behind.square().sum(-1) + 2) / (prompts + 1)).sub(behind.mean(-1).square()).clamp(min=0)
        )
        quantile = student_quantile(1 - look_level(look) / 6 / 2, prompts + 1)
        possible = (behind.mean(-1) > 0.9 * quantile * (spread_of_mean / (prompts + 2)).sqrt()).any(1)
        for index in (possible & ~stopped).nonzero().flatten().tolist():
            runs = {str(run): scores[index, run] for run in range(RUNS)}
            stopped[index] = bool(losing_runs(runs, look, look, RUNS))
    return stopped.double().mean().item()


@pytest.mark.parametrize(("prompts", "completions", "spread"), [(20, 4, 0.0), (100, 1, 0.0), (100, 4, 0.05)])
def test_at_most_five_per_cent_of_the_sweeps_of_equal_runs_stop_one(prompts, completions, spread):
    assert rate_of_stops(prompts, completions, spread, 0.0, seed=prompts + completions) <= 0.05


def test_a_worse_run_is_stopped():
    assert rate_of_stops(100, 4, 0.0, 0.1, seed=3) > 0.9
