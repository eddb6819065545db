"""Rewards for correct final answers, compared mathematically with math-verify."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from groupwise.config.settings import check_value
from groupwise.errors import ConfigError
from groupwise.rewards.runtime.marking import per_sample_reward, requires_package, with_settings
from groupwise.rewards.texts import Text, answer_text, require, text_with_thoughts

LogExtra = Callable[[str, list], None]


class _Grade(NamedTuple):
    reward: float | None
    gold: str
    answer: str


@per_sample_reward
@requires_package("math_verify")
def accuracy_reward(
    completions: Sequence[Text],
    solution: Sequence[str | float | None],
    log_extra: LogExtra | None = None,
    **_: object,
) -> list[float | None]:
    r"""Return 1 if the answer equals the solution, else 0, compared by math-verify.

    The answer is LaTeX: the content of ``\boxed{...}`` (adjacent boxes form one set), else an expression
    after words such as "the final answer is". A bare number in the text is not an answer. Logs the columns
    ``solution``, ``gold_parsed`` and ``answer_parsed``.

    math-verify applies its own time limit in the main thread only, so not with ``reward_timeout``.

    Args:
        completions: strings, or message lists of which the last message is scored.
        solution: dataset column of correct answers, as LaTeX or plain numbers.

    Returns:
        1.0 or 0.0 per completion; None where the solution is None or cannot be parsed.

    Raises:
        ImportError: math-verify is not installed.
    """
    require("math_verify", "accuracy_reward")
    pairs = zip(completions, solution, strict=True)
    return _report([_grade(answer_text(text), gold) for text, gold in pairs], solution, log_extra)


@per_sample_reward
@requires_package("math_verify")
def reasoning_accuracy_reward(
    completions: Sequence[Text],
    solution: Sequence[str | float | None],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra | None = None,
    **_: object,
) -> list[float | None]:
    """Apply :func:`accuracy_reward` to the text after the reasoning; incomplete reasoning gets 0.

    Args:
        reasoning_delimiters: strings that end the reasoning; the answer follows the last one in the text.
            None: ``["</think>"]``.

    Returns:
        as :func:`accuracy_reward`; incomplete reasoning is 0.0 even if the solution cannot be parsed.

    Raises:
        ImportError: math-verify is not installed.
        ConfigError: the list of delimiters is empty or has an empty string.
    """
    require("math_verify", "reasoning_accuracy_reward")
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    if isinstance(delimiters, str) or not delimiters or not all(delimiters):
        raise ConfigError(
            f"reasoning_delimiters={delimiters!r} is not valid; allowed: a list of non-empty strings"
        )
    grades = []
    for completion, gold in zip(completions, solution, strict=True):
        text = text_with_thoughts(completion)
        end = max(text.rfind(mark) + len(mark) if mark in text else -1 for mark in delimiters)
        unfinished = _Grade(0.0, "[incomplete reasoning]", "[incomplete reasoning]")
        grades.append(unfinished if end < 0 else _grade(text[end:], gold))
    return _report(grades, solution, log_extra)


def _grade(text: str, solution: str | float | None) -> _Grade:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # math-verify limits time by alarm signals, which only the main thread can set.
    limited = threading.current_thread() is threading.main_thread()
    parsing, comparing = (10, 5) if limited else (None, None)
    gold = [] if solution is None else parse(str(solution), parsing_timeout=parsing)
    if not gold:
        return _Grade(None, "[unparseable]", "[skipped]")
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),
        boxed_match_priority=0,
        # a number in the text is not an answer
        try_extract_without_anchor=False,
    )
    answer = parse(text, extraction_config=[latex], extraction_mode="first_match", parsing_timeout=parsing)
    right = verify(gold, answer, timeout_seconds=comparing)
    return _Grade(float(right), str(gold), str(answer) if answer else "[unparseable]")


def _report(
    grades: list[_Grade], solution: Sequence[str | float | None], log_extra: LogExtra | None
) -> list[float | None]:
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [grade.gold for grade in grades])
        log_extra("answer_parsed", [grade.answer for grade in grades])
    return [grade.reward for grade in grades]


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    r"""Create an accuracy reward scaled by length: shorter is better if correct and worse if wrong.

    .. math:: R(y) = r_L + \tfrac{1}{2} (r_0 - r_L) (1 + \cos(\pi \min(|y| / L, 1)))

    with r_0 at length 0 and r_L at length L (``max_len``) and beyond (Demystifying Long Chain-of-Thought
    Reasoning, arXiv 2502.03373, appendix C.1). For the paper's separate penalty beyond L, add
    :func:`get_soft_overlong_punishment`.

    Args:
        max_len: L, in tokens.
        min_value_wrong: r_0, the reward of a wrong answer without length.
        max_value_wrong: r_L, that of a wrong answer of the greatest length.
        min_value_correct: r_L of a correct answer.
        max_value_correct: r_0 of a correct answer.

    Returns:
        a reward function of ``completions``, ``solution`` and ``completion_ids``; None where
        :func:`accuracy_reward` is None.

    Raises:
        ConfigError: ``max_len`` is not a positive integer, or a value is not finite.
    """
    check_value("max_len", max_len, int, ge=1)
    wrong, correct = (min_value_wrong, max_value_wrong), (max_value_correct, min_value_correct)
    names = ("min_value_wrong", "max_value_wrong", "max_value_correct", "min_value_correct")
    for name, value in zip(names, (*wrong, *correct), strict=True):
        check_value(name, value, float)
    return with_settings(cosine_scaled_reward, max_len, wrong, correct)


@per_sample_reward
@requires_package("math_verify")
def cosine_scaled_reward(
    max_len: int,
    wrong: tuple[float, float],
    correct: tuple[float, float],
    /,
    completions: Sequence[Text],
    solution: Sequence[str | float | None],
    completion_ids: Sequence[Sequence[int]],
    **_: object,
) -> list[float | None]:
    """Return the rewards of :func:`get_cosine_scaled_reward`; (r_0, r_L) of wrong and correct answers."""
    rewards: list[float | None] = []
    for accuracy, ids in zip(accuracy_reward(completions, solution), completion_ids, strict=True):
        short, long = correct if accuracy else wrong
        progress = min(len(ids) / max_len, 1.0)  # clipped: the cosine rises again beyond max_len
        scaled = long + 0.5 * (short - long) * (1.0 + math.cos(math.pi * progress))
        rewards.append(None if accuracy is None else scaled)
    return rewards
