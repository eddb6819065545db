"""Chains of two operations by two turns: a sub-agent does the first one, the main agent the second.

The same four pieces in both forms: examples E1 and E2 of the turns, the first operation with its sampled
answer a, and a request with the sub-agent's answer and the second operation, answered by b::

    two rows      [E1 first operation] a        [E2 request(a)] b          (in brackets: prompts)
    one row       [E1 E2 first operation] a request(a) b                   (the request has loss mask 0)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tasks
from methods import chat_ids

from groupwise import SamplingOptions

#: Tokens of a turn.
TURN = 12

Messages = list[dict[str, str]]

SYSTEM = {"role": "system", "content": "Write one equation."}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def request(answer: str, operation: str) -> dict[str, str]:
    """Return the main agent's message: what the sub-agent answered, and the second operation."""
    return user(f"Found: {answer}\n{operation} What is the result?")


FIRST_EXAMPLE = [user("Start with 4. Add 3."), assistant("4 + 3 = 7")]
SECOND_EXAMPLE = [request("4 + 3 = 7", "Subtract 2."), assistant("7 - 2 = 5")]


def operations(question: str) -> tuple[str, str]:
    """Return the start with the first operation, and the second one, of a question of ``tasks.chain``."""
    start, first, second = re.findall(r"[^.?]+\.", question)
    return start + first, second.strip()


def two_rows(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Sample both turns of every rollout as rows of their own (``rollout_func``)."""
    parts = [operations(prompt[-1]["content"]) for prompt in prompts]
    firsts = [[SYSTEM, *FIRST_EXAMPLE, user(first)] for first, _ in parts]
    rows = [sample(trainer, firsts)]
    answers = texts(trainer, rows[0][1])
    seconds = [
        [SYSTEM, *SECOND_EXAMPLE, request(answer, second)]
        for answer, (_, second) in zip(answers, parts, strict=True)
    ]
    rows.append(sample(trainer, seconds))
    return {
        "prompt_ids": [row[0][i] for i in range(len(prompts)) for row in rows],
        "completion_ids": [row[1][i] for i in range(len(prompts)) for row in rows],
        "rollout_ids": [i for i in range(len(prompts)) for _ in rows],
        "final_text": texts(trainer, rows[1][1]),
    }


def one_row(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Sample both turns of every rollout as one conversation (``rollout_func``)."""
    parts = [operations(prompt[-1]["content"]) for prompt in prompts]
    begun = [SYSTEM, *FIRST_EXAMPLE, *SECOND_EXAMPLE]
    chats, firsts = sample(trainer, [[*begun, user(first)] for first, _ in parts])
    given = [
        between(trainer.processing_class, first, request(answer, second))
        for first, answer, (_, second) in zip(firsts, texts(trainer, firsts), parts, strict=True)
    ]
    contexts = [chat + first + ids for chat, first, ids in zip(chats, firsts, given, strict=True)]
    seconds = sampled(trainer, contexts)
    turns = list(zip(firsts, given, seconds, strict=True))
    return {
        "prompt_ids": chats,
        "completion_ids": [first + ids + second for first, ids, second in turns],
        "env_mask": [[1] * len(first) + [0] * len(ids) + [1] * len(second) for first, ids, second in turns],
        "final_text": texts(trainer, seconds),
    }


def sample(trainer: Any, chats: Sequence[Messages]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompts of ``chats`` and a sampled turn after each, as token ids."""
    prompts = chat_ids(chats, trainer.processing_class)
    return prompts, sampled(trainer, prompts)


def sampled(trainer: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Sample one turn after each prompt, all at once."""
    found = trainer.backend.generate(prompts, SamplingOptions([TURN] * len(prompts)))
    return [one.token_ids for one in found]


def texts(trainer: Any, turns: Sequence[list[int]]) -> list[str]:
    """Return the texts of sampled turns."""
    return trainer.processing_class.batch_decode(turns, skip_special_tokens=True)


def between(tokenizer: Any, turn: Sequence[int], message: dict[str, str]) -> list[int]:
    """Return the tokens of the chat template from the end of a sampled turn to the next one."""
    chat = [SYSTEM, assistant("<turn>"), message]
    whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(whole.split("<turn>")[1], add_special_tokens=False)["input_ids"]
    return ids[1:] if turn[-1] == ids[0] else ids  # the end token may be sampled


def correct(final_text: Sequence[str], answer: Sequence[str], log_extra: Any = None, **_: Any) -> list[float]:
    """Return 1 for the right number at the end of the main agent's turn, else 0, as ``tasks.correct``."""
    return tasks.correct([[assistant(text)] for text in final_text], answer, log_extra)


#: Rollout functions by the name of ``run.Cell.rollout``.
ROLLOUTS = {"two_rows": two_rows, "one_row": one_row}
