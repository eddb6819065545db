"""Tasks become rows, and rows find their task again to be scored."""

from __future__ import annotations

import sys

import pytest

from groupwise.errors import ConfigError
from groupwise.rewards import create_reasoning_gym, get_reasoning_gym_reward, reasoning_gym_dataset
from groupwise.rewards.reasoning_gym import last_answer


class Sums:
    """The interface of a reasoning-gym dataset."""

    def __init__(self, seed: int = 0, size: int = 3) -> None:
        self.seed, self.size = seed, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        # metadata that no table holds
        total = self.seed + index
        return {"question": f"{self.seed} + {index} = ?", "answer": str(total), "metadata": {(1, 2): {index}}}

    def score_answer(self, answer, entry):
        assert entry["metadata"][(1, 2)]
        return 0.0 if answer is None else 1.0 if answer == entry["answer"] else 0.25


def columns(data):
    return {name: list(data[name]) for name in data.column_names if name.startswith("reasoning_gym_")}


def test_rows_hold_the_prompt_and_the_answer():
    data = reasoning_gym_dataset(Sums(seed=5))
    assert list(data["prompt"]) == ["5 + 0 = ?", "5 + 1 = ?", "5 + 2 = ?"]
    assert list(data["answer"]) == ["5", "6", "7"]


def test_a_system_prompt_makes_chats():
    user = {"role": "user", "content": "0 + 0 = ?"}
    assert reasoning_gym_dataset(Sums(size=1), "Think.")[0]["prompt"] == [
        {"role": "system", "content": "Think."},
        user,
    ]
    assert reasoning_gym_dataset(Sums(size=1), "")[0]["prompt"] == [user]


def test_the_answer_of_the_completion_is_scored_by_the_dataset():
    tasks = Sums(seed=5)
    reward = get_reasoning_gym_reward(tasks)
    texts = [
        "<answer>4</answer> no, <answer> 5 </answer>",
        [{"role": "assistant", "content": "</think>9"}],
        "",
    ]
    assert reward(texts, **columns(reasoning_gym_dataset(tasks)), answer=["5", "6", "7"]) == [1.0, 0.25, 0.0]


def test_rows_of_other_data_are_left_to_other_rewards():
    reward = get_reasoning_gym_reward(Sums())
    assert reward(["1"], reasoning_gym_index=[None], reasoning_gym_question=[None]) == [None]


def test_another_dataset_than_that_of_the_rows_is_refused():
    rows = columns(reasoning_gym_dataset(Sums(seed=5)))
    for other in (Sums(seed=6), Sums(seed=5, size=0)):
        with pytest.raises(ConfigError, match="task 0 of the reward is not the one in the dataset"):
            get_reasoning_gym_reward(other)(["1"] * 3, **rows)


def test_something_that_cannot_score_is_refused():
    with pytest.raises(ConfigError, match="list has no score_answer"):
        get_reasoning_gym_reward([])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1</answer><answer>\n2\n</answer>", "2"),
        ("<think>1</think> 2 ", "2"),
        ("3", "3"),
        ("<answer> </answer>", None),
        ("<think>1</think>", None),
        ("<answer><answer>1</answer></answer>", "<answer>1"),
        ("<answer>1</answer> <answer>2", "1"),
        pytest.param("<answer>" * 100_000, "<answer>" * 100_000, id="long"),  # not quadratic
    ],
)
def test_the_answer_is_tagged_or_follows_the_reasoning(text, answer):
    assert last_answer(text) == answer


def test_without_reasoning_gym_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"needs reasoning-gym, .* pip install 'groupwise\[rewards\]'"):
        create_reasoning_gym("leg_counting", seed=1)


def test_real_tasks_are_scored_by_their_own_rule():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match="needs a seed"):
        create_reasoning_gym("basic_arithmetic", size=2)
    tasks = create_reasoning_gym("basic_arithmetic", size=4, seed=7)
    data = reasoning_gym_dataset(tasks)
    again = create_reasoning_gym("basic_arithmetic", size=4, seed=7)
    texts = [f"<answer>{answer}</answer>" for answer in data["answer"]]
    assert get_reasoning_gym_reward(again)(texts, **columns(data)) == [1.0] * 4
    assert max(get_reasoning_gym_reward(again)(["<answer>no</answer>"] * 4, **columns(data))) < 1.0
