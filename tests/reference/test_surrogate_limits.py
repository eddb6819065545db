"""Extremes of the surrogates, where numbers follow from the equations by hand.

Files: ``core/ratios.py``, ``core/surrogates.py``.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.oracles.cases import surrogate_inputs

from groupwise.core.ratios import RATIO_LEVELS
from groupwise.core.surrogates import SurrogateInputs, SurrogateSettings, cispo, clipped, sapo, vespo_gate


def inputs(log_ratio, advantage=1.0, mask=None, log_correction=None, logps=None) -> SurrogateInputs:
    given = {"loss_mask_BT": mask, "log_correction_BX": log_correction, "logps_BT": logps}
    return surrogate_inputs(
        torch.tensor(log_ratio, dtype=torch.float64),
        advantages_BX=torch.tensor([[advantage]], dtype=torch.float64),
        **{
            name: torch.as_tensor(value, dtype=torch.float64)
            for name, value in given.items()
            if value is not None
        },
    )


# With λ tiny, φ(w) = e^λ w^k e^{−λw} is w^k up to e^{−λ e^20}: the exponent of w can be read off.
READABLE = SurrogateSettings(
    vespo_k_pos=0.5, vespo_lambda_pos=1e-12, vespo_k_neg=0.25, vespo_lambda_neg=1e-12
)


@pytest.mark.parametrize(
    ("log_ratio", "mask", "log_correction", "log_w"),
    [
        ([[1.0, 2.0]], None, None, 3.0),
        ([[1.0, 2.0]], [[1.0, 0.0]], None, 1.0),
        ([[25.0, -10.0]], None, None, 10.0),  # 20 − 10: each token is bounded before the sum
        ([[-30.0, 15.0]], None, None, -5.0),  # −20 + 15
        ([[15.0, 15.0]], None, None, 20.0),  # the sum is bounded too
        ([[-15.0, -15.0]], None, None, math.log(1e-8)),
        ([[1.0, 2.0]], None, [[0.5, -2.0]], 1.5),  # 3 + 0.5 − 2
        (
            [[15.0, 15.0]],
            None,
            [[-7.0, -8.0]],
            15.0,
        ),  # 30 − 15: the ratios are not bounded before the corrections
        ([[5.0, 5.0]], None, [[-math.inf, 0.0]], 10 + math.log(1e-8)),  # a masked factor counts as 1e-8
        ([[-15.0, 0.0]], None, [[30.0, 0.0]], 5.0),  # −15 + 20
    ],
)
def test_vespo_weight_is_clamped_per_token_and_in_total(log_ratio, mask, log_correction, log_w):
    gate = vespo_gate(inputs(log_ratio, 1.0, mask, log_correction), READABLE)
    assert gate.item() == pytest.approx(math.exp(0.5 * log_w), rel=1e-3)
    gate = vespo_gate(inputs(log_ratio, -1.0, mask, log_correction), READABLE)
    assert gate.item() == pytest.approx(math.exp(0.25 * log_w), rel=1e-3)


def test_vespo_gate_on_policy_is_one():
    """φ(1) = e^λ · 1 · e^{−λ} = 1 for any (k, λ)."""
    assert (
        vespo_gate(inputs([[0.0, 0.0]]), SurrogateSettings(vespo_k_pos=7.0, vespo_lambda_pos=0.3)).item()
        == 1.0
    )


def test_vespo_gate_of_a_zero_advantage_follows_the_positive_constants():
    """Only the reported mean of φ can tell; e^λ w^k e^{−λw} at w = 2, k = 1, λ = 0.5: 2 e^{−0.5} = 1.2131."""
    settings = SurrogateSettings(vespo_k_pos=1.0, vespo_lambda_pos=0.5, vespo_k_neg=3.0, vespo_lambda_neg=2.0)
    assert vespo_gate(inputs([[math.log(2.0)]], 0.0), settings).item() == pytest.approx(1.2131, abs=1e-4)


def gradient_at(surrogate, rho: float, advantage: float, settings: SurrogateSettings) -> float:
    """d loss / dρ of one token."""
    ratio = torch.tensor([[rho]], dtype=torch.float64, requires_grad=True)
    t = surrogate_inputs(
        ratio.log(), ratio_BX=ratio, advantages_BX=torch.tensor([[advantage]], dtype=torch.float64)
    )
    return torch.autograd.grad(surrogate(t, settings).sum(), ratio)[0].item()


@pytest.mark.parametrize(
    ("rho", "advantage", "slope"),
    [
        (1.0, 2.0, -2.0),
        (1.29, 2.0, 0.0),  # beyond 1 + ε_high with A > 0: nothing more to gain
        (1.27, 2.0, -2.0),
        (0.1, 2.0, -2.0),  # far below, A > 0: still pulled up
        (0.79, -2.0, 0.0),  # beyond 1 − ε_low with A < 0
        (0.81, -2.0, 2.0),
        (1.49, -2.0, 2.0),  # far above, A < 0: pushed down ...
        (1.51, -2.0, 0.0),  # ... until δ
    ],
)
def test_clipped_slope(rho, advantage, slope):
    settings = SurrogateSettings(epsilon_low=0.2, epsilon_high=0.28, delta=1.5)
    assert gradient_at(clipped, rho, advantage, settings) == pytest.approx(slope)


def test_sapo_slope_at_one_is_the_advantage():
    """d/dρ (4/τ) σ(τ(ρ−1)) at ρ = 1 is 4 · σ(0)(1 − σ(0)) = 1, whatever τ."""
    settings = SurrogateSettings(sapo_temperature_pos=0.3, sapo_temperature_neg=2.0)
    for advantage in (1.7, -1.7):
        assert gradient_at(sapo, 1.0, advantage, settings) == pytest.approx(-advantage)


def test_sapo_temperature_of_a_zero_advantage_is_harmless():
    assert gradient_at(sapo, 1.3, 0.0, SurrogateSettings()) == 0.0


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    """−min(ρ, ε_high) A per unit of ℓ: ρ = 5 counts as 2, ρ = 0.1 as itself (no lower bound)."""
    for rho, weight in [(5.0, 2.0), (0.1, 0.1)]:
        logps = torch.tensor([[-0.5]], dtype=torch.float64, requires_grad=True)
        loss = cispo(inputs([[math.log(rho)]], 3.0, logps=logps), SurrogateSettings(epsilon_high=2.0))
        assert torch.autograd.grad(loss.sum(), logps)[0].item() == pytest.approx(-3 * weight)


def test_sequence_ratio_averages_loss_tokens_only():
    """(1 + 3) / 2 whatever stands off the mask; 0 for a row without tokens; one token is its own mean."""
    log_ratio = torch.tensor([[1.0, 99.0, 3.0], [5.0, 5.0, 5.0], [0.0, 0.5, 7.0]])
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert RATIO_LEVELS["sequence"](log_ratio, mask).tolist() == [[2.0], [0.0], [0.5]]
