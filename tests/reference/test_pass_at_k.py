"""pass@k, majority votes and intervals against enumeration of everything that could have been sampled.

Files: ``core/pass_at_k.py``.
"""

from __future__ import annotations

import math
import statistics
from fractions import Fraction
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.core.pass_at_k import majority_at_k, mean_with_interval, pass_at_k


def enumerated_pass(passed: list[bool], k: int) -> Fraction:
    """The share of all choices of k completions in which one passes."""
    choices = list(combinations(passed, k))
    return Fraction(sum(any(choice) for choice in choices), len(choices))


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_choices_in_which_one_passes(passed, data):
    k = data.draw(st.integers(1, len(passed)))
    expected = enumerated_pass(passed, k)
    # Every factor of the product and the difference round once.
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(float(expected), abs=4 * k * 2**-53)


def test_pass_at_k_where_binomials_would_overflow():
    # 1 - C(9990, 2) / C(10000, 2)
    assert pass_at_k(10_000, 10, 2) == pytest.approx(1 - 9990 * 9989 / (10_000 * 9999), rel=1e-12)
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5, rel=1e-9)


@given(st.integers(1, 200), st.data())
def test_pass_at_k_grows_with_k_and_with_what_passed(count, data):
    passed = data.draw(st.integers(0, count))
    chances = [pass_at_k(count, passed, k) for k in range(1, count + 1)]
    assert chances[0] == pytest.approx(passed / count)
    assert all(low <= high + 1e-12 for low, high in pairwise(chances))
    assert chances[-1] == float(passed > 0)
    assert all(chance == 1.0 for chance in chances[count - passed :])


def enumerated_majority(votes: list[tuple[str | None, bool]], k: int) -> Fraction:
    """The mean over all choices of k completions of what the most frequent answer is worth."""
    choices = list(combinations(votes, k))
    total = Fraction(0)
    for choice in choices:
        num_valid = [vote for vote in choice if vote[0] is not None]
        tallies = {answer: sum(vote[0] == answer for vote in num_valid) for answer, _ in num_valid}
        winners = [answer for answer in tallies if tallies[answer] == max(tallies.values())]
        for winner in winners:
            right = [passed for answer, passed in num_valid if answer == winner]
            total += Fraction(sum(right), len(right) * len(winners))
    return total / len(choices)


VOTES = st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=5)


@settings(max_examples=60)
@given(VOTES, st.data())
def test_majority_votes_are_unbiased(votes, data):
    # Completions come in any order: the mean over all of them is the mean over all choices of k.
    k = data.draw(st.integers(1, len(votes)))
    found = [
        majority_at_k([answer for answer, _ in order], [passed for _, passed in order], k)
        for order in permutations(votes)
    ]
    assert statistics.fmean(found) == pytest.approx(float(enumerated_majority(votes, k)), abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "passed", "expected"),
    [
        ("aab", (1, 1, 0), 1.0),
        ("aab", (0, 0, 1), 0.0),
        ("ab", (1, 0), 0.5),  # a draw
        ("aabb", (1, 0, 0, 0), 0.25),  # a draw between an answer judged in two ways and a wrong one
        ([None, None, "a"], (1, 1, 0), 0.0),  # no answer is no vote
        ([None, None], (1, 1), 0.0),
    ],
)
def test_votes_by_hand(answers, passed, expected):
    assert majority_at_k(list(answers), [bool(p) for p in passed], len(answers)) == expected


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=50))
def test_the_interval_is_that_of_the_normal_distribution(values):
    mean, half = mean_with_interval(values)
    assert mean == pytest.approx(statistics.fmean(values), abs=1e-9)
    quantile = statistics.NormalDist().inv_cdf(0.975)
    assert half == pytest.approx(
        quantile * statistics.stdev(values) / math.sqrt(len(values)), rel=1e-5, abs=1e-9
    )


def test_undefined_statistics_are_nan():
    assert mean_with_interval([2.0])[0] == 2.0
    assert all(math.isnan(value) for value in (mean_with_interval([2.0])[1], *mean_with_interval([])))


def test_the_interval_holds_the_truth_in_95_of_100_evaluations():
    # 400 evaluations of 200 prompts solved with chance 0.3: binomial with 400 trials, 0.95 +- 4 deviations.
    import random

    draw = random.Random(0)
    held = 0
    for _ in range(400):
        mean, half = mean_with_interval([float(draw.random() < 0.3) for _ in range(200)])
        held += abs(mean - 0.3) <= half
    assert abs(held / 400 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 400)
