"""Adding objectives and advantages of one's own."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.core.advantages import (
    ADVANTAGES,
    AGGREGATIONS,
    AdvantageSettings,
    GroupRewards,
    register_advantage,
    register_aggregation,
    total_rewards,
)
from groupwise.core.metrics import Sum
from groupwise.core.objectives import (
    OBJECTIVES,
    ObjectiveSettings,
    ObjectiveTerms,
    evaluate,
    register_objective,
)


def terms(**extra) -> ObjectiveTerms:
    return ObjectiveTerms(
        logps_BT=torch.tensor([[-1.0, -2.0]], requires_grad=True),
        advantages_BX=torch.tensor([[3.0]]),
        mask_BT=torch.ones(1, 2),
        weights_BT=torch.tensor([[0.5, 0.5]]),
        **extra,
    )


def reinforce(t, settings):
    return -t.advantages_BX * t.logps_BT


def test_a_registered_objective_is_used():
    register_objective(
        "mine", reinforce, "token_mean", diagnostics=lambda t, s: {"seen": Sum(t.mask_BT.sum())}
    )
    t = terms()
    loss, metrics = evaluate(t, ObjectiveSettings(objective="mine"))
    # −3 · (−1 − 2) · 0.5 = 4.5
    assert loss.item() == 4.5
    assert metrics["seen"].value() == 2.0
    assert torch.autograd.grad(loss, t.logps_BT)[0].tolist() == [[-1.5, -1.5]]


@pytest.mark.parametrize("folds", [False, True])
def test_a_registered_objective_may_fold_the_correction_in(folds):
    seen = []

    def surrogate(t, settings):
        seen.append(t.log_correction_BX)
        return reinforce(t, settings)

    register_objective("mine", surrogate, "token_mean", applies_sampler_correction=folds)
    sampler = torch.tensor([[-1.0 - math.log(2.0), -2.0]])
    loss, _ = evaluate(
        terms(sampler_logps_BT=sampler), ObjectiveSettings(objective="mine", correction_mode="token_truncate")
    )
    if folds:
        assert seen[0].tolist() == [pytest.approx([math.log(2.0), 0.0])]
        assert loss.item() == 4.5
    else:
        # The first token counts twice: 3 · (2 · 1 + 2) · 0.5
        assert seen == [None]
        assert loss.item() == pytest.approx(6.0)


def test_duplicate_objective_is_refused():
    with pytest.raises(ValueError, match=r"'dapo' is already registered; registered: bnpo, cispo, dapo"):
        register_objective("dapo", reinforce, "token_mean")
    assert OBJECTIVES["dapo"].surrogate is not reinforce


def test_unknown_normaliser_is_refused():
    with pytest.raises(
        ValueError, match=r"normalizer='per_token' is unknown; allowed: constant_length, local"
    ):
        register_objective("other", reinforce, "per_token")
    assert "other" not in OBJECTIVES


def test_a_registered_advantage_is_used():
    register_advantage("raw", lambda rewards, settings: rewards.rewards_NF.sum(-1))
    rewards = GroupRewards(torch.tensor([[1.0, 2.0]]), torch.ones(2), 1)
    assert ADVANTAGES["raw"](rewards, AdvantageSettings()).tolist() == [3.0]


def test_duplicate_advantage_is_refused():
    before = ADVANTAGES["group_mean"]
    with pytest.raises(
        ValueError, match=r"'group_mean' is already registered; registered: group_mean, leave_one"
    ):
        register_advantage("group_mean", lambda rewards, settings: rewards.rewards_NF)
    assert ADVANTAGES["group_mean"] is before


def worst(rewards_NF, weights_F, num_generations):
    return (rewards_NF * weights_F).amin(-1)


def test_a_registered_aggregation_combines_the_raw_rewards():
    """min(1, 5) = 1 and min(3, 2) = 2: mean 1.5."""
    register_aggregation("worst", worst)
    rewards = GroupRewards(torch.tensor([[1.0, 5.0], [3.0, 2.0]]), torch.ones(2), 2)
    assert total_rewards(rewards, "worst").tolist() == [1.0, 2.0]
    advantages = ADVANTAGES["group_mean"](rewards, AdvantageSettings("none", "worst"))
    assert advantages.tolist() == [-0.5, 0.5]


def test_a_registered_aggregation_may_get_normalised_rewards():
    """Normalised, the functions give (-1, 1) / √2 and (1, -1) / √2: the minima are equal."""
    register_aggregation("worst", worst, normalize_first=True)
    rewards = GroupRewards(torch.tensor([[1.0, 5.0], [3.0, 3.0]]), torch.ones(2), 2)
    advantages = ADVANTAGES["group_mean"](rewards, AdvantageSettings("none", "worst"))
    assert advantages.tolist() == pytest.approx([0.0, 0.0], abs=1e-3)
    assert total_rewards(rewards, "worst").tolist() == [1.0, 3.0]


def test_an_aggregation_must_return_one_reward_per_completion():
    register_aggregation("wide", lambda rewards_NF, weights_F, num_generations: rewards_NF)
    rewards = GroupRewards(torch.tensor([[1.0, 5.0], [3.0, 2.0]]), torch.ones(2), 2)
    with pytest.raises(ValueError, match=r"'wide' returned a tensor of shape \(2, 2\); expected \(2,\)"):
        total_rewards(rewards, "wide")


def test_duplicate_aggregation_is_refused():
    before = AGGREGATIONS["sum_then_normalize"]
    with pytest.raises(ValueError, match=r"is already registered; registered: normalize_then_sum, sum_then"):
        register_aggregation("sum_then_normalize", worst)
    assert AGGREGATIONS["sum_then_normalize"] is before
