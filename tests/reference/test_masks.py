"""Entropy quantile and bonus, off-policy mask, sampler correction, adaptive control, against the loops.

Files: ``core/entropy.py``, ``core/ratios.py``.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from support.oracles import cases
from support.oracles.oracle import (
    Choices,
    adaptive_entropy,
    corrections,
    dropped,
    finite_or_zero,
    loss_and_gradient,
    quantile,
    top_entropy_mask,
)

from groupwise.core.entropy import EntropyControl, entropy_threshold
from groupwise.core.ratios import CORRECTION_MODES, off_policy_keep, sampler_correction, sampler_log_gap

TOPS = [1.0, 0.8, 0.5, 0.2, 0.03, 0.0]


def entropies() -> list[list[float]]:
    rng = random.Random(5)
    return [[round(abs(rng.gauss(1, 1)), 2) for _ in range(cases.WIDTH)] for _ in cases.MASK]


@pytest.mark.parametrize("top", TOPS)
@pytest.mark.parametrize("n", [1, 2, 3, 10, 37])
def test_entropy_threshold(top, n):
    rng = random.Random(n)
    values = [rng.random() for _ in range(n)]
    got = entropy_threshold(torch.tensor(values, dtype=torch.float64), top)
    assert got.item() == pytest.approx(quantile(values, 1 - top), rel=1e-12)
    reference = torch.quantile(torch.tensor(values, dtype=torch.float64), 1 - top)
    assert got.item() == pytest.approx(reference.item(), rel=1e-12)


@pytest.mark.parametrize("top", TOPS)
def test_top_entropy_mask(top):
    values, mask = entropies(), cases.MASK
    tensor, on = cases.tensor(values), cases.tensor(mask).bool()
    keep = tensor >= entropy_threshold(tensor[on], top)
    assert (keep & on).double().tolist() == (cases.tensor(top_entropy_mask(values, mask, top)) * on).tolist()
    # Ten per cent of 10 distinct tokens is one token, and so on; ties can only add some.
    assert (keep & on).sum() >= math.floor(top * on.sum())


def test_the_whole_quantile_keeps_every_token_even_when_all_are_equal():
    values = torch.full((9,), 0.1)
    for top in TOPS:
        assert bool((values >= entropy_threshold(values, top)).all())


def test_the_entropy_threshold_has_the_precision_of_the_entropies():
    assert entropy_threshold(torch.rand(9), 0.2).dtype == torch.float32  # some devices have no float64


def test_the_entropy_threshold_without_tokens_is_infinite():
    assert entropy_threshold(torch.zeros(0), 0.2).item() == math.inf


@pytest.mark.parametrize("sampler", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("threshold", [-0.2, 0.1, 0.45])
def test_off_policy_mask_by_threshold(sampler, per_token, threshold):
    b = cases.batch(per_token_advantages=per_token, sampler=sampler)
    advantages = cases.tensor(b.advantages)
    keep = off_policy_keep(
        advantages if per_token else advantages[:, :1],
        cases.tensor(b.logps),
        cases.tensor(b.sampler if sampler else b.old),
        cases.tensor(b.mask),
        threshold,
    ).expand_as(advantages)
    c = Choices(threshold=threshold)
    for i, row in enumerate(b.mask):
        for t, m in enumerate(row):
            if m:
                assert keep[i, t].item() == float(not dropped(b, i, t, c)), (i, t)
    assert not keep.requires_grad


def test_off_policy_threshold_itself_is_kept():
    """Drift (0.5 + 0.25) / 2 = 0.375, exact in binary: dropped only when it exceeds the threshold."""
    logps, behaviour = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-0.5, -0.75]])
    for threshold, kept in [(0.375, 1.0), (0.374, 0.0)]:
        keep = off_policy_keep(torch.tensor([[-1.0]]), logps, behaviour, torch.ones(1, 2), threshold)
        assert keep.tolist() == [[kept]]


@pytest.mark.parametrize("mode", sorted(CORRECTION_MODES))
@pytest.mark.parametrize(
    "bounds", [(None, None), (None, 1.7), (0.8, None), (0.8, 1.5), (1.1, 1.5), (None, 0.9)]
)
def test_sampler_correction(mode, bounds):
    b = cases.batch()
    mask = cases.tensor(b.mask)
    gap = sampler_log_gap(cases.tensor(b.old), cases.tensor(b.sampler), mask)
    got = sampler_correction(gap, mode, *bounds)
    assert got.shape == (
        (len(cases.MASK), 1) if mode.startswith("sequence") else (len(cases.MASK), cases.WIDTH)
    )
    expected, _ = corrections(b, Choices(mode=mode, c_min=bounds[0], c_max=bounds[1]))
    torch.testing.assert_close(
        got.expand_as(mask) * mask, cases.tensor(expected) * mask, rtol=1e-12, atol=0.0
    )


def test_sampler_gap():
    b = cases.batch()
    got = sampler_log_gap(cases.tensor(b.old), cases.tensor(b.sampler), cases.tensor(b.mask))
    for i, row in enumerate(b.mask):
        for t, m in enumerate(row):
            expected = finite_or_zero(b.old[i][t] - b.sampler[i][t]) if m else 0.0
            assert got[i, t].item() == pytest.approx(expected, abs=1e-15)


def test_correction_bounds_belong_to_the_interval():
    """Factors 1/2, 1 and 2 are exact: both ends of [0.5, 2] are inside."""
    gap = torch.tensor([[math.log(0.5), 0.0, math.log(2.0)]], dtype=torch.float64)
    factor = gap.exp()
    low, high = factor[0, 0].item(), factor[0, 2].item()
    assert sampler_correction(gap, "token_mask", low, high).tolist() == factor.tolist()
    assert sampler_correction(gap, "token_mask", low + 1e-9, high - 1e-9).tolist() == [[0.0, 1.0, 0.0]]


def test_no_gradient_flows_through_the_correction():
    old = torch.tensor([[0.1, -0.2]], requires_grad=True)
    gap = sampler_log_gap(old, torch.zeros(1, 2), torch.ones(1, 2))
    for mode in CORRECTION_MODES:
        assert not sampler_correction(gap, mode, None, 3.0).requires_grad


def test_entropy_bonus():
    """L − Σ w^e_it H_it, with w^e = coefficient × weight: checked in value and in both gradients."""
    b, values = cases.batch(), entropies()
    c = Choices(beta=0.04)
    terms = cases.core_terms("dapo", b)
    entropy = cases.tensor(values).requires_grad_()
    coef = 0.03
    bonus = coef * terms.token_weights_BT
    loss, metrics = cases.evaluate(
        replace(terms, entropy_BT=entropy, entropy_weights_BT=bonus), cases.core_settings("dapo", c)
    )
    weights = cases.oracle_weights("dapo")
    policy, gradient = loss_and_gradient("dapo", b, weights, c)
    expected = policy
    for i, row in enumerate(weights):
        for t, w in enumerate(row):
            expected -= coef * w * values[i][t]
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert metrics["policy_loss"].value() == pytest.approx(policy, rel=1e-12)
    d_logps, d_entropy = torch.autograd.grad(loss, [terms.logps_BT, entropy])
    torch.testing.assert_close(d_logps, cases.tensor(gradient), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(d_entropy, -coef * cases.tensor(weights), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.02, 0.045)])
def test_adaptive_entropy_follows_the_loop(low, high):
    seen = [0.1, 0.3, 0.2, 0.5, 0.5, 0.5, 0.5, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1]
    control = EntropyControl(0.03)
    got = []
    for entropy in seen:
        control = control.step(entropy, 0.2, 0.01, low, high)
        got.append((control.coef, control.applied(0.2)))
    expected = adaptive_entropy(0.03, seen, 0.2, 0.01, low, high)
    assert [x for pair in got for x in pair] == pytest.approx([x for pair in expected for x in pair])


def test_entropy_coefficient_before_the_first_window_and_without_a_target():
    assert EntropyControl(0.3).applied(0.2) == 0.0
    assert EntropyControl(0.3, entropy=5.0).applied(None) == 0.3
    assert EntropyControl(0.3, entropy=5.0).applied(0.2) == 0.0
    assert EntropyControl(0.3, entropy=0.2).applied(0.2) == 0.3
