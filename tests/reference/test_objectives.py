"""Value and gradient of every objective against the scalar loops, over the product of all choices.

Files: ``core/kl.py``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from support.oracles import cases
from support.oracles.oracle import SURROGATE_OF, Choices, corrections, dropped, loss_and_gradient, ratios

from groupwise.core.objectives import OBJECTIVES

KL = [(0.0, "k3", False), *itertools.product([0.04], ["k1", "k2", "k3", "k3_k2grad"], [False, True])]
MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
CORRECTIONS = [(None, None, None)] + [
    (m, low, high) for m in MODES for low, high in [(None, 1.7), (0.8, 1.5)]
]
MASKS = list(itertools.product([None, 0.1], [None, cases.KEEP]))
# The clipped surrogate reads ε_high as the distance from 1, CISPO as the bound itself.
EPSILON_HIGH = {"cispo": 1.3}
NAMES = sorted(SURROGATE_OF)
LEVELS = ["token", "sequence"]
VARIANTS = [
    (name, level, delta)
    for name in NAMES
    for level in LEVELS
    for delta in ([None, 1.5] if SURROGATE_OF[name] == "clipped" else [None])
]


def choices(name: str, **changes) -> Choices:
    return Choices(epsilon_high=EPSILON_HIGH.get(name, 0.28), **changes)


def check_float64(name: str, b, c: Choices) -> None:
    loss, gradient = loss_and_gradient(name, b, cases.oracle_weights(name), c)
    core_loss, core_gradient = cases.core_loss_and_gradient(name, cases.core_terms(name, b), c)
    assert core_loss == pytest.approx(loss, rel=1e-11, abs=1e-13), c
    torch.testing.assert_close(
        core_gradient, cases.tensor(gradient), rtol=1e-10, atol=1e-13, msg=lambda m: f"{name} {c}\n{m}"
    )


def check_float32(name: str, b, c: Choices) -> None:
    """Each token's gradient is a product of some ten factors, one an exponential of a sum over tokens."""
    b = cases.rounded(b, torch.float32)
    loss, gradient = loss_and_gradient(name, b, cases.oracle_weights(name), c)
    core_loss, core_gradient = cases.core_loss_and_gradient(name, cases.core_terms(name, b, torch.float32), c)
    budget = 32 * torch.finfo(torch.float32).eps
    truth = cases.tensor(gradient)
    assert (core_gradient.double() - truth).abs().max() <= budget * truth.abs().max(), (name, c)
    assert abs(core_loss - loss) <= budget * max(abs(loss), 1.0), (name, c)


def test_the_table_holds_the_eight_losses():
    assert set(NAMES) <= set(OBJECTIVES)


@pytest.mark.parametrize(("name", "level", "delta"), VARIANTS)
@pytest.mark.parametrize("kl", KL, ids=str)
def test_value_and_gradient(name, level, delta, kl):
    beta, estimator, bias = kl
    flat, by_token = cases.batch(), cases.batch(per_token_advantages=True)
    for (i, (mode, low, high)), (j, (threshold, keep)) in itertools.product(
        enumerate(CORRECTIONS), enumerate(MASKS)
    ):
        c = choices(
            name,
            level=level,
            delta=delta,
            beta=beta,
            kl=estimator,
            bias_correction=bias,
            mode=mode,
            c_min=low,
            c_max=high,
            threshold=threshold,
        )
        # The parity of i + j lets both forms of the advantage meet every correction and every mask.
        b = replace((flat, by_token)[(i + j) % 2], keep=keep, ref=flat.ref if beta else None)
        check_float64(name, b, c)
        if (i + j) % 3 == 0:
            check_float32(name, b, c)


@pytest.mark.parametrize(("name", "level", "delta"), VARIANTS)
@pytest.mark.parametrize("sampler", [False, True])
def test_on_policy_and_without_a_sampler(name, level, delta, sampler):
    for on_policy, threshold, mode in itertools.product(
        [False, True], [None, 0.1], ["token_truncate", "sequence_mask"]
    ):
        b = cases.batch(on_policy=on_policy, sampler=sampler)
        c = choices(name, level=level, delta=delta, beta=0.04, mode=mode, c_max=1.7, threshold=threshold)
        check_float64(name, b, c)
        check_float32(name, b, c)


@pytest.mark.parametrize("name", NAMES)
def test_constants_of_the_surrogates(name):
    """Constants that float32 cannot hold exactly, and all different, so that none stands in for another."""
    c = choices(name, tau_pos=0.7, tau_neg=1.9, k_pos=1.3, lambda_pos=2.7, k_neg=2.1, lambda_neg=0.9)
    c = replace(c, epsilon_low=0.13)
    check_float64(name, cases.batch(), c)
    check_float64(name, cases.batch(per_token_advantages=True), c)


