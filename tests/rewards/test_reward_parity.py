"""The library gives what TRL's gives, where TRL's takes the same arguments."""

from __future__ import annotations

import itertools

import pytest

from groupwise import rewards as ours

theirs = pytest.importorskip("trl.rewards")
pytestmark = pytest.mark.parity

TEXTS = [
    r"It is \boxed{\frac{1}{3}}",
    r"\boxed{0.5} or \boxed{\frac12}",
    "so $x = 4$",
    "$4$",
    "4",
    "",
    r"<think>\boxed{4}</think> $5$",
    r"<think>a</think> \boxed{4}",
    r"<think>\boxed{4} and so on",
    r"<think><think></think>\boxed{4\text{ cm}}",
    r"\boxed{\{1, 2\}}",
    r"\boxed{(x+1)^2}",
]
GOLD = [r"\frac{1}{3}", "4", "0.5", r"$\{2, 1\}$", r"$x^2 + 2x + 1$", "no number"]
IDS = [list(sequence) for length in range(7) for sequence in itertools.product([1, 2], repeat=length)]


def chats():
    return [[{"role": "assistant", "content": text}] for text in TEXTS for _ in GOLD]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accuracy_reward", "reasoning_accuracy_reward"])
def test_accuracy_and_what_it_logs_are_the_same(name):
    pytest.importorskip("math_verify")
    logs = [{}, {}]
    results = [
        getattr(library, name)(chats(), GOLD * len(TEXTS), log_extra=log.__setitem__)
        for library, log in zip((ours, theirs), logs, strict=True)
    ]
    assert results[0] == results[1] and {0.0, 1.0, None} >= set(results[0]) >= {0.0, 1.0}
    assert logs[0] == logs[1]


@pytest.mark.slow
def test_cosine_scaled_accuracy_is_the_same():
    pytest.importorskip("math_verify")
    ids = [[1] * length for length in range(len(TEXTS) * len(GOLD))]
    mine, their = (
        library.get_cosine_scaled_reward(max_len=40)(chats(), GOLD * len(TEXTS), completion_ids=ids)
        for library in (ours, theirs)
    )
    assert [value is None for value in mine] == [value is None for value in their]
    known = [(a, b) for a, b in zip(mine, their, strict=True) if a is not None]
    assert all(a == pytest.approx(b, abs=1e-12) for a, b in known)


def test_the_format_is_the_same():
    assert ours.think_format_reward(chats()) == theirs.think_format_reward(chats())


@pytest.mark.parametrize("lengths", [(6, 0), (6, 2), (6, 6), (3, 1)])
def test_the_punishment_is_the_same(lengths):
    mine, their = (library.get_soft_overlong_punishment(*lengths)(IDS) for library in (ours, theirs))
    assert mine == pytest.approx(their, abs=1e-12)


@pytest.mark.parametrize("settings", [(1, -1.0), (2, -0.5), (3, 0.0)])
def test_the_penalty_is_the_same(settings):
    mine, their = (library.get_repetition_penalty_reward(*settings)(IDS) for library in (ours, theirs))
    assert mine == pytest.approx(their, abs=1e-12)
