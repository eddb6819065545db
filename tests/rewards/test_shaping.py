"""Rewards for form, against the equations of the papers."""

from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import ConfigError
from groupwise.rewards import (
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    think_format_reward,
)


def ids(*lengths):
    return [[1] * length for length in lengths]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think>b", 1.0),
        ("<think>\na\n</think>\nb", 1.0),
        ("<think></think>", 1.0),
        ("<think>a", 0.0),
        ("a</think>b", 0.0),
        (" <think>a</think>b", 0.0),
        ("<think>a<think>b</think>c", 0.0),
        ("<think>a</think>b<think>c</think>", 0.0),
        ("", 0.0),
    ],
)
def test_reasoning_is_in_one_pair_of_tags_at_the_start(text, reward):
    assert think_format_reward([text, [{"role": "assistant", "content": text}]], prompts=None) == [reward] * 2


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", "\n"]), max_size=6).map("".join))
def test_the_format_is_that_of_the_regular_expression(text):
    pattern = r"^<think>(?!.*<think>)(.*?)</think>.*$"
    expected = float(re.match(pattern, text, re.DOTALL | re.MULTILINE) is not None)
    assert think_format_reward([text]) == [expected]


def test_the_punishment_grows_over_the_last_tokens():
    reward = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    # (80 - |y|) / 20 between 80 and 100
    assert reward(completion_ids=ids(0, 80, 81, 90, 100, 101, 500)) == [0, 0, -0.05, -0.5, -1, -1, -1]
    assert reward.__name__ == "soft_overlong_punishment_reward"


def test_without_a_cache_the_punishment_is_a_step():
    assert get_soft_overlong_punishment(10, 0)(completion_ids=ids(10, 11)) == [0.0, -1.0]


def test_a_cache_of_the_whole_length_punishes_every_token():
    assert get_soft_overlong_punishment(10, 10)(completion_ids=ids(0, 1, 10)) == [0.0, -0.1, -1.0]


def test_the_penalty_is_the_share_of_repeated_ngrams():
    reward = get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
    # 55 four times: one distinct of four; 12 21 12: two distinct of three
    sequences = [[1, 2, 3, 4], [5] * 5, [1, 2, 1, 2], [7], []]
    assert reward(completion_ids=sequences) == [0.0, -0.75, pytest.approx(-1 / 3), 0.0, 0.0]
    assert get_repetition_penalty_reward(1, -2.0)(completion_ids=[[5, 5]]) == [-1.0]
    assert get_repetition_penalty_reward()(completion_ids=[[5, 5, 5], [5] * 4]) == [0.0, -0.5]
    assert reward.__name__ == "repetition_penalty_reward"


@pytest.mark.parametrize(
    ("make", "arguments", "allowed"),
    [
        (get_soft_overlong_punishment, (0, 0), "max_completion_len=0 .* allowed: >= 1; nearest valid: 1"),
        (get_soft_overlong_punishment, (10, 11), "soft_punish_cache=11 .* >= 0 and <= 10; nearest valid: 10"),
        (get_soft_overlong_punishment, (10, -1), "soft_punish_cache=-1"),
        (get_soft_overlong_punishment, (10.0, 1), "max_completion_len=10.0"),
        (get_repetition_penalty_reward, (0,), "ngram_size=0 .* allowed: >= 1"),
        (get_repetition_penalty_reward, (3, 0.5), "max_penalty=0.5 .* allowed: <= 0; nearest valid: 0"),
        (get_repetition_penalty_reward, (3, float("-inf")), "max_penalty=-inf"),
    ],
)
def test_bad_arguments_are_refused(make, arguments, allowed):
    with pytest.raises(ConfigError, match=allowed):
        make(*arguments)


@pytest.mark.parametrize("reward", [get_soft_overlong_punishment(9, 3), get_repetition_penalty_reward()])
def test_rewards_survive_pickling(reward):
    loaded, tokens = pickle.loads(pickle.dumps(reward)), ids(5, 8, 10)
    assert loaded(completion_ids=tokens) == reward(completion_ids=tokens)
    assert loaded.__name__ == reward.__name__
