"""Invariances of an update: padding, order, micro-batches, accumulation steps, ranks.

The policy is linear, ℓ_it = x_it · θ: "the update" is one gradient with respect to θ however rows lie.
Everything is float64: sums in another order differ by rounding only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.oracles.cases import Terms, evaluate, weights

from groupwise.core.advantages import ADVANTAGES, AdvantageSettings
from groupwise.core.objectives import OBJECTIVES, ObjectiveSettings
from groupwise.core.surrogates import SurrogateSettings
from groupwise.core.weights import WindowCounts
from groupwise.records.rollout import GroupRewards

few = settings(max_examples=25)
GLOBAL = [name for name, objective in OBJECTIVES.items() if objective.normalizer != "local_token_mean"]
THETA = torch.tensor([0.3, -0.5, 0.2], dtype=torch.float64)
CHOICES = {
    "plain": {},
    "sequence": {"importance_sampling_level": "sequence", "off_policy_mask_threshold": 0.1},
    "everything": {
        "beta": 0.04,
        "use_bias_correction_kl": True,
        "off_policy_mask_threshold": 0.1,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.2,
    },
}
names = st.sampled_from(sorted(GLOBAL))
options = st.sampled_from(sorted(CHOICES))
seeds = st.integers(0, 10_000)


@dataclass
class Window:
    """N sequences: features, masks and everything the loss reads, as rows."""

    features_NTD: torch.Tensor
    mask_NT: torch.Tensor
    advantages_NX: torch.Tensor
    old_NT: torch.Tensor
    ref_NT: torch.Tensor
    sampler_NT: torch.Tensor
    group_ids_N: torch.Tensor

    def rows(self, index) -> Window:
        return Window(*(value[index] for value in vars(self).values()))

    def padded(self, columns: int, junk: float) -> Window:
        """More columns on the right of every token-wise tensor."""

        def wider(value: torch.Tensor, fill: float) -> torch.Tensor:
            if value.ndim == 1 or value.shape[1] != self.mask_NT.shape[1]:
                return value
            extra = value.new_full((value.shape[0], columns, *value.shape[2:]), fill)
            return torch.cat([value, extra], dim=1)

        return Window(**{k: wider(v, 0.0 if k == "mask_NT" else junk) for k, v in vars(self).items()})


def window(seed: int, n: int, width: int = 5, token_advantages: bool = False) -> Window:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    features = normal(n, width, 3)
    logps = features @ THETA
    lengths = torch.randint(0, width + 1, (n, 1), generator=generator)
    holes = torch.rand(n, width, generator=generator) < 0.8
    mask = ((torch.arange(width) < lengths) & holes).double()
    old = logps - 0.3 * normal(n, width)
    advantages = normal(n, width if token_advantages else 1)
    ref, sampler = logps + 0.3 * normal(n, width), old + 0.3 * normal(n, width)
    return Window(features, mask, advantages, old, ref, sampler, torch.arange(n) // 2)


def surrogate_settings(name: str) -> object:
    bound = 1.1 if name in ("cispo", "scalerl") else 0.2
    return OBJECTIVES[name].surrogate_settings(SurrogateSettings(epsilon_high=bound), {})


def gradient(name: str, option: str, w: Window, counts: WindowCounts) -> torch.Tensor:
    """d loss / dθ of one micro-batch."""
    theta = THETA.clone().requires_grad_()
    chosen = ObjectiveSettings(loss_type=name, surrogate=surrogate_settings(name), **CHOICES[option])
    full = option == "everything"
    terms = Terms(
        logps_BT=w.features_NTD @ theta,
        advantages_BX=w.advantages_NX,
        loss_mask_BT=w.mask_NT,
        token_weights_BT=weights(OBJECTIVES[name].normalizer, w.mask_NT, counts, w.group_ids_N),
        group_ids_B=w.group_ids_N,
        old_logps_BT=w.old_NT,
        ref_logps_BT=w.ref_NT if full else None,
        sampler_logps_BT=w.sampler_NT if full else None,
    )
    return torch.autograd.grad(evaluate(terms, chosen)[0], theta)[0]


def counts_of(w: Window, micro_batches: int = 1, world_size: int = 1) -> WindowCounts:
    groups = {g: int(w.mask_NT[w.group_ids_N == g].sum()) for g in w.group_ids_N.tolist()}
    return WindowCounts(len(w.mask_NT), int(w.mask_NT.sum()), micro_batches, world_size, 11, groups)


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def parts(order: list[int], cuts: list[int]) -> list[list[int]]:
    """The rows in this order, cut at these places; no part is empty."""
    edges = sorted({0, len(order), *(c % len(order) for c in cuts)})
    return [order[a:b] for a, b in pairwise(edges)]


@few
@given(
    names,
    options,
    seeds,
    st.integers(1, 6),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([0.0, 50.0, -50.0]),
)
def test_padding_amount(name, option, seed, n, columns, token_advantages, junk):
    w = window(seed, n, token_advantages=token_advantages)
    same(
        gradient(name, option, w.padded(columns, junk), counts_of(w)),
        gradient(name, option, w, counts_of(w)),
    )


@few
@given(seeds, st.integers(1, 4), st.integers(1, 9))
def test_padding_amount_of_the_local_mean(seed, n, columns):
    w = window(seed, n)
    same(
        gradient("bnpo", "plain", w.padded(columns, 9.0), counts_of(w)),
        gradient("bnpo", "plain", w, counts_of(w)),
    )


@few
@given(
    st.sampled_from(["group_mean", "leave_one_out"]),
    st.sampled_from(["group", "batch", "none"]),
    st.sampled_from(["sum_then_normalize", "normalize_then_sum"]),
    names,
    seeds,
    st.permutations(range(4)),
    st.permutations(range(4)),
)
def test_order_within_a_group(estimator, scale, aggregation, name, seed, first, second):
    """Permuting a group permutes its advantages, and the update stays."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(8, 2, generator=generator, dtype=torch.float64)
    rewards[torch.rand(8, 2, generator=generator) < 0.25] = float("nan")
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    order = torch.tensor([*first, *(4 + i for i in second)])
    chosen = AdvantageSettings(scale, aggregation)
    before = ADVANTAGES[estimator](GroupRewards(rewards, weights, 4), chosen)
    after = ADVANTAGES[estimator](GroupRewards(rewards[order], weights, 4), chosen)
    same(after, before[order])
    w = window(seed, 8)
    w.advantages_NX = before.unsqueeze(1)
    moved = w.rows(order)
    moved.advantages_NX = after.unsqueeze(1)
    same(gradient(name, "plain", moved, counts_of(w)), gradient(name, "plain", w, counts_of(w)))


