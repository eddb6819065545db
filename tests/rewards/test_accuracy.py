"""Answers are compared as mathematics; what cannot be judged is None.

Files: ``rewards/texts.py``.
"""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import threading

import pytest

from groupwise.errors import ConfigError
from groupwise.rewards import (
    accuracy,
    accuracy_reward,
    get_cosine_scaled_reward,
    reasoning_accuracy_reward,
    think_format_reward,
)
from groupwise.rewards.texts import answer_text, text_with_thoughts


def chat(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture
def math_verify():
    pytest.importorskip("math_verify")


@pytest.mark.usefixtures("math_verify")
def test_equal_values_in_other_notation_are_correct():
    texts = [
        r"It is \boxed{\frac{1}{3}}",
        r"\boxed{\frac{2}{6}}",
        r"\boxed{0.5}",
        "The final answer is $4$",
        "4",
        "",
    ]
    gold = [r"\frac{1}{3}", r"\frac{1}{3}", r"\frac{1}{3}", "4", "4", "4"]
    # a number without LaTeX around it is no answer
    assert accuracy_reward([chat(text) for text in texts], gold) == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    assert accuracy_reward(texts, gold) == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.usefixtures("math_verify")
def test_solutions_that_cannot_be_parsed_have_no_reward_and_are_logged():
    logged = {}
    gold = ["6", None, "", 6]
    assert accuracy_reward([r"\boxed{6}"] * 4, gold, log_extra=logged.__setitem__) == [1.0, None, None, 1.0]
    assert logged["solution"] == gold
    assert logged["gold_parsed"][1:3] == ["[unparseable]"] * 2
    assert logged["answer_parsed"][1] == "[skipped]" and "6" in logged["answer_parsed"][0]


@pytest.mark.usefixtures("math_verify")
def test_outside_the_main_thread_it_works_as_well():
    rewards = []
    thread = threading.Thread(target=lambda: rewards.extend(accuracy_reward([r"\boxed{6}"], ["6"])))
    thread.start()
    thread.join()
    assert rewards == [1.0]


@pytest.mark.usefixtures("math_verify")
def test_only_what_follows_the_reasoning_counts():
    texts = [
        r"<think>\boxed{3}</think> \boxed{2}",
        r"<think>\boxed{2}</think> \boxed{3}",
        r"<think>it is \boxed{2}",
        r"<think>a</think> \boxed{3} <think>b</think> \boxed{2}",
    ]
    assert reasoning_accuracy_reward([chat(text) for text in texts], ["2"] * 4) == [1.0, 0.0, 0.0, 1.0]
    assert reasoning_accuracy_reward(texts[2:3], [None]) == [0.0]
    assert reasoning_accuracy_reward(texts[:1], [None]) == [None]


@pytest.mark.usefixtures("math_verify")
def test_the_last_of_several_delimiters_ends_the_reasoning():
    text = r"\boxed{1} <end> \boxed{2} </think> none"
    for delimiters in (["</think>", "<end>"], ["<end>", "</think>"]):
        assert reasoning_accuracy_reward([text], ["2"], reasoning_delimiters=delimiters) == [0.0]
    assert reasoning_accuracy_reward([text], ["2"], reasoning_delimiters=["<end>"]) == [1.0]


@pytest.mark.usefixtures("math_verify")
@pytest.mark.parametrize("delimiters", [[], [""], "</think>"])
def test_delimiters_must_be_a_list_of_texts(delimiters):
    with pytest.raises(ConfigError, match="allowed: a list of non-empty strings"):
        reasoning_accuracy_reward(["x"], ["1"], reasoning_delimiters=delimiters)


def test_the_cosine_goes_from_short_to_long_and_stays(monkeypatch):
    right = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, None]
    monkeypatch.setattr(accuracy, "accuracy_reward", lambda completions, solution: right)
    reward = get_cosine_scaled_reward(max_len=90)
    lengths = [0, 30, 90, 200, 0, 45, 90, 10]
    rewards = reward([""] * 8, [""] * 8, completion_ids=[[0] * length for length in lengths])
    # right: 0.5 + 0.25 (1 + cos): cos 0 = 1, cos 60° = 1/2, cos 180° = -1; wrong: -0.5 - 0.25 (1 + cos)
    expected = [1.0, 0.875, 0.5, 0.5, -1.0, -0.75, -0.5]
    assert rewards[:7] == pytest.approx(expected, abs=1e-12) and rewards[7] is None


@pytest.mark.parametrize(
    "arguments",
    [{"max_len": 0}, {"max_len": 1.5}, {"max_len": 9, "max_value_wrong": math.nan}],
)
def test_bad_cosine_arguments_are_refused(arguments):
    with pytest.raises(ConfigError, match="; allowed: "):
        get_cosine_scaled_reward(**arguments)


def test_rewards_survive_pickling():
    reward = get_cosine_scaled_reward(max_len=9)
    loaded = pickle.loads(pickle.dumps(reward))
    assert (loaded.func, loaded.args) == (reward.func, reward.args)
    assert loaded.__name__ == reward.__name__ == "cosine_scaled_reward"


@pytest.mark.parametrize("name", ["accuracy_reward", "reasoning_accuracy_reward"])
def test_without_math_verify_the_extra_is_named(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(
        ImportError, match=rf"^{name} needs math-verify, .* pip install 'groupwise\[rewards\]'"
    ):
        getattr(accuracy, name)(["x"], ["1"])


def test_importing_the_library_loads_no_optional_package():
    code = (
        "import sys, groupwise.rewards as r; "
        "heavy = 'torch', 'datasets', 'sympy', 'math_verify'; "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain", "plain"),
        (chat("a"), "a"),
        ([*chat("call"), {"role": "tool", "content": "4"}, *chat("so 4")], "so 4"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}], "a"),
        ([{"role": "assistant", "content": None}], ""),
        ([], ""),
    ],
)
def test_the_last_message_is_the_answer(completion, text):
    assert answer_text(completion) == text


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "12"}, "12"),
        ({"content": "12", "reasoning_content": "3 x 4"}, "<think>\n3 x 4\n</think>\n\n12"),
        ({"content": "12", "thinking": "3 x 4"}, "<think>\n3 x 4\n</think>\n\n12"),
        ({"content": "", "reasoning_content": "3 x"}, "<think>\n3 x\n"),
        ({"content": "", "reasoning_content": "3", "tool_calls": [{}]}, "<think>\n3\n</think>\n\n"),
    ],
)
def test_thoughts_of_a_message_come_before_its_content(message, text):
    assert text_with_thoughts([{"role": "assistant", **message}]) == text


@pytest.mark.usefixtures("math_verify")
def test_rewards_on_reasoning_read_the_thoughts_of_a_message():
    done = [{"role": "assistant", "content": r"$\boxed{12}$", "reasoning_content": "3 x 4"}]
    cut = [{"role": "assistant", "content": "", "reasoning_content": "3 x"}]
    assert reasoning_accuracy_reward([done, cut], ["$12$", "$12$"]) == [1.0, 0.0]
    assert think_format_reward([done, cut]) == [1.0, 0.0]