@pytest.mark.parametrize("name", NAMES)
def test_kl_that_is_only_measured_leaves_the_loss_alone(name):
    b = cases.batch()
    check_float64(name, b, choices(name, beta=0.04, kl_in_loss=False))
    without = cases.core_loss_and_gradient(name, cases.core_terms(name, replace(b, ref=None)), choices(name))
    reported = cases.core_loss_and_gradient(
        name, cases.core_terms(name, b), choices(name, beta=0.04, kl_in_loss=False)
    )
    assert reported[0] == without[0]
    assert torch.equal(reported[1], without[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_corrections_bounded_away_from_one(name, mode):
    """Bounds on one side of 1: what a padded token would get is not 1, and must not reach VESPO's w."""
    for low, high in [(None, 0.9), (1.1, None), (1.1, 1.6)]:
        check_float64(name, cases.batch(), choices(name, mode=mode, c_min=low, c_max=high))


@pytest.mark.parametrize("name", NAMES)
def test_single_token_sequences(name):
    b = cases.batch()
    first = {
        f: [row[:1] for row in getattr(b, f)]
        for f in ("logps", "old", "ref", "sampler", "advantages", "mask")
    }
    short = replace(b, **first)
    for level, mode in itertools.product(LEVELS, MODES):
        c = choices(name, level=level, beta=0.04, mode=mode, c_max=1.5, threshold=0.1)
        weights = [row[:1] for row in cases.oracle_weights(name)]
        terms = replace(cases.core_terms(name, short), token_weights_BT=cases.tensor(weights))
        loss, gradient = loss_and_gradient(name, short, weights, c)
        core_loss, core_gradient = cases.core_loss_and_gradient(name, terms, c)
        assert core_loss == pytest.approx(loss, rel=1e-11)
        torch.testing.assert_close(core_gradient, cases.tensor(gradient), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("garbage", [1e30, -1e30, 700.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", NAMES)
def test_garbage_on_masked_tokens_never_leaks(name, garbage):
    b = cases.batch()
    off = cases.tensor(b.mask) == 0
    for level, mode, kl, bias in itertools.product(
        LEVELS, [None, *MODES], ["k3", "k3_k2grad"], [False, True]
    ):
        c = choices(
            name, level=level, mode=mode, c_max=1.7, beta=0.04, kl=kl, bias_correction=bias, threshold=0.1
        )
        clean = cases.core_loss_and_gradient(name, cases.core_terms(name, b), c)
        for fields in (["old_logps_BT"], ["ref_logps_BT"], ["sampler_logps_BT"], ["logps_BT"]):
            terms = cases.core_terms(name, b)
            dirty = {f: getattr(terms, f).detach().masked_fill(off, garbage) for f in fields}
            dirty = {f: value.requires_grad_(f == "logps_BT") for f, value in dirty.items()}
            loss, gradient = cases.core_loss_and_gradient(name, replace(terms, **dirty), c)
            assert loss == clean[0], (fields, c)
            assert torch.equal(gradient, clean[1]), (fields, c)


def test_the_oracle_differentiates_itself():
    """Central differences of the oracle's value, where no stop-gradient stands in between."""
    b = replace(cases.batch(per_token_advantages=True), keep=cases.KEEP)
    for name, level, bias in itertools.product(["dapo", "grpo", "sapo"], LEVELS, [False, True]):
        c = choices(
            name, level=level, delta=1.5, beta=0.04, bias_correction=bias, mode="token_mask", c_max=1.7
        )
        weights = cases.oracle_weights(name)
        _, gradient = loss_and_gradient(name, b, weights, c)
        for i, t in itertools.product(range(len(cases.MASK)), range(cases.WIDTH)):
            ends = []
            for step in (1e-6, -1e-6):
                moved = [list(row) for row in b.logps]
                moved[i][t] += step
                ends.append(loss_and_gradient(name, replace(b, logps=moved), weights, c)[0])
            assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(gradient[i][t], rel=1e-5, abs=1e-9)


def test_the_inputs_reach_every_branch():
    b = cases.batch()
    for level in LEVELS:
        rho = ratios(b, level)
        seen = set()
        for i, row in enumerate(cases.MASK):
            for t, m in enumerate(row):
                side = (
                    "below"
                    if rho[i][t] < 0.8
                    else "beyond"
                    if rho[i][t] > 1.5
                    else "in"
                    if rho[i][t] < 1.28
                    else ""
                )
                sign = (b.advantages[i][t] > 0) - (b.advantages[i][t] < 0)
                if m:
                    seen.add((side, sign))
        assert seen >= {(side, sign) for side in ("below", "beyond", "in") for sign in (1, -1)}
        assert any(sign == 0 for _, sign in seen)
    for mode in MODES:
        kept = set()
        for low, high in [(None, 1.7), (0.8, 1.5)]:
            factors, _ = corrections(b, Choices(mode=mode, c_min=low, c_max=high))
            kept |= {factors[i][t] for i, row in enumerate(cases.MASK) for t, m in enumerate(row) if m}
        wanted = {0.0} if mode.endswith("mask") else {0.8, 1.5, 1.7}
        assert wanted <= kept
    c = Choices(threshold=0.1)
    for sampler in (False, True):
        b = cases.batch(sampler=sampler)
        negative = {dropped(b, i, 0, c) for i, a in enumerate(cases.ADVANTAGES) if a < 0}
        assert negative == {True, False}
