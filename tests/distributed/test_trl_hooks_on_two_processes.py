"""Subclasses written for TRL on two gloo processes: the run of TRL's trainer on the same two processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from support.parity_runs import Policy, largest_difference, make_policy
from support.workers import hooks_worker
from support.workers.hooks_worker import CASES
from support.workers.launch import run_ranks

pytest.importorskip("trl")
pytestmark = [pytest.mark.distributed, pytest.mark.parity]

TIMEOUT = 280  # seconds


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return make_policy(tmp_path_factory.mktemp("hooks") / "policy")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, policy: Policy) -> list[dict[str, Any]]:
    """Results of both processes, from one launch that all test processes share."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "hooks_on_two_processes"
    with FileLock(f"{directory}.lock"):
        if not (directory / "1.pt").exists():
            directory.mkdir(exist_ok=True)
            _launch(policy, directory)
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def _launch(policy: Policy, directory: Path) -> None:
    done = run_ranks(hooks_worker.__file__, policy.path, directory, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def _logged(run: dict[str, Any], name: str) -> list[float]:
    return [line[name] for line in run["log"] if "loss" in line and name in line]


@pytest.mark.parametrize("case", CASES)
def test_the_update_is_that_of_trl(ranks: list[dict[str, Any]], policy: Policy, case: str) -> None:
    ours, theirs = ranks[0][case]["ours"], ranks[0][case]["theirs"]
    start = {name: value.detach() for name, value in policy.load().named_parameters()}
    assert largest_difference(ours["parameters"], start) > 1e-3
    assert largest_difference(ours["parameters"], theirs["parameters"]) < 1e-6
    assert largest_difference(ours["parameters"], ranks[1][case]["ours"]["parameters"]) == 0


@pytest.mark.parametrize("case", CASES)
def test_hooks_see_rows_of_their_rank_and_rewards_of_all(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        ours, theirs = rank[case]["ours"], rank[case]["theirs"]
        assert ours["seen"] == theirs["seen"]
        assert all(num_rewards == 2 * rows for rows, num_rewards in ours["seen"]["rows and rewards"])


@pytest.mark.parametrize("case", CASES)
def test_steps_count_micro_batches_of_a_rank(ranks: list[dict[str, Any]], case: str) -> None:
    per_step = CASES[case].get("gradient_accumulation_steps", 1)
    for rank in ranks:
        ours, theirs = rank[case]["ours"], rank[case]["theirs"]
        assert ours["step"] == theirs["step"] == 4 * per_step  # four optimizer steps
        training = [step for step in ours["seen"]["losses at"] if step < 4 * per_step]
        assert training == list(range(4 * per_step))


@pytest.mark.parametrize("case", CASES)
def test_metrics_of_hooks_are_averaged_over_ranks(ranks: list[dict[str, Any]], case: str) -> None:
    """TRL logs those of each rank on its own; here every rank logs their mean."""
    for name in ("largest_advantage", "rows_of_rank"):
        first, second = (_logged(rank[case]["theirs"], name) for rank in ranks)
        assert first != second
        mean = [(one + other) / 2 for one, other in zip(first, second, strict=True)]
        assert _logged(ranks[0][case]["ours"], name) == pytest.approx(mean, abs=1e-6), name


@pytest.mark.parametrize("case", CASES)
def test_metrics_of_the_trainer_are_those_of_trl(ranks: list[dict[str, Any]], case: str) -> None:
    """Also those over tokens: micro-batches, and ranks within one, have different numbers of tokens."""
    ours, theirs = ranks[0][case]["ours"], ranks[0][case]["theirs"]
    names = ["loss", "grad_norm", "reward", "reward_std", "reward_doubled", "frac_reward_zero_std", "entropy"]
    names += ["completions/mean_length", "completions/min_length", "completions/max_length"]
    names += [name for name in theirs["log"][0] if name.startswith(("kl", "clip_ratio/", "vespo/", "sampl"))]
    for name in names:
        assert _logged(ours, name), name
        assert _logged(ours, name) == pytest.approx(_logged(theirs, name), rel=1e-4, abs=2e-5), name
    for name in ("eval_reward", "eval_reward_doubled"):
        assert ours["evaluation"][name] == pytest.approx(theirs["evaluation"][name], abs=2e-5), name


def test_ranks_that_keep_different_numbers_of_rows(ranks: list[dict[str, Any]]) -> None:
    kept = [rank["dapo, filtered"]["ours"]["seen"]["kept"] for rank in ranks]
    assert kept[0] != kept[1] and all(min(rows) < 6 for rows in kept)  # of 6 rows per generation
