"""Every objective against TRL: the same completions, rewards and model must give the same parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.parity_runs import (
    OBJECTIVES,
    Policy,
    Setting,
    assert_same_log,
    assert_same_update,
    train_groupwise,
    train_trl,
)

pytest.importorskip("trl", minversion="1.16.0")
pytestmark = pytest.mark.parity

CLIP_METRICS = {"cispo": "cispo_clip_ratio", "sapo": None, "vespo": None}


@pytest.mark.slow
# tests/reference compares every loss at both levels, with and without the KL term, with scalar loops.
@pytest.mark.parametrize(
    ("loss_type", "level", "num_iterations", "beta"),
    [
        *((loss_type, "token", 2, 0.04) for loss_type in OBJECTIVES),
        *((loss_type, "sequence", 2, 0.04) for loss_type in ("grpo", "dapo", "luspo")),
        *((loss_type, "token", 1, 0.0) for loss_type in ("grpo", "vespo")),
    ],
)
def test_four_steps_match(
    loss_type: str, level: str, num_iterations: int, beta: float, policy: Policy, tmp_path: Path
) -> None:
    setting = Setting(
        {
            **OBJECTIVES[loss_type],
            "importance_sampling_level": level,
            "num_iterations": num_iterations,
            "beta": beta,
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
