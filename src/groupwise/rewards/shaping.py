"""Rewards for format, length and repetition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from groupwise.rewards.runtime.marking import per_sample_reward
from groupwise.rewards.texts import Text, check_number, check_whole, text_with_thoughts


@per_sample_reward
def think_format_reward(completions: Sequence[Text], **_: object) -> list[float]:
    """Return 1 for texts that begin with their only ``<think>`` tag and close it, else 0.

    The format reward of DeepSeek-R1 (arXiv 2501.12948, section 2.2.2).

    Args:
        completions: strings, or message lists of which the last message is scored.
    """
    return [
        float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text)
        for text in map(text_with_thoughts, completions)
    ]


def get_soft_overlong_punishment(
    max_completion_len: int, soft_punish_cache: int
) -> Callable[..., list[float]]:
    r"""Create a penalty that grows over the last tokens before the length limit.

    .. math:: R(y) = \max(-1, \min(0, ((L_{max} - L_{cache}) - |y|) / L_{cache}))

    (DAPO, arXiv 2503.14476, equation 13.) With ``soft_punish_cache=0`` it is -1 beyond the limit, else 0.

    Args:
        max_completion_len: L_max, tokens.
        soft_punish_cache: L_cache, tokens over which the penalty grows, at most L_max.

    Returns:
        a reward function of ``completion_ids`` with values in [-1, 0].

    Raises:
        ConfigError: a length is not an integer or out of range.
    """
    return _SoftOverlong(max_completion_len, soft_punish_cache)


@dataclass(frozen=True)
class _SoftOverlong:
    per_sample_reward: ClassVar[bool] = True
    __name__: ClassVar[str] = "soft_overlong_punishment_reward"

    max_completion_len: int
    soft_punish_cache: int

    def __post_init__(self) -> None:
        check_whole("max_completion_len", self.max_completion_len, 1)
        check_whole("soft_punish_cache", self.soft_punish_cache, 0, self.max_completion_len)

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
        return [self._penalty(len(ids)) for ids in completion_ids]

    def _penalty(self, length: int) -> float:
        excess = length - (self.max_completion_len - self.soft_punish_cache)
        if excess <= 0:
            return 0.0
        return -1.0 if length > self.max_completion_len else -excess / self.soft_punish_cache


def get_repetition_penalty_reward(
    ngram_size: int = 3, max_penalty: float = -1.0
) -> Callable[..., list[float]]:
    r"""Create a penalty for repeated token n-grams.

    .. math:: R(y) = p \cdot (1 - \text{distinct n-grams} / \text{n-grams})

    (Demystifying Long Chain-of-Thought Reasoning, arXiv 2502.03373, appendix C.2, as one number per
    completion.)

    Args:
        ngram_size: n, in tokens. Shorter completions get 0.
        max_penalty: p, at most 0.

    Returns:
        a reward function of ``completion_ids`` with values in (p, 0].

    Raises:
        ConfigError: ``ngram_size`` is not a positive integer, or ``max_penalty`` is positive.
    """
    return _RepetitionPenalty(ngram_size, max_penalty)


@dataclass(frozen=True)
class _RepetitionPenalty:
    per_sample_reward: ClassVar[bool] = True
    __name__: ClassVar[str] = "repetition_penalty_reward"

    ngram_size: int
    max_penalty: float

    def __post_init__(self) -> None:
        check_whole("ngram_size", self.ngram_size, 1)
        check_number("max_penalty", self.max_penalty, most=0.0)

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
        return [self._penalty(ids) for ids in completion_ids]

    def _penalty(self, ids: Sequence[int]) -> float:
        size = self.ngram_size
        ngrams = [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]
        repeated = len(ngrams) - len(set(ngrams))
        return self.max_penalty * repeated / len(ngrams) if repeated else 0.0
