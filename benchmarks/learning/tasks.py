"""Generated tasks with a step-by-step solution: arithmetic chains, word problems and reasoning-gym tasks.

Every question is generated from a seed and checked by its number. Only chains are trained on, and their
held-out questions do not overlap with those. Every prompt begins with the same worked example, without which
a model of 135 million parameters solves none of the chains.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

EXAMPLE = (
    {"role": "system", "content": "Calculate step by step, one equation per line."},
    {"role": "user", "content": "Start with 4. Add 3. Subtract 2. What is the result?"},
    {"role": "assistant", "content": "4 + 3 = 7\n7 - 2 = 5"},
)

#: Generated tasks that are trained on, and all tasks that are only evaluated.
TRAINED = ("chains",)
UNSEEN = ("stories", "chain_sum", "letter_counting")
REASONING_GYM = {
    "chain_sum": {"min_digits": 1, "max_digits": 1, "max_terms": 3},
    "letter_counting": {"max_words": 6},
}

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")
THINGS = ("apples", "books", "coins", "cards", "pens", "shells", "stamps", "toys")


@dataclass(frozen=True)
class Question:
    """A question with its answer; ``solution`` is the target of supervised fine-tuning, None without one."""

    text: str
    answer: str
    solution: str | None


def chain(rng: random.Random) -> Question:
    """Two additions or subtractions, never below 0: "Start with 7. Add 5. Subtract 2. …"."""
    value = rng.randint(2, 9)
    parts, lines = [f"Start with {value}."], []
    for _ in range(2):
        number = rng.randint(1, 9)
        adds = number > value or rng.random() < 0.5
        result = value + number if adds else value - number
        parts.append(f"{'Add' if adds else 'Subtract'} {number}.")
        lines.append(f"{value} {'+' if adds else '-'} {number} = {result}")
        value = result
    return Question(" ".join([*parts, "What is the result?"]), str(value), "\n".join(lines))


def story(rng: random.Random) -> Question:
    """An addition and a subtraction in words."""
    name, other = rng.sample(NAMES, 2)
    thing, first, second = rng.choice(THINGS), rng.randint(2, 9), rng.randint(2, 9)
    third = rng.randint(1, first + second - 1)
    text = f"{name} has {first} {thing}, finds {second} and gives {third} to {other}. How many are left?"
    lines = [
        f"{first} + {second} = {first + second}",
        f"{first + second} - {third} = {first + second - third}",
    ]
    return Question(text, str(first + second - third), "\n".join(lines))


GENERATORS: dict[str, Callable[[random.Random], Question]] = {"chains": chain, "stories": story}


def generated(task: str, size: int, *, held_out: bool = False) -> list[Question]:
    """Return ``size`` distinct questions; held-out ones are distinct from all training questions."""
    rng, found, seen = random.Random(f"{task}"), [], set()
    while len(found) < size:
        question = GENERATORS[task](rng)
        # Decided by the text: the same question is always on the same side of the split.
        is_held_out = random.Random(question.text).random() < 0.2
        if question.text not in seen and is_held_out == held_out:
            seen.add(question.text)
            found.append(question)
    return found


def reasoning_gym(task: str, size: int) -> list[Question]:
    """Return questions of a reasoning-gym task with an integer answer; the package must be installed."""
    import reasoning_gym as gym

    entries = gym.create_dataset(task, size=size, seed=1, **REASONING_GYM[task])
    return [Question(entries[i]["question"], str(entries[i]["answer"]), None) for i in range(size)]


def dataset(task: str, questions: Sequence[Question]) -> Dataset:
    """Return rows with ``prompt`` (chat), ``answer``, ``solution`` and ``task``."""
    rows: list[dict[str, Any]] = [
        {
            "prompt": [*EXAMPLE, {"role": "user", "content": question.text}],
            "answer": question.answer,
            "solution": question.solution or "",
            "task": task,
        }
        for question in questions
    ]
    return Dataset.from_list(rows)


def final_number(text: str) -> str | None:
    """Return the last number; None without one."""
    numbers = re.findall(r"-?\d+", text)
    return numbers[-1] if numbers else None


def correct(
    completions: Sequence[Any], answer: Sequence[str], log_extra: Any = None, **_: Any
) -> list[float]:
    """Return 1 for the right final number, else 0; the numbers are the votes of maj@k."""
    found = [final_number(completion[-1]["content"]) for completion in completions]
    if log_extra is not None:
        log_extra("answer_parsed", found)
    return [float(number == right) for number, right in zip(found, answer, strict=True)]


def is_true_equation(line: str) -> bool:
    """Return True for "a op b = c" with the right c and op one of + - *."""
    match = re.fullmatch(r"\s*(-?\d{1,9}) ([-+*]) (-?\d{1,9}) = (-?\d{1,18})\s*", line)
    if match is None:
        return False
    left, kind, right, result = int(match[1]), match[2], int(match[3]), int(match[4])
    return {"+": left + right, "-": left - right, "*": left * right}[kind] == result


Scores = list[list[tuple[int, float]]]


def equation_reward(tokenizer: Any) -> Callable[..., Scores]:
    """Create a process reward: 1 per true equation, 1 for a last line that ends with the answer, else 0.

    A line ends at the token with its line break, or at the last token of the completion. Any number of lines
    is scored, so that further equations pay as well.
    """

    def reward(completion_ids: Sequence[Sequence[int]], answer: Sequence[str], **_: Any) -> Scores:
        return [scores(ids, right) for ids, right in zip(completion_ids, answer, strict=True)]

    def scores(ids: Sequence[int], right: str) -> list[tuple[int, float]]:
        found = []
        for index, text in lines(tokenizer, ids):
            last = index == len(ids) - 1
            good = final_number(text) == right if last else is_true_equation(text)
            if text or last:
                found.append((index, float(good)))
        return found

    return reward


def solution_reward(tokenizer: Any) -> Callable[..., Scores]:
    """Create a process reward with two scores: 1 for each line that is that line of the solution.

    The second line counts only if it is the last one: the sum is 2 for the solution and for nothing else. Its
    score is at the last token. A missing second line is a wrong one: its score of 0 stands at the end token
    alone, so that to stop there is never better than to try.
    """

    def reward(completion_ids: Sequence[Sequence[int]], solution: Sequence[str], **_: Any) -> Scores:
        return [scores(ids, right.split("\n")) for ids, right in zip(completion_ids, solution, strict=True)]

    def scores(ids: Sequence[int], right: Sequence[str]) -> list[tuple[int, float]]:
        found = [(index, text) for index, text in lines(tokenizer, ids) if text]
        if not ids:
            return []
        end = len(ids) - 1
        first = float(bool(found) and found[0][1] == right[0])
        if len(found) < 2:
            return [(max(end - 1, 0), first), (end, 0.0)]
        return [(found[0][0], first), (end, float([text for _, text in found] == list(right)))]

    return reward


#: Process rewards by the name of ``run.Cell.process``; each is created from the tokenizer.
STEP_REWARDS = {"equations": equation_reward, "solution": solution_reward}


def lines(tokenizer: Any, ids: Sequence[int]) -> list[tuple[int, str]]:
    """Return the lines of a completion: index of the last token, and the text without spaces at its ends."""
    found, line = [], ""
    for index, token in enumerate(ids):
        line += tokenizer.decode([token], skip_special_tokens=True)
        if "\n" in line or index == len(ids) - 1:
            found.append((index, line.strip()))
            line = ""
    return found
