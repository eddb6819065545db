"""The metrics an objective reports, against the loops."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from support.oracles import cases
from support.oracles.oracle import (
    Choices,
    corrections,
    gamma_gate,
    kl_term,
    loss_tokens,
    ratios,
)

LEVELS = ["token", "sequence"]


def metrics_of(name: str, b, c: Choices, **extra) -> dict:
    _, metrics = cases.evaluate(replace(cases.core_terms(name, b), **extra), cases.core_settings(name, c))
    return {key: reduction.value() for key, reduction in metrics.items()}


def token_mean(values, mask) -> float:
    active = [(i, t) for i, row in enumerate(mask) for t in loss_tokens(row)]
    return sum(values(i, t) for i, t in active) / len(active)


def row_means(values, mask) -> list[float]:
    """Of rows without tokens: 0."""
    return [
        sum(values(i, t) for t in loss_tokens(m)) / max(len(loss_tokens(m)), 1) for i, m in enumerate(mask)
    ]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3_k2grad"])
@pytest.mark.parametrize("level", LEVELS)
def test_kl(kind, bias, level):
    b = cases.batch()
    got = metrics_of("dapo", b, Choices(level=level, beta=0.04, kl=kind, bias_correction=bias))
    rho = ratios(b, level)

    def value(i, t):
        return kl_term(kind, b.logps[i][t], b.ref[i][t])[0] * (rho[i][t] if bias else 1.0)

    assert got["kl"] == pytest.approx(token_mean(value, b.mask), rel=1e-12)


def test_no_kl_without_a_reference_and_no_sampling_metrics_without_a_sampler():
    got = metrics_of("dapo", replace(cases.batch(sampler=False), ref=None), Choices(mode="token_mask"))
    assert not [name for name in got if name == "kl" or name.startswith("sampling/")]


def test_entropy():
    b = cases.batch()
    entropy = [[0.1 * i + t for t in range(cases.WIDTH)] for i in range(len(b.mask))]
    got = metrics_of("dapo", b, Choices(), entropy_BT=cases.tensor(entropy))
    assert got["entropy"] == pytest.approx(token_mean(lambda i, t: entropy[i][t], b.mask), rel=1e-12)
    assert "policy_loss" not in got


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_clip_ratio(level, per_token):
    """Per token, or per sequence when both the ratio and the advantage are one number per sequence."""
    b = cases.batch(per_token_advantages=per_token)
    got = metrics_of("grpo", b, Choices(level=level))
    rho = ratios(b, level)

    def low(i, t):
        return float(rho[i][t] < 0.8 and b.advantages[i][t] < 0)

    def high(i, t):
        return float(rho[i][t] > 1.28 and b.advantages[i][t] > 0)

    if level == "sequence" and not per_token:
        rows = range(len(b.mask))
        # A row without loss tokens has ratio 1: never clipped, still a sequence.
        active = {i for i in rows if loss_tokens(b.mask[i])}
        lows = [low(i, loss_tokens(b.mask[i])[0]) if i in active else 0.0 for i in rows]
        highs = [high(i, loss_tokens(b.mask[i])[0]) if i in active else 0.0 for i in rows]
        low_mean, high_mean = sum(lows) / len(rows), sum(highs) / len(rows)
    else:
        lows, highs = row_means(low, b.mask), row_means(high, b.mask)
        low_mean, high_mean = token_mean(low, b.mask), token_mean(high, b.mask)
    assert min(low_mean, high_mean) > 0
    assert got["clip_ratio/low_mean"] == pytest.approx(low_mean)
    assert got["clip_ratio/high_mean"] == pytest.approx(high_mean)
    assert got["clip_ratio/region_mean"] == pytest.approx(low_mean + high_mean)
    assert got["clip_ratio/low_min"] == pytest.approx(min(lows))
    assert got["clip_ratio/high_max"] == pytest.approx(max(highs))


def test_clip_ratio_extremes_with_no_empty_row():
    """Every row clipped somewhere below: the smallest share is not 0."""
    b = cases.batch()
    logps = [[-1.0, -1.0], [-1.0, -1.0]]
    old = [[0.0, -1.0], [0.0, 0.0]]
    b = replace(
        b, logps=logps, old=old, ref=None, sampler=None, mask=[[1, 1], [1, 1]], advantages=[[-1.0] * 2] * 2
    )
    terms = replace(cases.core_terms("dapo", b))
    _, metrics = cases.evaluate(terms, cases.core_settings("dapo", Choices()))
    assert metrics["clip_ratio/low_min"].value() == 0.5
    assert metrics["clip_ratio/low_mean"].value() == 0.75
    assert metrics["clip_ratio/high_max"].value() == 0.0


@pytest.mark.parametrize("level", LEVELS)
def test_cispo_clip_ratio(level):
    b = cases.batch(per_token_advantages=True)
    got = metrics_of("cispo", b, Choices(level=level, epsilon_high=1.3))
    rho = ratios(b, level)
    expected = token_mean(lambda i, t: float(rho[i][t] > 1.3 and b.advantages[i][t] > 0), b.mask)
    assert expected > 0
    assert got["cispo_clip_ratio"] == pytest.approx(expected)


def test_vespo_mean_gate():
    b = cases.batch(per_token_advantages=True)
    c = Choices(mode="token_mask", c_max=1.7)
    _, folded = corrections(b, c)

    def gate(i, t):
        return gamma_gate(b.logps[i], b.old[i], loss_tokens(b.mask[i]), b.advantages[i][t], folded[i], c)

    assert metrics_of("vespo", b, c)["vespo/phi_seq_mean"] == pytest.approx(
        token_mean(gate, b.mask), rel=1e-10
    )


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_sampling_metrics(mode):
    b = cases.batch()
    c = Choices(mode=mode, c_max=1.7)
    got = metrics_of("dapo", b, c)
    active = [(i, t) for i, row in enumerate(b.mask) for t in loss_tokens(row)]
    # a token that the sampler could not score says nothing about the difference
    gaps = [abs(b.old[i][t] - b.sampler[i][t]) for i, t in active if not math.isnan(b.sampler[i][t])]
    assert got["sampling/sampling_logp_difference/mean"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-12)
    assert got["sampling/sampling_logp_difference/max"] == pytest.approx(max(gaps), rel=1e-12)
    factors, _ = corrections(b, c)
    if mode.startswith("sequence"):
        seen = [factors[i][0] for i, row in enumerate(b.mask) if loss_tokens(row)]
    else:
        seen = [factors[i][t] for i, t in active]
    name = "sampling/importance_sampling_ratio"
    assert got[f"{name}/mean"] == pytest.approx(sum(seen) / len(seen), rel=1e-12)
    assert got[f"{name}/min"] == pytest.approx(min(seen), rel=1e-12)
    assert got[f"{name}/max"] == pytest.approx(max(seen), rel=1e-12)


def test_the_gap_to_the_sampler_is_measured_even_when_nothing_is_corrected():
    got = metrics_of("dapo", cases.batch(), Choices(mode=None))
    assert got["sampling/sampling_logp_difference/max"] > 0
    assert not [name for name in got if "importance" in name]


def test_absent_tokens_never_set_an_extreme():
    """Their factor is 1, which would be the smallest or the largest when all others are on one side."""
    b = cases.batch()
    for shift, level, worst in itertools.product([-0.5, 0.5], ["token", "sequence"], ["min", "max"]):
        old = [[lp + shift for lp in row] for row in b.logps]
        shifted = replace(b, old=old, sampler=b.logps)
        got = metrics_of("dapo", shifted, Choices(mode=f"{level}_truncate"))
        counts = [len(loss_tokens(row)) for row in b.mask if any(row)] if level == "sequence" else [1]
        extreme = (min if worst == "min" else max)(shift * n for n in counts)
        assert got[f"sampling/importance_sampling_ratio/{worst}"] == pytest.approx(
            math.exp(extreme), rel=1e-12
        )
