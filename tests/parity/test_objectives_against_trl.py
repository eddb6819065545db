"""Every objective against TRL: the same completions, rewards and model must give the same parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
from parity_runs import Policy, Setting, assert_same_log, assert_same_update, train_groupwise, train_trl

pytest.importorskip("trl", minversion="1.16.0")
pytestmark = pytest.mark.parity

#: Sums over tokens are larger than means over them; cispo's upper bound is on the ratio itself.
OWN_OPTIONS = {"luspo": {"learning_rate": 0.005}, "cispo": {"epsilon_high": 1.02}}
CLIP_METRICS = {"cispo": "cispo_clip_ratio", "sapo": None, "vespo": None}


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("num_iterations", [1, 2])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"])
def test_four_steps_match(
    loss_type: str, level: str, num_iterations: int, beta: float, policy: Policy, tmp_path: Path
) -> None:
    """The clip range is narrow so that the second pass over a generation leaves it on both sides."""
    setting = Setting(
        {
            "loss_type": loss_type,
            "importance_sampling_level": level,
            "num_iterations": num_iterations,
            "beta": beta,
            "learning_rate": 0.03,
            "epsilon": 0.01,
            "epsilon_high": 0.02,
            **OWN_OPTIONS.get(loss_type, {}),
        }
    )
    ours = train_groupwise(policy, setting, tmp_path / "ours")
    theirs = train_trl(policy, setting, tmp_path / "theirs")
    assert_same_update(ours, theirs, policy)
    assert_same_log(ours, theirs)
    clipped = CLIP_METRICS.get(loss_type, "clip_ratio/region_mean")
    if clipped is not None:
        assert (max(ours.logged(clipped)) > 0) == (num_iterations == 2)
    if beta != 0:
        assert ours.logged("kl")[-1] > 1e-6  # the policy has left its reference
