"""Generated tasks with a step-by-step solution: arithmetic chains, word problems and reasoning-gym tasks.

Every question is generated from a seed and checked by its number. Training and held-out questions of a task
do not overlap; the reasoning-gym tasks are never trained on.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

INSTRUCTION = "Work step by step, one equation per line. End with a line 'Answer:' and the number."

#: Tasks that are trained on, and reasoning-gym tasks that are only evaluated.
TRAINED = ("chains", "stories")
UNSEEN = {
    "chain_sum": {"min_digits": 1, "max_digits": 2, "max_terms": 3},
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
    """Two or three operations on a number: "Start with 7. Add 5. Multiply by 2. What is the result?"."""
    value = rng.randint(2, 20)
    parts, lines = [f"Start with {value}."], []
    for _ in range(rng.randint(2, 3)):
        kind, number = rng.choice(["+", "-", "*"]), rng.randint(2, 9)
        result = {"+": value + number, "-": value - number, "*": value * number}[kind]
        word = {"+": f"Add {number}.", "-": f"Subtract {number}.", "*": f"Multiply by {number}."}[kind]
        parts.append(word)
        lines.append(f"{value} {kind} {number} = {result}")
        value = result
    return Question(" ".join([*parts, "What is the result?"]), str(value), _solution(lines, value))


def story(rng: random.Random) -> Question:
    """A purchase and a gift, or several boxes: two operations in words."""
    name, other = rng.sample(NAMES, 2)
    thing, first, second = rng.choice(THINGS), rng.randint(2, 9), rng.randint(2, 9)
    if rng.random() < 0.5:
        third = rng.randint(1, first * second - 1)
        text = (
            f"{name} has {first} boxes with {second} {thing} each and gives {third} {thing} to {other}. "
            f"How many {thing} does {name} have left?"
        )
        lines = [
            f"{first} * {second} = {first * second}",
            f"{first * second} - {third} = {first * second - third}",
        ]
        answer = first * second - third
    else:
        third = rng.randint(2, 9)
        text = (
            f"{name} has {first} {thing} and finds {second} more. {other} has {third} times as many. "
            f"How many {thing} does {other} have?"
        )
        lines = [
            f"{first} + {second} = {first + second}",
            f"{first + second} * {third} = {(first + second) * third}",
        ]
        answer = (first + second) * third
    return Question(text, str(answer), _solution(lines, answer))


def _solution(lines: Sequence[str], answer: int) -> str:
    return "\n".join([*lines, f"Answer: {answer}"])


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


def unseen(task: str, size: int) -> list[Question]:
    """Return questions of a reasoning-gym task with an integer answer; the package must be installed."""
    from groupwise.rewards import create_reasoning_gym

    entries = create_reasoning_gym(task, size=size, seed=1, **UNSEEN[task])
    return [Question(entries[i]["question"], str(entries[i]["answer"]), None) for i in range(size)]


def dataset(task: str, questions: Sequence[Question]) -> Dataset:
    """Return rows with ``prompt`` (chat), ``answer``, ``solution`` and ``task``."""
    rows: list[dict[str, Any]] = [
        {
            "prompt": [{"role": "user", "content": f"{question.text}\n{INSTRUCTION}"}],
            "answer": question.answer,
            "solution": question.solution or "",
            "task": task,
        }
        for question in questions
    ]
    return Dataset.from_list(rows)


def final_number(text: str) -> str | None:
    """Return the number after the last "Answer:", else the last number; None without one."""
    numbers = re.findall(r"-?\d+", text.rpartition("Answer:")[2])
    return numbers[0 if "Answer:" in text else -1] if numbers else None


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


def get_step_reward(tokenizer: Any) -> Callable[..., list[list[tuple[int, float]]]]:
    """Create a process reward: 1 per true equation and for the right last line, 0 per other line.

    A line ends at the token with its line break, or at the last token of the completion.
    """

    def step_reward(
        completion_ids: Sequence[Sequence[int]], answer: Sequence[str], **_: Any
    ) -> list[list[tuple[int, float]]]:
        return [steps(ids, right) for ids, right in zip(completion_ids, answer, strict=True)]

    def steps(ids: Sequence[int], right: str) -> list[tuple[int, float]]:
        found, line = [], ""
        for index, token in enumerate(ids):
            line += tokenizer.decode([token], skip_special_tokens=True)
            last = index == len(ids) - 1
            if not ("\n" in line or last):
                continue
            text = line.strip()
            good = final_number(text) == right if last or "Answer:" in text else is_true_equation(text)
            if text or last:
                found.append((index, float(good)))
            line = ""
        return found

    return step_reward
