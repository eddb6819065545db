"""Log-probs and entropy of truncated distributions: both heads against scalar loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.heads import HEADS
from support.oracles.cases import Terms
from support.truncation import kept_by_top_p, logp_and_entropy, slopes
from test_heads import TRANSFORMS, LargestTensor, rows, upstream

from groupwise.core import variants  # noqa: F401  registers further objectives
from groupwise.core.objectives import OBJECTIVES, ObjectiveSettings, policy_loss
from groupwise.core.surrogates import SurrogateSettings, cispo
from groupwise.policy.heads.chunked import chunked_head
from groupwise.policy.heads.dense import logps_from_logits
from groupwise.policy.heads.weights import HeadWeights
from groupwise.records.sampling_mask import SamplingMask


def logits_of(hidden, weight, bias, scale=1.0, softcap=None):
    logits = scale * (hidden @ weight.T + bias)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def some_kept(logits, targets, temperature=0.7, top_p=0.6):
    """Kept ids of each row, the target among them; the second row is not truncated."""
    kept = [
        sorted({*kept_by_top_p(row, temperature, top_p), target})
        for row, target in zip(logits.tolist(), targets.tolist(), strict=True)
    ]
    kept[1] = []
    return kept


def by_loops(logits, targets, kept, temperature):
    """Log-probs, entropies, and the gradient of their weighted sum with respect to the logits."""
    weights = upstream(len(targets)).tolist()
    values, gradient = [], []
    for place, (row, target, ids) in enumerate(zip(logits.tolist(), targets.tolist(), kept, strict=True)):
        ids = ids or list(range(len(row)))
        values.append(logp_and_entropy(row, temperature, ids, target))
        both = slopes(row, temperature, ids, target)
        gradient.append([weights[0][place] * a + weights[1][place] * b for a, b in zip(*both, strict=True)])
    logps, entropies = (torch.tensor(column, dtype=torch.float64) for column in zip(*values, strict=True))
    return logps, entropies, torch.tensor(gradient, dtype=torch.float64)


def assert_equals_loops(outputs, logits, leaves, targets, kept, temperature, tolerance=1e-12):
    expected_logps, expected_entropy, slopes_NV = by_loops(logits, targets, kept, temperature)
    expected = torch.autograd.grad(logits, leaves, slopes_NV.to(logits), retain_graph=True)
    weights = upstream(len(targets)).to(outputs[0])
    given_gradients = torch.autograd.grad((torch.stack(outputs) * weights).sum(), leaves)
    for one, other in zip(
        (*outputs, *given_gradients), (expected_logps, expected_entropy, *expected), strict=True
    ):
        assert (one.double() - other.double()).abs().max() <= tolerance


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("name", HEADS)
def test_values_and_gradients_are_those_of_the_scalar_loop(name, transform):
    hidden, weight, bias, targets = rows()
    logits = logits_of(hidden, weight, bias, **transform)
    kept = some_kept(logits, targets)
    assert len({len(ids) for ids in kept}) > 3
    chunks = {"chunk_rows": 3, "chunk_columns": 4} if name == "chunked" else {}
    head, tokens = HeadWeights(weight, bias, **transform), SamplingMask.from_lists(kept)
    outputs = HEADS[name](hidden, head, targets, 0.7, kept=tokens, **chunks)
    assert_equals_loops(outputs, logits, (hidden, weight, bias), targets, kept, 0.7)


def test_logits_with_leading_axes():
    hidden, weight, bias, targets = rows(n=6)
    logits = logits_of(hidden, weight, bias)
    kept = some_kept(logits, targets)
    logps, entropy = logps_from_logits(
        logits.view(2, 3, -1), targets.view(2, 3), 0.7, kept=SamplingMask.from_lists(kept)
    )
    outputs = logps.flatten(), entropy.flatten()
    assert_equals_loops(outputs, logits, (hidden, weight, bias), targets, kept, 0.7)


@settings(max_examples=30)
@given(chunk_rows=st.integers(1, 8), chunk_columns=st.integers(1, 14), top_p=st.floats(0.05, 0.99))
def test_tiles_without_any_kept_token_change_nothing(chunk_rows, chunk_columns, top_p):
    hidden, weight, bias, targets = rows(spread=3.0)
    logits = logits_of(hidden, weight, bias)
    kept = some_kept(logits, targets, top_p=top_p)
    chunks = {"chunk_rows": chunk_rows, "chunk_columns": chunk_columns}
    outputs = chunked_head(
        hidden, HeadWeights(weight, bias), targets, 0.7, kept=SamplingMask.from_lists(kept), **chunks
    )
    assert_equals_loops(outputs, logits, (hidden, weight, bias), targets, kept, 0.7, tolerance=1e-11)


@pytest.mark.parametrize("name", HEADS)
def test_a_single_kept_token_has_probability_one_and_no_gradient(name):
    hidden, weight, bias, targets = rows(dtype=torch.float32, spread=30.0)
    kept = SamplingMask.from_lists([[target] for target in targets.tolist()])
    logps, entropy = HEADS[name](hidden, HeadWeights(weight, bias, softcap=40.0), targets, 0.5, kept=kept)
    assert logps.tolist() == entropy.tolist() == [0.0] * len(targets)
    for gradient in torch.autograd.grad((logps + entropy).sum(), (hidden, weight, bias)):
        assert not gradient.any()


def test_kept_tokens_materialize_no_mask_larger_than_a_tile():
    hidden, weight, bias, targets = rows(64, 500, 8, torch.float32)
    kept = SamplingMask.from_lists([[target, (target + 1) % 500] for target in targets.tolist()])
    with LargestTensor() as largest:
        logps, entropy = chunked_head(
            hidden, HeadWeights(weight, bias), targets, kept=kept, chunk_rows=16, chunk_columns=100
        )
        (logps + entropy).sum().backward()
    assert largest.elements == 4000  # the gradient of the weight; N V is 32000


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", HEADS)
def test_the_expected_update_is_the_gradient_of_the_expected_reward(name, objective):
    """Sum over the sampling mask of p_trunc · (update of the token) = ∇ Σ p_trunc · A, in float64.

    On-policy, -d loss / d logp is the advantage: for sapo 4 s (1 - s) with s = 1/2, for vespo φ(1) = 1. cispo
    multiplies it by its clip bound, which is below 1 by default.
    """
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(9, 1, generator=generator, dtype=torch.float64, requires_grad=True)
    kept = kept_by_top_p(weight[:, 0].tolist(), 0.8, 0.7)
    assert 3 <= len(kept) <= 6
    rewards = torch.randn(len(kept), generator=generator, dtype=torch.float64)
    hidden, targets = torch.ones(len(kept), 1, dtype=torch.float64), torch.tensor(kept)
    logps, _ = HEADS[name](
        hidden, HeadWeights(weight), targets, 0.8, kept=SamplingMask.from_lists([kept] * len(kept))
    )
    probabilities = logps.detach().exp()
    assert probabilities.sum().item() == pytest.approx(1.0, abs=1e-14)
    ones = torch.ones(len(kept), 1, dtype=torch.float64)
    terms = Terms(
        logps_BT=logps[:, None],
        advantages_BX=rewards[:, None],
        loss_mask_BT=ones,
        token_weights_BT=probabilities[:, None],
    )
    entry = OBJECTIVES[objective]
    settings_of_it = entry.surrogate_settings(SurrogateSettings(), {})
    loss, _ = policy_loss(terms, terms.logps_BT, None, ObjectiveSettings(objective, surrogate=settings_of_it))
    factor = SurrogateSettings().epsilon_high if entry.surrogate is cispo else 1.0
    (update,) = torch.autograd.grad(-loss / factor, weight)

    expected = torch.zeros(9, dtype=torch.float64)
    values = weight[:, 0].tolist()
    for target, reward in zip(kept, rewards.tolist(), strict=True):
        logp, _ = logp_and_entropy(values, 0.8, kept, target)
        d_logp, _ = slopes(values, 0.8, kept, target)
        expected += torch.tensor(d_logp, dtype=torch.float64) * math.exp(logp) * reward

    def expected_reward(logits):
        logps = [logp_and_entropy(logits, 0.8, kept, target)[0] for target in kept]
        return sum(math.exp(logp) * reward for logp, reward in zip(logps, rewards.tolist(), strict=True))

    for j in kept[:3]:  # central differences of the scalar loop
        up, down = ([*values[:j], values[j] + step, *values[j + 1 :]] for step in (1e-5, -1e-5))
        slope = (expected_reward(up) - expected_reward(down)) / 2e-5
        assert slope == pytest.approx(expected[j].item(), abs=1e-9)
    assert (update[:, 0] - expected).abs().max() <= 1e-12