@few
@given(
    names, options, seeds, st.permutations(range(7)), st.lists(st.integers(0, 6), max_size=6), st.booleans()
)
def test_split_into_micro_batches(name, option, seed, order, cuts, token_advantages):
    """Any partition of the rows into micro-batches of any sizes: the gradients add up to the same."""
    w = window(seed, 7, token_advantages=token_advantages)
    micro_batches = parts(order, cuts)
    counts = counts_of(w, len(micro_batches))
    same(
        sum(gradient(name, option, w.rows(rows), counts) for rows in micro_batches),
        gradient(name, option, w, counts_of(w)),
    )


@few
@given(names, options, seeds, st.permutations(range(8)), st.sampled_from([2, 4]), st.sampled_from([1, 2]))
def test_split_over_ranks(name, option, seed, order, ranks, micro_batches):
    """The mean over ranks of what each accumulates is the gradient of one process, whatever the lengths."""
    w = window(seed, 8)
    counts = counts_of(w, micro_batches, ranks)
    size = 8 // (ranks * micro_batches)
    pieces = [order[i : i + size] for i in range(0, 8, size)]
    total = sum(gradient(name, option, w.rows(rows), counts) for rows in pieces)
    same(total / ranks, gradient(name, option, w, counts_of(w)))


@pytest.mark.slow
@few
@given(seeds, st.integers(1, 5))
def test_rows_that_cannot_learn_may_be_left_out(seed, dropped):
    """Zero advantage and no KL: the gradient is that of the other rows, with the counts of all."""
    w = window(seed, 7)
    w.advantages_NX[:dropped] = 0.0
    kept = w.rows(slice(dropped, None))
    for name in GLOBAL:
        same(gradient(name, "plain", kept, counts_of(w)), gradient(name, "plain", w, counts_of(w)))


@pytest.mark.slow
@few
@given(seeds)
def test_on_policy_gradient_of_the_first_update_is_that_of_its_own_log_probs(seed):
    """``old`` NaN means sg(ℓ): the same as passing the policy's own log-probs."""
    w = window(seed, 5)
    w.old_NT = w.features_NTD @ THETA
    for name in sorted(OBJECTIVES):
        theta = THETA.clone().requires_grad_()
        terms = Terms(
            logps_BT=w.features_NTD @ theta,
            advantages_BX=w.advantages_NX,
            loss_mask_BT=w.mask_NT,
            token_weights_BT=weights(OBJECTIVES[name].normalizer, w.mask_NT, counts_of(w), w.group_ids_N),
        )
        chosen = ObjectiveSettings(loss_type=name, surrogate=surrogate_settings(name))
        loss, _ = evaluate(terms, chosen)
        same(torch.autograd.grad(loss, theta)[0], gradient(name, "plain", w, counts_of(w)))


def test_the_local_mean_does_depend_on_the_split():
    """BNPO by definition: a micro-batch with 1 token counts as much as one with 5."""
    w = window(3, 2)
    w.mask_NT = torch.tensor([[1.0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.float64)
    whole = gradient("bnpo", "plain", w, counts_of(w))
    halves = sum(gradient("bnpo", "plain", w.rows([i]), counts_of(w, 2)) for i in range(2))
    assert (whole - halves).abs().max() > 0.05 * whole.abs().max()
    # Of equal token counts the two agree.
    w.mask_NT = torch.tensor([[1.0, 1, 0, 0, 0], [0, 1, 1, 0, 0]], dtype=torch.float64)
    whole = gradient("bnpo", "plain", w, counts_of(w))
    same(sum(gradient("bnpo", "plain", w.rows([i]), counts_of(w, 2)) for i in range(2)), whole)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_the_properties_are_about_gradients_that_exist(name):
    w = window(11, 7)
    assert gradient(name, "everything", w, counts_of(w)).abs().min() > 1e-4
