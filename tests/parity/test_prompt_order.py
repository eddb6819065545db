"""Prompts of every epoch in TRL's order, read when TRL reads them, and the loader that scripts iterate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.parity_runs import Policy
from support.workers import launch, prompt_order
from support.workers.prompt_order import CASES, Seen

pytest.importorskip("trl", minversion="1.16.0")
pytestmark = pytest.mark.parity


def assert_like_trl(found: dict[str, Seen]) -> None:
    assert found["plain"] == found["trl"]
    assert found["hooks"] == found["trl"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "read by a worker"])
def test_shuffled_prompts_have_trls_order_in_every_epoch(name: str, policy: Policy, tmp_path: Path) -> None:
    found = prompt_order.compare(policy, tmp_path, CASES[name])
    assert_like_trl(found)
    per_epoch = len(found["trl"]) // CASES[name]["num_train_epochs"]
    assert found["trl"][:per_epoch] != found["trl"][per_epoch : 2 * per_epoch]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a window is half a generation", "a window is two generations"])
def test_a_sampler_that_follows_rewards_is_read_when_trl_reads_it(
    name: str, policy: Policy, tmp_path: Path
) -> None:
    found = prompt_order.compare(policy, tmp_path, CASES[name], follows_rewards=True)
    assert found["hooks"] == found["trl"]


@pytest.mark.slow
def test_a_run_resumes_inside_a_later_epoch(policy: Policy, tmp_path: Path) -> None:
    # 16 steps an epoch, 4 per generation: inside the second
    found = prompt_order.resumed(policy, tmp_path, CASES["a window is half a generation"], 22)
    for trainer in ("plain", "hooks"):
        whole, again = found[trainer], found[f"{trainer} resumed"]
        assert again and again == whole[-len(again) :]
    assert found["plain"] == found["hooks"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["read by a worker", "a window is half a generation"])
def test_the_train_dataloader_yields_trls_items(name: str, policy: Policy, tmp_path: Path) -> None:
    found = prompt_order.items(policy, tmp_path, CASES[name])
    assert_like_trl(found)
    # The last entry is of the run, which begins at the first item whatever a script has read.
    assert found["plain"][-1] == found["plain"][0]


@pytest.mark.slow
def test_a_subclass_resamples_from_the_train_dataloader(policy: Policy, tmp_path: Path) -> None:
    found = prompt_order.resample(policy, tmp_path, CASES["windows of a generation"])
    assert found["hooks"] == found["trl"]


@pytest.mark.slow
def test_two_ranks_see_the_prompts_that_trls_see(policy: Policy, tmp_path: Path) -> None:
    done = launch.run_ranks(prompt_order.__file__, policy.path, tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert_like_trl(found["shuffled"])
        assert found["follows rewards"]["hooks"] == found["follows rewards"]["trl"]
