"""Objectives beyond TRL's against scalar loops: value and gradient in float64.

Files: ``core/variants.py``.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from support.oracles import cases, oracle_variants
from support.oracles.oracle import Choices, loss_and_gradient, update_weights

from groupwise.core.advantages import ADVANTAGES, AdvantageSettings
from groupwise.core.objectives import OBJECTIVES, ObjectiveSettings
from groupwise.core.variants import DPPOSettings, GMPOSettings
from groupwise.core.weights import WindowCounts
from groupwise.records.rollout import GroupRewards

FLAT, BY_TOKEN = cases.batch(), cases.batch(per_token_advantages=True)
GROUPS = [[[4] * 4 + [5] * 4, cases.GROUPS], [[4] * 4 + [5] * 4, [4] * 4 + [5] * 4]]


def check(name: str, b, settings: object, expected: tuple[float, list], **options) -> None:
    terms = cases.core_terms(name, b)
    chosen = ObjectiveSettings(loss_type=name, surrogate=settings, **options)
    loss, _ = cases.evaluate(terms, chosen)
    (gradient,) = torch.autograd.grad(loss, terms.logps_BT)
    assert loss.item() == pytest.approx(expected[0], rel=1e-11)
    torch.testing.assert_close(gradient, cases.tensor(expected[1]), rtol=1e-10, atol=1e-14)
    assert gradient.abs().max() > 1e-3


def weights(normalizer: str) -> list[list[float]]:
    rows = update_weights(normalizer, cases.WINDOW, cases.L_MAX)[0][1]
    return [[w * len(cases.WINDOW) for w in row] for row in rows]


@pytest.mark.parametrize("b", [replace(FLAT, sampler=None), replace(BY_TOKEN, sampler=None)])
def test_gspo_token(b):
    c = Choices(epsilon_low=0.15, epsilon_high=0.3)
    settings = cases.core_settings("grpo", c).surrogate
    check("gspo_token", b, settings, oracle_variants.gspo_token(b, weights("sequence_mean"), c))


def test_gspo_token_is_gspo_with_one_advantage_per_sequence():
    b = replace(FLAT, sampler=None, ref=None)
    c = Choices(level="sequence", epsilon_low=0.15, epsilon_high=0.3)
    settings = cases.core_settings("grpo", c).surrogate
    check("gspo_token", b, settings, loss_and_gradient("grpo", b, weights("sequence_mean"), c))


@pytest.mark.parametrize("bounds", [(0.4, 0.4), (0.1, 0.25), (0.3, 0.05)])
def test_gmpo(bounds):
    b = replace(FLAT, sampler=None)
    sequences = cases.counts().sequences / len(cases.WINDOW)  # gradients are averaged over ranks afterwards
    check("gmpo", b, GMPOSettings(*bounds), oracle_variants.gmpo(b, sequences, *bounds))


@pytest.mark.parametrize("sampler", [False, True])
@pytest.mark.parametrize("bounds", [(0.15, 0.15), (0.02, 0.1), (0.1, 0.02)])
@pytest.mark.parametrize("mode", [None, "token_mask"])
def test_dppo(sampler, bounds, mode):
    """The correction mode has no effect: the surrogate's ratio is that to the sampler already."""
    b = BY_TOKEN if sampler else replace(BY_TOKEN, sampler=None)
    expected = oracle_variants.dppo(b, weights("token_mean"), *bounds)
    unmasked = oracle_variants.dppo(b, weights("token_mean"), 1.0, 1.0)
    assert expected[1] != unmasked[1]
    check("dppo", b, DPPOSettings(*bounds), expected, vllm_importance_sampling_mode=mode)


def test_prompt_mean_over_micro_batches_and_ranks():
    expected = oracle_variants.prompt_mean(cases.WINDOW, GROUPS)
    total = 0.0
    for r, (mask_rank, group_rank) in enumerate(zip(cases.WINDOW, GROUPS, strict=True)):
        for m, (mask, groups) in enumerate(zip(mask_rank, group_rank, strict=True)):
            got = cases.weights("prompt_mean", cases.tensor(mask), cases.counts(), torch.tensor(groups))
            averaged = got / len(cases.WINDOW)
            torch.testing.assert_close(averaged, cases.tensor(expected[r][m]), rtol=1e-14, atol=0.0)
            total += averaged.sum().item()
    assert total == pytest.approx(1.0)  # every prompt of the window has loss tokens


def test_a_prompt_without_loss_tokens_still_counts():
    """Two prompts, one truncated away: the tokens of the other weigh 1 / (2 · 3), not 1 / 3."""
    counts = WindowCounts(2, 3, 1, 1, 4, {7: 3, 9: 0})
    mask = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    got = cases.weights("prompt_mean", mask, counts, torch.tensor([7, 9]))
    assert got.tolist() == [[pytest.approx(1 / 6)] * 3, [0.0] * 3]


def test_scalerl_is_cispo_weighted_by_prompt():
    c = Choices(epsilon_high=1.3)
    b = replace(BY_TOKEN, ref=None, sampler=None)
    rows = oracle_variants.prompt_mean(cases.WINDOW, GROUPS)[0][1]
    rows = [[w * len(cases.WINDOW) for w in row] for row in rows]
    settings = cases.core_settings("cispo", c).surrogate
    check("scalerl", b, settings, loss_and_gradient("cispo", b, rows, c))


@pytest.mark.parametrize(
    "rewards",
    [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.5, 0.0], [0.0] * 4, [None, 1.0, 0.0, 0.0], [None] * 4],
    ids=str,
)
def test_maxrl(rewards):
    rewards = [*rewards, 2.0, 1.0, 3.0, 0.0]
    column = [[float("nan") if r is None else r] for r in rewards]
    group = GroupRewards(torch.tensor(column, dtype=torch.float64), torch.ones(1, dtype=torch.float64), 4)
    got = ADVANTAGES["maxrl"](group, AdvantageSettings())
    assert got.tolist() == pytest.approx(oracle_variants.maxrl(rewards, 4), rel=1e-14)


def test_maxrl_refuses_negative_and_step_rewards():
    negative = GroupRewards(torch.tensor([[1.0], [-1.0]]), torch.ones(1), 2)
    steps = replace(negative, rewards_NF=torch.ones(2, 1), step_rewards={0: [[(0, 1.0)], [(0, 2.0)]]})
    for rewards in (negative, steps):
        with pytest.raises(ValueError, match="'maxrl' needs one non-negative reward per completion"):
            ADVANTAGES["maxrl"](rewards, AdvantageSettings())


def test_defaults_are_those_of_the_papers():
    assert asdict(OBJECTIVES["gmpo"].settings()) == {"epsilon_low": 0.4, "epsilon_high": 0.4}
    assert asdict(OBJECTIVES["dppo"].settings()) == {"delta_low": 0.15, "delta_high": 0.15}
