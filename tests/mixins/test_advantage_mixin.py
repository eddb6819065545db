"""The settings that choose an advantage."""

from __future__ import annotations

import pytest
import torch
from support.fakes.mixin_hosts import host

from groupwise.mixins import AdvantageMixin
from groupwise.records import RewardBatch
from groupwise.records.rollout import GroupRewards

TABLE = GroupRewards(
    torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 5.0], [0.0, 6.0]]), torch.tensor([1.0, 1.0]), 2
)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # groups 1, 3 and 5, 6: minus their means 2 and 5.5, minus the other one with leave-one-out
        ({}, [-1.0, 1.0, -0.5, 0.5]),
        ({"advantage_baseline": "leave_one_out"}, [-2.0, 2.0, -1.0, 1.0]),
        # both groups have one varying function, so after normalising and whitening all are alike
        ({"multi_objective_aggregation": "normalize_then_sum"}, [-0.866, 0.866, -0.866, 0.866]),
        ({"scale_rewards": "group"}, [-0.707, 0.707, -0.707, 0.707]),
    ],
)
def test_advantages_follow_the_settings(settings, expected):
    given = {
        "scale_rewards": "none",
        "multi_objective_aggregation": "sum_then_normalize",
        "advantage_baseline": "group_mean",
        **settings,
    }
    advantages = host(AdvantageMixin, settings=given).compute_advantages(
        RewardBatch(**vars(TABLE), local=slice(0, 4))
    )
    assert advantages.tolist() == pytest.approx(expected, abs=1e-3)
