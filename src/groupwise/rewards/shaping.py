"""Rewards for format, length and repetition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from groupwise.config.settings import check_value
from groupwise.rewards.runtime.marking import per_sample_reward, with_settings
from groupwise.rewards.texts import Text, text_with_thoughts


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
    check_value("max_completion_len", max_completion_len, int, ge=1)
    check_value("soft_punish_cache", soft_punish_cache, int, ge=0, le=max_completion_len)
    return with_settings(soft_overlong_punishment_reward, max_completion_len, soft_punish_cache)


@per_sample_reward
def soft_overlong_punishment_reward(
    limit: int, cache: int, /, completion_ids: Sequence[Sequence[int]], **_: object
) -> list[float]:
    """Return the penalties of :func:`get_soft_overlong_punishment`."""
    excess = [len(ids) - (limit - cache) for ids in completion_ids]
    return [0.0 if over <= 0 else -1.0 if over > cache else -over / cache for over in excess]


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
    check_value("ngram_size", ngram_size, int, ge=1)
    check_value("max_penalty", max_penalty, float, le=0)
    return with_settings(repetition_penalty_reward, ngram_size, max_penalty)


@per_sample_reward
def repetition_penalty_reward(
    size: int, max_penalty: float, /, completion_ids: Sequence[Sequence[int]], **_: object
) -> list[float]:
    """Return the penalties of :func:`get_repetition_penalty_reward`."""
    rewards = []
    for ids in completion_ids:
        ngrams = [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]
        repeated = len(ngrams) - len(set(ngrams))
        rewards.append(max_penalty * repeated / len(ngrams) if repeated else 0.0)
    return rewards
