"""Generated tasks: answers, the split, and the rewards of answers and steps."""

from __future__ import annotations

import importlib.util
import itertools
import re

import pytest
import tasks

from groupwise.core.advantages import process_advantages

TEXTS = ["3 + 4 = 7", "7 * 2 = 15", "so it is", "7 * 2 = 14"]


class Letters:
    """A tokenizer with one token per character."""

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(token) for token in ids)


class WithEnd(Letters):
    """The same with an end token, $, which is left out of the text."""

    def decode(self, ids, skip_special_tokens):
        return super().decode(ids, skip_special_tokens).replace("$", "")


@pytest.mark.parametrize("task", tasks.GENERATORS)
def test_solutions_are_true_and_end_with_the_answer(task):
    for question in tasks.generated(task, 100):
        lines = question.solution.split("\n")
        assert len(lines) == 2 and all(tasks.is_true_equation(line) for line in lines)
        assert tasks.final_number(question.solution) == question.answer
        numbers = re.findall(r"\d+", question.text)
        assert all(number in numbers for number in re.findall(r"^\d+", lines[0]))


@pytest.mark.parametrize("task", tasks.GENERATORS)
def test_held_out_questions_are_never_trained_on(task):
    train = [question.text for question in tasks.generated(task, 1000)]
    held_out = [question.text for question in tasks.generated(task, 100, held_out=True)]
    assert len(set(train)) == 1000 and len(set(held_out)) == 100
    assert set(train).isdisjoint(held_out)
    assert train == [question.text for question in tasks.generated(task, 1000)]  # the same in every process


@pytest.mark.slow
@pytest.mark.parametrize("task", tasks.REASONING_GYM)
def test_tasks_of_reasoning_gym_have_integer_answers(task):
    if importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("reasoning_gym is not installed")
    for question in tasks.reasoning_gym(task, 20):
        assert re.fullmatch(r"-?\d+", question.answer) and question.solution is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7", "7"),
        ("5 - 11 = -6 apples", "-6"),
        ("it is 12, or 13.", "13"),
        ("none", None),
        ("", None),
    ],
)
def test_the_final_number(text, number):
    assert tasks.final_number(text) == number


def test_answers_are_rewarded_and_logged_as_votes():
    logged = {}
    chats = [[{"role": "assistant", "content": text}] for text in ("3 + 4 = 7", "3 + 4 = 8", "?")]
    rewards = tasks.correct(
        chats, ["7", "7", "7"], log_extra=lambda name, values: logged.update({name: values})
    )
    assert rewards == [1.0, 0.0, 0.0] and logged == {"answer_parsed": ["7", "8", None]}


@pytest.mark.parametrize(
    ("line", "true"),
    [
        ("2 + 3 = 5", True),
        ("2 - 3 = -1", True),
        ("-4 * 3 = -12", True),
        ("2 + 3 = 6", False),
        ("2+3=5", False),
    ],
)
def test_equations(line, true):
    assert tasks.is_true_equation(line) is true


def test_every_line_is_a_step_that_ends_at_its_last_token():
    text = "\n".join(TEXTS)
    reward = tasks.equation_reward(Letters())
    (steps,) = reward(completion_ids=[[ord(letter) for letter in text]], answer=["14"])
    ends = [len("\n".join(TEXTS[: i + 1])) for i in range(4)]  # of the line breaks, and of the last letter
    assert steps == list(zip([*ends[:3], ends[3] - 1], [1.0, 0.0, 0.0, 1.0], strict=True))
    assert reward(completion_ids=[[], [ord("1")], [ord("\n")]], answer=["1", "1", "1"]) == [
        [],
        [(0, 1.0)],
        [(0, 0.0)],
    ]


SOLUTION = "4 + 3 = 7\n7 - 2 = 5"


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        (SOLUTION, [(9, 1.0), (18, 1.0)]),
        (SOLUTION + "\n", [(9, 1.0), (19, 1.0)]),
        (SOLUTION + "\n5 + 0 = 5", [(9, 1.0), (28, 0.0)]),  # a further line, true and with the answer
        ("4 + 3 = 7\n4 + 3 = 7", [(9, 1.0), (18, 0.0)]),
        ("1 + 1 = 2\n7 - 2 = 5", [(9, 0.0), (18, 0.0)]),  # true, but of another question
        ("4 + 3 = 7", [(7, 1.0), (8, 0.0)]),
        ("7 - 2 = 5", [(7, 0.0), (8, 0.0)]),
        ("\n", [(0, 0.0), (0, 0.0)]),
        ("", []),
    ],
)
def test_only_the_solution_earns_the_reward_of_two_lines(text, scores):
    reward = tasks.solution_reward(Letters())
    assert reward(completion_ids=[[ord(letter) for letter in text]], solution=[SOLUTION]) == [scores]


def test_to_stop_after_the_first_line_is_as_bad_as_a_wrong_second_one():
    """The choice is the token after the first line: the end, or the beginning of another line."""
    texts = ["4 + 3 = 7$", "4 + 3 = 7\n1 + 1 = 2", SOLUTION, "1 + 1 = 2\n7 - 2 = 5"]
    ids = [[*map(ord, text)] for text in texts]
    reward = tasks.solution_reward(WithEnd())
    advantages_NT = process_advantages(reward(completion_ids=ids, solution=[SOLUTION] * 4), 4, 20)
    stopped, wrong, right = advantages_NT[0, 9], advantages_NT[1, 10], advantages_NT[2, 10]
    assert stopped == wrong < 0 < right


def test_no_text_earns_more_than_the_solution():
    """All sequences of up to three lines out of true, false and right ones."""
    reward = tasks.solution_reward(Letters())
    parts = [*SOLUTION.split("\n"), "5 + 0 = 5", "5", ""]
    texts = ["\n".join(chosen) for n in (1, 2, 3) for chosen in itertools.product(parts, repeat=n)]
    sums = [
        sum(score for _, score in scores)
        for scores in reward(completion_ids=[[*map(ord, t)] for t in texts], solution=[SOLUTION] * len(texts))
    ]
    best = {
        text.strip("\n").replace("\n\n", "\n") for text, total in zip(texts, sums, strict=True) if total == 2
    }
    assert max(sums) == 2 and best == {SOLUTION}
