"""Registration of objectives, normalizers and advantages.

Files: ``core/advantages.py``, ``core/objectives.py``, ``core/weights.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from support.oracles.cases import Terms, evaluate, weights

from groupwise.core.advantages import (
    ADVANTAGES,
    AGGREGATIONS,
    AdvantageSettings,
    register_advantage,
    register_aggregation,
    total_rewards,
)
from groupwise.core.metrics import Sum
from groupwise.core.objectives import OBJECTIVES, ObjectiveSettings, register_objective
from groupwise.core.surrogates import SurrogateSettings
from groupwise.core.weights import NORMALIZERS, WindowCounts, register_normalizer
from groupwise.records.rollout import GroupRewards


def terms(**extra) -> Terms:
    return Terms(
        logps_BT=torch.tensor([[-1.0, -2.0]], requires_grad=True),
        advantages_BX=torch.tensor([[3.0]]),
        loss_mask_BT=torch.ones(1, 2),
        token_weights_BT=torch.tensor([[0.5, 0.5]]),
        **extra,
    )


def reinforce(inputs, settings):
    return -inputs.advantages_BX * inputs.logps_BT


def test_a_registered_objective_is_used():
    register_objective(
        "mine", reinforce, "token_mean", diagnostics=lambda t, s: {"seen": Sum(t.loss_mask_BT.sum())}
    )
    t = terms()
    loss, metrics = evaluate(t, ObjectiveSettings(loss_type="mine"))
    # −3 · (−1 − 2) · 0.5 = 4.5
    assert loss.item() == 4.5
    assert metrics["seen"].value() == 2.0
    assert torch.autograd.grad(loss, t.logps_BT)[0].tolist() == [[-1.5, -1.5]]


@pytest.mark.parametrize("applies", [False, True])
def test_a_registered_objective_may_apply_the_sampler_correction(applies):
    seen = []

    def surrogate(inputs, settings):
        seen.append(inputs.log_correction_BX)
        return reinforce(inputs, settings)

    register_objective("mine", surrogate, "token_mean", applies_sampler_correction=applies)
    sampler = torch.tensor([[-1.0 - math.log(2.0), -2.0]])
    loss, _ = evaluate(
        terms(sampler_logps_BT=sampler),
        ObjectiveSettings(loss_type="mine", vllm_importance_sampling_mode="token_truncate"),
    )
    if applies:
        assert seen[0].tolist() == [pytest.approx([math.log(2.0), 0.0])]
        assert loss.item() == 4.5
    else:
        # The first token counts twice: 3 · (2 · 1 + 2) · 0.5
        assert seen == [None]
        assert loss.item() == pytest.approx(6.0)


def test_a_surrogate_gets_every_log_prob_with_zeros_off_the_mask():
    """Row 0 has one loss token; NaN is on-policy in ``old`` and not reported in ``sampler``."""
    seen = []
    register_objective("mine", lambda inputs, s: seen.append(inputs) or inputs.logps_BT, "token_mean")
    nan = math.nan
    given = Terms(
        logps_BT=torch.tensor([[-1.0, 9.0], [-3.0, -4.0]], requires_grad=True),
        advantages_BX=torch.tensor([[1.0], [2.0]]),
        loss_mask_BT=torch.tensor([[1, 0], [1, 1]]),
        token_weights_BT=torch.ones(2, 2),
        old_logps_BT=torch.tensor([[nan, nan], [-2.5, nan]]),
        ref_logps_BT=torch.tensor([[-0.5, 7.0], [-0.25, -0.125]]),
        sampler_logps_BT=torch.tensor([[-1.5, nan], [nan, -4.5]]),
        group_ids_B=torch.tensor([4, 5]),
    )
    evaluate(
        given,
        ObjectiveSettings(
            loss_type="mine", vllm_importance_sampling_mode=None, importance_sampling_level="sequence"
        ),
    )
    (inputs,) = seen
    assert inputs.logps_BT.tolist() == [[-1.0, 0.0], [-3.0, -4.0]]
    assert inputs.old_logps_BT.tolist() == [[-1.0, 0.0], [-2.5, -4.0]]
    assert inputs.ref_logps_BT.tolist() == [[-0.5, 0.0], [-0.25, -0.125]]
    assert inputs.sampler_logps_BT.tolist() == [[-1.5, 0.0], [-2.5, -4.5]]
    assert inputs.log_ratio_BT.tolist() == [[0.0, 0.0], [-0.5, 0.0]]
    assert inputs.ratio_BX.tolist() == [[1.0], [pytest.approx(math.exp(-0.25))]]
    assert inputs.lengths_B1.tolist() == [[1.0], [2.0]]
    assert inputs.group_ids_B.tolist() == [4, 5]


@dataclass(frozen=True)
class Power:
    exponent: float = 1.0


def test_an_objective_with_settings_of_its_own_gets_an_instance():
    def powered(inputs, settings: Power):
        return -(inputs.advantages_BX**settings.exponent) * inputs.logps_BT

    register_objective("mine", powered, "token_mean", settings=Power)
    own = OBJECTIVES["mine"].surrogate_settings(SurrogateSettings(), {"exponent": 2.0})
    assert own == Power(2.0)
    # −3² · (−1 − 2) · 0.5 = 13.5
    assert evaluate(terms(), ObjectiveSettings(loss_type="mine", surrogate=own))[0].item() == 13.5
    with pytest.raises(TypeError, match="exponential"):
        OBJECTIVES["mine"].surrogate_settings(SurrogateSettings(), {"exponential": 2.0})


def test_an_objective_without_settings_gets_the_built_in_ones():
    built_in = SurrogateSettings(epsilon_low=0.1)
    assert OBJECTIVES["dapo"].surrogate_settings(built_in, {}) is built_in


def test_duplicate_objective_is_refused():
    with pytest.raises(ValueError, match=r"'dapo' is already registered; registered: bnpo, cispo, dapo"):
        register_objective("dapo", reinforce, "token_mean")
    assert OBJECTIVES["dapo"].surrogate is not reinforce


def test_unknown_normalizer_is_refused():
    with pytest.raises(
        ValueError,
        match=r"unknown normalizer 'per_token'; registered: .*; nearest valid: 'token_mean'",
    ):
        register_objective("other", reinforce, "per_token")
    assert "other" not in OBJECTIVES


def test_a_registered_normalizer_is_used():
    """Square root of the length: 3 of 4 tokens, so 1 / √3 per token over 2 sequences."""
    register_normalizer(
        "root", lambda rows, counts: rows.mask_BT / (counts.sequences * rows.lengths_B1.clamp(min=1).sqrt())
    )
    register_objective("mine", reinforce, "root")
    assert OBJECTIVES["mine"].normalizer == "root" and not NORMALIZERS["root"].needs_group_tokens
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    share = 1 / (2 * math.sqrt(3))
    got = weights("root", mask, WindowCounts(2, 3, 1, 1, 4))
    assert got.tolist() == [pytest.approx([share, share, 0.0, share])]


def test_duplicate_normalizer_is_refused():
    before = NORMALIZERS["token_mean"]
    with pytest.raises(ValueError, match=r"'token_mean' is already registered; registered: constant_length"):
        register_normalizer("token_mean", lambda rows, counts: rows.mask_BT)
    assert NORMALIZERS["token_mean"] is before


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
