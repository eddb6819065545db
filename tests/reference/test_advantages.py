"""Advantages against loops over plain floats, with rewards that are missing in every way they can be."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from support.oracles.oracle_advantages import advantages, process_advantages

from groupwise.core import advantages as core
from groupwise.core.advantages import ADVANTAGES, AdvantageSettings, has_variance, register_aggregation
from groupwise.records.rollout import GroupRewards

SCALES = ["group", "batch", "none"]
AGGREGATIONS = ["sum_then_normalize", "normalize_then_sum"]
KINDS = ["group_mean", "leave_one_out"]


def rewards_table(functions: int, missing: float) -> list[list[float | None]]:
    """Five groups of four; the fourth without variance, the fifth with a single reward at most."""
    rng = random.Random(functions)
    rows = [[rng.gauss(i // 4, 1.0 + i // 4) for _ in range(functions)] for i in range(20)]
    for i, f in itertools.product(range(12), range(functions)):
        if rng.random() < missing:
            rows[i][f] = None
    rows[12:16] = [[0.5 + f for f in range(functions)] for _ in range(4)]
    if missing:
        rows[1] = [None] * functions
        rows[17:20] = [[None] * functions for _ in range(3)]
    return rows


def to_core(rows, weights, size) -> GroupRewards:
    table = torch.tensor([[math.nan if r is None else r for r in row] for row in rows], dtype=torch.float64)
    return GroupRewards(table, torch.tensor(weights, dtype=torch.float64), size)


def in_float32(rows, weights=(1.0,), size=None, **given) -> GroupRewards:
    """Return rewards as a run has them: float32, columns contiguous."""
    table = torch.tensor(rows, dtype=torch.float64).float().T.contiguous().T
    return GroupRewards(table, torch.tensor(weights), size or len(rows), **given)


#: Groups of equal rewards: rows of one group, weights. Their float32 means and sums are not their values.
EQUAL = {
    **{f"{value} in {size}": ([[value]] * size, (1.0,)) for value in (0.35, 0.1, 0.7) for size in (3, 6, 7)},
    "1000.3 in 7": ([[1000.3]] * 7, (1.0,)),
    "-1000.3 in 7": ([[-1000.3]] * 7, (0.3,)),
    "missing": ([[0.35], [math.nan], [0.35], [0.35], [math.nan], [0.35], [0.35]], (1.0,)),
    "one of a function missing": ([[0.35, 0.1], [math.nan, 0.1]] * 3 + [[0.35, 0.1]], (0.0, 1.0)),
    "alone": ([[0.35], [math.nan], [math.nan]], (1.0,)),
    "several functions": ([[0.35, 1000.3]] * 7, (0.1, 0.3)),
    "five functions": ([[0.89, 0.34, 0.61, 0.07, 0.53]] * 37, (0.77, 0.13, 0.29, 0.58, 0.91)),
    "equal sums": ([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, 0.0]], (0.9, 0.6, 0.3)),  # 0.6 + 0.3 = 0.9
    "sums that cancel": ([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [2.0, 2.0, 2.0]], (0.6, 0.3, -0.9)),
    "a weight of zero": ([[0.35, 1.0], [0.35, 2.0], [0.35, 5.0]], (1.0, 0.0)),
}


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("kind", [*KINDS, "maxrl"])
@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_have_no_advantage(name, kind, scale):
    """A gradient of 1e-9 is a step of full size for AdamW."""
    rows, weights = EQUAL[name]
    if kind == "maxrl" and rows[0][0] < 0:
        return
    other = [[float(i) * (j + 1) for j in range(len(weights))] for i in range(len(rows))]
    rewards = in_float32([*rows, *other], weights, len(rows))
    assert has_variance(rewards).tolist() == [False, True]
    if kind == "maxrl" and min(weights) < 0:
        return
    got = ADVANTAGES[kind](rewards, AdvantageSettings(scale)).view(2, -1)
    assert not got[0].any() and got[1].any()


def test_equal_values_have_no_deviation():
    assert core.nan_std(torch.tensor([[1000.3], [math.nan]] * 7), 0).tolist() == [[0.0]]
    found = core.nan_std(torch.tensor([[1.0, 3.0, math.nan], [2.0, 2.0, math.nan]]), -1)
    assert found.tolist() == [[pytest.approx(2**0.5)], [0.0]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in EQUAL if "sums" not in name])
def test_equal_rewards_have_no_advantage_if_each_function_is_normalized(name, kind):
    rows, weights = EQUAL[name]
    other = [[float(i % 3) + i * i * j for j in range(len(weights))] for i in range(len(rows))]
    other[0][-1] = math.nan  # so that the float32 mean of the batch is not 0
    rewards = in_float32([*rows, *other], weights, len(rows))
    assert has_variance(rewards, "normalize_then_sum").tolist() == [False, True]
    got = ADVANTAGES[kind](rewards, AdvantageSettings("group", "normalize_then_sum")).view(2, -1)
    assert not got[0].any() and got[1].any()


def test_a_function_of_equal_rewards_adds_nothing_to_the_others():
    """GDPO with 1000.3 for all of a group beside 0, 1, 2: the advantages of the second function alone."""
    settings = AdvantageSettings("group", "normalize_then_sum")
    values = [0.0, 1.0, 2.0, 0.5, 1.5, 0.0, 3.0]
    both = ADVANTAGES["group_mean"](in_float32([[1000.3, v] for v in values], (1.0, 1.0)), settings)
    alone = ADVANTAGES["group_mean"](in_float32([[v] for v in values]), settings)
    assert torch.equal(both, alone)


def test_equal_step_rewards_have_no_advantage():
    equal = [[(0, 0.1), (2, 0.1)], [(1, 0.1)], [(1, 0.1)], [], [(0, 0.1)], [(2, 0.1)], [(2, 0.1)]]
    other = [[(0, float(i)), (2, 0.35)] for i in range(7)]
    assert not core.process_advantages(equal, 7, 3)[:7].any()
    rewards = in_float32(
        [[0.35, math.nan]] * 14, (1.0, 2.0), 7, step_rewards={1: equal + other}, num_tokens=3
    )
    assert has_variance(rewards).tolist() == [False, True]
    got = ADVANTAGES["group_mean"](rewards, AdvantageSettings())
    assert not got[:7].any() and got[7:].any()
    without = replace(rewards, weights_F=torch.tensor([1.0, 0.0]))
    assert not has_variance(without).any()
    assert not ADVANTAGES["group_mean"](without, AdvantageSettings()).any()


@pytest.mark.parametrize(
    ("rewards", "varies"),
    [
        ([0.0, 1.0, 0.0], True),
        ([0.1, 0.1, 0.1], False),
        ([-2.0, -2.0, -2.5], True),
        ([math.nan, math.nan, math.nan], False),
        ([1.0, math.nan, math.nan], False),  # a single reward cannot vary
        ([1.0, math.nan, 1.0], False),
        ([1.0, math.nan, 2.0], True),
        ([1e6, 1e6 + 0.5, 1e6], True),  # float32 has both
        ([1e-3, 1.1e-3, 1e-3], True),
        ([0.0, 1e-9, 0.0], True),
    ],
)
def test_groups_with_variance(rewards, varies):
    table = in_float32([[reward] for reward in [0.0, 0.0, 1.0, *rewards]], size=3)
    assert has_variance(table).tolist() == [True, varies]
    assert ADVANTAGES["group_mean"](table, AdvantageSettings()).view(2, 3).any(-1).tolist() == [True, varies]


def test_sums_that_are_equal_or_become_equal_when_normalized_have_no_variance():
    rows = [[1.0, 0.0], [0.0, 1.0], [0.35, 0.1], [0.1, 0.35], [2.0, 0.0], [0.0, 1.0]]
    equal = in_float32(rows, (1.0, 1.0), 2)
    assert has_variance(equal).tolist() == [False, False, True]
    # ±0.7070 and ∓0.7070; in the third group, 1 / (√2 + 1e-4) and -0.5 / (√½ + 1e-4) differ by 5e-5
    assert has_variance(equal, "normalize_then_sum").tolist() == [False, False, True]
    weighted = in_float32(rows, (1.0, 2.0), 2)
    assert has_variance(weighted).tolist() == [True, True, False]
    assert has_variance(weighted, "normalize_then_sum").all()


def test_variance_is_that_of_the_registered_aggregation():
    register_aggregation("least", lambda rewards_NF, weights_F, num_generations: rewards_NF.amin(-1))
    rewards = in_float32([[1.0, 0.0], [0.0, 5.0], [1.0, 0.0], [1.0, 2.0]], (1.0, 1.0), 2)
    assert has_variance(rewards, "least").tolist() == [False, True]


def test_a_difference_of_outcome_or_step_rewards_is_enough():
    steps = {0: [[(1, 0.5)], [(2, 0.5)], [(1, 0.5)], [(1, 1.0)], [(1, 0.5), (3, 0.0)], []]}
    rows = [[math.nan, value] for value in (0.0, 1.0, 2.0, 2.0, 2.0, 2.0)]
    rewards = in_float32(rows, (1.0, 1.0), 2, step_rewards=steps, num_tokens=4)
    assert has_variance(rewards).tolist() == [True, True, True]
    equal = in_float32(rows[4:], (1.0, 1.0), 2, step_rewards={0: steps[0][:2]}, num_tokens=4)
    assert has_variance(equal).tolist() == [False]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("functions", [1, 3])
@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_advantages(kind, aggregation, scale, functions, missing):
    weights = [0.7, -1.3, 2.0][:functions]
    rows = rewards_table(functions, missing)
    for size in (4, 2, 20, 1):
        got = ADVANTAGES[kind](to_core(rows, weights, size), AdvantageSettings(scale, aggregation))
        expected = advantages(rows, weights, size, scale, aggregation, kind)
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-10)


def test_a_group_by_hand():
    """Rewards 1, 2, 3, 6: mean 3, unbiased variance (4+1+0+9)/3 = 14/3."""
    got = ADVANTAGES["group_mean"](to_core([[1.0], [2.0], [3.0], [6.0]], [1.0], 4), AdvantageSettings())
    std = math.sqrt(14 / 3)
    assert got.tolist() == pytest.approx([x / (std + 1e-4) for x in (-2, -1, 0, 3)])


def test_leave_one_out_by_hand():
    """Mean of the others of 1, 2, 3, 6: 11/3, 10/3, 3, 2."""
    got = ADVANTAGES["leave_one_out"](
        to_core([[1.0], [2.0], [3.0], [6.0]], [1.0], 4), AdvantageSettings("none")
    )
    assert got.tolist() == pytest.approx([1 - 11 / 3, 2 - 10 / 3, 0.0, 4.0])


def test_the_epsilon_keeps_equal_rewards_at_zero_and_tiny_spreads_small():
    """Std of (0, 1e-4) is 1e-4/√2, so A = ±0.5e-4 / (1e-4/√2 + 1e-4) = ±0.2929 instead of ±0.7071."""
    settings = AdvantageSettings()
    assert ADVANTAGES["group_mean"](to_core([[2.0], [2.0]], [1.0], 2), settings).tolist() == [0.0, 0.0]
    got = ADVANTAGES["group_mean"](to_core([[0.0], [1e-4]], [1.0], 2), settings)
    assert got.tolist() == pytest.approx([-0.2929, 0.2929], abs=1e-4)


def test_a_none_reward_does_not_count_in_the_statistics():
    """1, None, 3: mean 2 and std √2 of the two that are there; the missing one gets 0."""
    got = ADVANTAGES["group_mean"](to_core([[1.0], [None], [3.0]], [1.0], 3), AdvantageSettings())
    value = 1 / (math.sqrt(2) + 1e-4)
    assert got.tolist() == pytest.approx([-value, 0.0, value])


def test_no_reward_at_all_gives_zero_everywhere():
    for kind, aggregation, scale in itertools.product(KINDS, AGGREGATIONS, SCALES):
        got = ADVANTAGES[kind](
            to_core([[None, None]] * 4, [1.0, 2.0], 2), AdvantageSettings(scale, aggregation)
        )
        assert got.tolist() == [0.0] * 4


STEPS = [
    [(1, 1.0), (3, 0.0), (5, 2.0)],
    [(2, -1.0)],
    [],
    [(0, 0.5), (5, 0.5)],
    [],
    [],
    [],
    [],
    [(4, 3.0)],
    [],
    [],
    [],
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size", [4, 2])
def test_process_supervision(scale, size, kind):
    got = core.process_advantages(STEPS, size, 6, scale=scale, leave_out=kind == "leave_one_out")
    expected = process_advantages(STEPS, size, 6, scale, kind)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_process_supervision_by_hand():
    """Rewards 1, 3 of one sequence, 2 of the other: mean 2, std 1; the second step ends at token 2."""
    got = core.process_advantages([[(0, 1.0), (2, 3.0)], [(1, 2.0)]], 2, 4, scale="none")
    assert got.tolist() == [[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("scale", SCALES)
def test_process_rewards_beside_outcome_rewards(kind, aggregation, scale):
    rng = random.Random(3)
    rows = [[rng.gauss(0, 1), None] for _ in STEPS]
    rows[2][0] = None
    weights = [0.7, 0.3]
    table = to_core(rows, weights, 4)
    table = GroupRewards(table.rewards_NF, table.weights_F, 4, {1: STEPS}, 6)
    got = ADVANTAGES[kind](table, AdvantageSettings(scale, aggregation))
    outcome = advantages(rows, weights, 4, scale, aggregation, kind)
    # Rewards that are normalized function by function have a deviation of the group.
    own_scale = "group" if aggregation == "normalize_then_sum" and scale == "batch" else scale
    process = process_advantages(STEPS, 4, 6, own_scale, kind)
    expected = [[o + 0.3 * p for p in row] for o, row in zip(outcome, process, strict=True)]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)


#: Spans of turns in 12 tokens: with results of tools between them; a second row, from which the third turn
#: returns; a request that is repeated, of which the second answer begins with tokens of the first.
TURNS = [
    [(0, 2), (4, 7), (9, 12)],
    [(0, 3), (7, 9), (5, 7), (9, 10)],
    [(0, 3), (7, 9), (0, 5), (0, 3)],
    [(0, 1)],
] * 3


def rewarded_turns(rng: random.Random, only_last: bool = False) -> list[list[tuple[int, float]]]:
    steps = [[(end - 1, rng.gauss(0, 1)) for _, end in turns] for turns in TURNS]
    steps = [each[-1:] if only_last else each for each in steps]
    return [each[:-1] if i == 4 else [] if i == 6 else each for i, each in enumerate(steps)]


@pytest.mark.parametrize("kind", [*KINDS, "turn_level"])
@pytest.mark.parametrize("scale", SCALES)
def test_a_turn_is_credited_with_what_came_after_it_in_time(kind, scale):
    steps, weights = rewarded_turns(random.Random(1)), [0.7, 0.3]
    rows = [[random.Random(i).gauss(0, 1), None] for i in range(12)]
    table = to_core(rows, weights, 4)
    table = replace(table, step_rewards={1: steps}, num_tokens=12, turns=TURNS)
    got = ADVANTAGES[kind](table, AdvantageSettings(scale))
    base = "group_mean" if kind == "turn_level" else kind
    outcome = advantages(rows, weights, 4, scale, "sum_then_normalize", base)
    process = process_advantages(steps, 4, 12, scale, base, TURNS, own=kind == "turn_level")
    expected = [[o + 0.3 * p for p in row] for o, row in zip(outcome, process, strict=True)]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", SCALES)
def test_a_reward_of_the_last_turn_alone_is_an_outcome_reward(kind, scale):
    steps = rewarded_turns(random.Random(2), only_last=True)
    rows = [[each[0][1] if each else None] for each in steps]
    outcome = ADVANTAGES[kind](to_core(rows, [1.0], 4), AdvantageSettings(scale))
    table = replace(to_core([[None]] * 12, [1.0], 4), step_rewards={0: steps}, num_tokens=12, turns=TURNS)
    got = ADVANTAGES[kind](table, AdvantageSettings(scale))
    for row, turns in enumerate(TURNS):
        sampled = sorted({t for start, stop in turns for t in range(start, stop)})
        expected = outcome[row].expand(len(sampled))
        torch.testing.assert_close(got[row, sampled], expected, rtol=1e-9, atol=1e-12)
        assert not got[row, sorted({*range(12)} - {*sampled})].any()  # results of tools


def test_credit_in_time_by_hand():
    """Rewards 1, 3 of the second and third turn, 2 of the other completion; token 3 is of a tool."""
    turns = [[(0, 2), (5, 6), (2, 3)], [(0, 1)]]
    steps = [[(5, 1.0), (2, 3.0)], [(0, 2.0)]]
    got = core.process_advantages(steps, 2, 6, scale="none", turns=turns)
    assert got.tolist() == [[0.0, 0.0, 1.0, 0.0, 0.0, 0.0], [0.0] * 6]
    own = core.process_advantages(steps, 2, 6, scale="none", turns=turns, own_turn=True)
    assert own.tolist() == [[0.0, 0.0, 1.0, 0.0, 0.0, -1.0], [0.0] * 6]


def test_two_process_functions_are_weighted_and_added():
    table = GroupRewards(
        torch.full((12, 2), math.nan), torch.tensor([0.5, 2.0]), 4, {0: STEPS, 1: STEPS[::-1]}, 6
    )
    got = ADVANTAGES["group_mean"](table, AdvantageSettings())
    first, second = process_advantages(STEPS, 4, 6), process_advantages(STEPS[::-1], 4, 6)
    expected = [
        [0.5 * a + 2 * b for a, b in zip(x, y, strict=True)] for x, y in zip(first, second, strict=True)
    ]
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_float32_stays_within_its_budget():
    """Rewards of size r with spread σ lose a few times eps · r / σ in the subtraction."""
    rows = [[100.0 + 0.1 * (i * 7 % 11)] for i in range(8)]
    got = ADVANTAGES["group_mean"](GroupRewards(torch.tensor(rows), torch.ones(1), 4), AdvantageSettings())
    exact = torch.tensor(rows).double().tolist()
    expected = torch.tensor(advantages(exact, [1.0], 4, "group", "sum_then_normalize", "group_mean"))
    assert (got - expected).abs().max() <= 8 * torch.finfo(torch.float32).eps * 100 / 0.1


def test_a_penalty_is_subtracted_from_the_aggregated_reward():
    """1 − 0.5, None, 3 − 1 = 0.5, None, 2.0; mean 1.25."""
    rewards = replace(
        to_core([[1.0], [None], [3.0]], [1.0], 3),
        penalty_N=torch.tensor([0.5, 9.0, 1.0], dtype=torch.float64),
    )
    got = ADVANTAGES["group_mean"](rewards, AdvantageSettings("none"))
    assert got.tolist() == pytest.approx([-0.75, 0.0, 0.75])
    weighted = replace(to_core([[1.0], [3.0]], [2.0], 2), penalty_N=torch.tensor([0.5, 1.0]))
    assert core.total_rewards(weighted).tolist() == [1.5, 5.0]


def test_small_groups_are_dropped():
    given = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [0, 0, 0]]).bool().flatten()
    expected = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]]).bool().flatten()
    assert torch.equal(core.with_small_groups(given, 3), expected)
    assert torch.equal(core.with_small_groups(given, 1), given)  # evaluation with one completion per prompt


@pytest.mark.parametrize("size", [2, 3, 4])
def test_dropped_completions_leave_the_gradient_unbiased(size):
    """Expected gradient by enumeration: a policy of one bit, faults it does not cause.

    Leave-one-out advantages, divided by the completions that remain, give p (1 - p) (r_1 - r_0) for every
    pattern of faults that leaves two completions.
    """
    p, rewards = 0.3, torch.tensor([0.25, 1.5], dtype=torch.float64)
    expected = p * (1 - p) * (1.5 - 0.25)
    for pattern in itertools.product([False, True], repeat=size):
        dropped = core.with_small_groups(torch.tensor(pattern), size)
        if dropped.all():
            continue
        gradient = 0.0
        for bits in itertools.product([0, 1], repeat=size):
            probability = math.prod(p if bit else 1 - p for bit in bits)
            table = rewards[list(bits)].masked_fill(dropped, math.nan)
            group = GroupRewards(table[:, None], torch.ones(1, dtype=torch.float64), size)
            advantages_N = ADVANTAGES["leave_one_out"](group, AdvantageSettings(scale="none"))
            assert not advantages_N[dropped].any()
            scores_N = torch.tensor(bits) - p  # derivative of the log-prob by the logit
            gradient += probability * (advantages_N * scores_N).sum().item() / (~dropped).sum().item()
        assert gradient == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", SCALES)
def test_a_group_with_dropped_completions_is_a_smaller_group(kind, scale, aggregation):
    """The rewards of 4 completions, 2 of them dropped, against a group of 2 in a batch of its own."""
    settings = AdvantageSettings(scale, aggregation)
    kept = torch.tensor([[0.0, 1.0], [2.0, 0.5]], dtype=torch.float64)
    whole = torch.full((4, 2), math.nan, dtype=torch.float64)
    whole[[0, 3]] = kept
    weights = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found = ADVANTAGES[kind](GroupRewards(whole, weights, 4), settings)
    expected = ADVANTAGES[kind](GroupRewards(kept, weights, 2), settings)
    torch.testing.assert_close(found[[0, 3]], expected)
    assert not found[[1, 2]].any()
