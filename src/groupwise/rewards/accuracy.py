"""Rewards for the right final answer, compared as mathematics rather than as text."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from groupwise.errors import ConfigError
from groupwise.rewards.runtime.marking import per_sample_reward
from groupwise.rewards.texts import answer_text, check_number, check_whole, require

LogExtra = Callable[[str, list[Any]], None]


class _Grade(NamedTuple):
    reward: float | None
    gold: str
    answer: str


@per_sample_reward
def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[Any], log_extra: LogExtra | None = None, **_: Any
) -> list[float | None]:
    r"""1 where the answer equals the solution, 0 where it does not, by math-verify.

    The answer is LaTeX: what stands in ``\boxed{...}`` (several boxes in a row are one set), else an
    expression after words such as "the final answer is". A bare number in the text is none. The columns
    ``solution``, ``gold_parsed`` and ``answer_parsed`` are logged.

    Outside the main thread (that is, with ``reward_timeout``) math-verify has no time limit of its own.

    Args:
        completions: strings or message lists, of which the last message counts.
        solution: the dataset column with the right answers, as LaTeX or plain numbers.

    Returns:
        1.0 or 0.0 per completion; None where the solution is None or cannot be parsed.

    Raises:
        ImportError: math-verify is not installed.
    """
    require("math_verify", "accuracy_reward")
    pairs = zip(completions, solution, strict=True)
    return _report([_grade(answer_text(text), gold) for text, gold in pairs], solution, log_extra)


@per_sample_reward
def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[Any],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra | None = None,
    **_: Any,
) -> list[float | None]:
    """As :func:`accuracy_reward`, for what follows the reasoning; 0 where the reasoning does not end.

    Args:
        reasoning_delimiters: strings that end the reasoning; the answer is what follows the last of them in
            the text. None: ``["</think>"]``.

    Returns:
        as :func:`accuracy_reward`; unfinished reasoning is 0.0 even where the solution cannot be parsed.

    Raises:
        ImportError: math-verify is not installed.
        ConfigError: there is no delimiter, or an empty one.
    """
    require("math_verify", "reasoning_accuracy_reward")
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    if isinstance(delimiters, str) or not delimiters or not all(delimiters):
        raise ConfigError(
            f"reasoning_delimiters={delimiters!r} is not valid; allowed: a list of non-empty strings"
        )
    grades = []
    for completion, gold in zip(completions, solution, strict=True):
        text = answer_text(completion)
        end = max(text.rfind(mark) + len(mark) if mark in text else -1 for mark in delimiters)
        unfinished = _Grade(0.0, "[incomplete reasoning]", "[incomplete reasoning]")
        grades.append(unfinished if end < 0 else _grade(text[end:], gold))
    return _report(grades, solution, log_extra)


def _grade(text: str, solution: Any) -> _Grade:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # Its limits are alarm signals, which only the main thread can set.
    limited = threading.current_thread() is threading.main_thread()
    parsing, comparing = (10, 5) if limited else (None, None)
    gold = [] if solution is None else parse(str(solution), parsing_timeout=parsing)
    if not gold:
        return _Grade(None, "[unparseable]", "[skipped]")
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),
        boxed_match_priority=0,
        # A stray number in the text is no answer.
        try_extract_without_anchor=False,
    )
    answer = parse(text, extraction_config=[latex], extraction_mode="first_match", parsing_timeout=parsing)
    right = verify(gold, answer, timeout_seconds=comparing)
    return _Grade(float(right), str(gold), str(answer) if answer else "[unparseable]")


def _report(grades: list[_Grade], solution: Sequence[Any], log_extra: LogExtra | None) -> list[float | None]:
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
    r"""Accuracy whose size depends on the length: short is better when right and worse when wrong.

    .. math:: R(y) = r_L + \tfrac{1}{2} (r_0 - r_L) (1 + \cos(\pi \min(|y| / L, 1)))

    with r_0 at length 0 and r_L at length L (``max_len``) and beyond (Demystifying Long Chain-of-Thought
    Reasoning, arXiv 2502.03373, appendix C.1). The paper's separate reward for exceeding L is left to
    :func:`get_soft_overlong_punishment`.

    Args:
        max_len: L, in tokens.
        min_value_wrong, max_value_wrong: r_0 and r_L of a wrong answer.
        min_value_correct, max_value_correct: r_L and r_0 of a right answer.

    Returns:
        a reward function of ``completions``, ``solution`` and ``completion_ids``; None where
        :func:`accuracy_reward` is None.

    Raises:
        ConfigError: ``max_len`` is no positive integer or a value is not finite.
    """
    return _CosineScaled(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)


@dataclass(frozen=True)
class _CosineScaled:
    per_sample_reward: ClassVar[bool] = True
    __name__: ClassVar[str] = "cosine_scaled_reward"

    max_len: int
    min_value_wrong: float
    max_value_wrong: float
    min_value_correct: float
    max_value_correct: float

    def __post_init__(self) -> None:
        check_whole("max_len", self.max_len, 1)
        for name in ("min_value_wrong", "max_value_wrong", "min_value_correct", "max_value_correct"):
            check_number(name, getattr(self, name))

    def __call__(
        self, completions: Sequence[Any], solution: Sequence[Any], completion_ids: Sequence[Any], **_: Any
    ) -> list[float | None]:
        right = accuracy_reward(completions, solution)
        return [self._scaled(is_right, len(ids)) for is_right, ids in zip(right, completion_ids, strict=True)]

    def _scaled(self, is_right: float | None, length: int) -> float | None:
        if is_right is None:
            return None
        short, long = self.min_value_wrong, self.max_value_wrong
        if is_right:
            short, long = self.max_value_correct, self.min_value_correct
        # Past max_len the cosine would rise again.
        progress = min(length / self.max_len, 1.0)
        return long + 0.5 * (short - long) * (1.0 + math.cos(math.pi * progress))
