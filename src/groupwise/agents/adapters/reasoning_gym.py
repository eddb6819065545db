"""reasoning-gym tasks as an environment that brings its own data and its own reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from groupwise.errors import ConfigError


class ReasoningGymEnvironment:
    """One task at a time; its question is the observation."""

    def __init__(self, tasks: Any) -> None:
        self._tasks = tasks

    def reset(self, seed: int = 0, **row: Any) -> str:
        self._entry = self._tasks[seed % len(self._tasks)]
        self._score = 0.0
        return f"{self._entry['question']}\nHand in your answer with the tool submit."

    def submit(self, answer: str) -> str:
        """Hand in the answer to the question. The last one counts.

        Args:
            answer: nothing but the answer, in the form that the question asks for.
        """
        self._score = float(self._tasks.score_answer(answer, self._entry))
        return "correct" if self._score == 1.0 else f"not right, score {self._score:.2f}; try again"

    def get_reward(self) -> float:
        return self._score


def reasoning_gym_factory(tasks: Any) -> Callable[[], ReasoningGymEnvironment]:
    """An ``environment_factory`` for a reasoning-gym dataset; leave ``train_dataset`` out, set ``max_steps``.

    Every group gets one task. For answers in the text instead of a tool, see
    :func:`groupwise.rewards.reasoning_gym_dataset`.

    Args:
        tasks: from ``groupwise.rewards.create_reasoning_gym(name, seed=..., size=...)``.

    Raises:
        ConfigError: ``tasks`` has no ``score_answer``.
    """
    if not callable(getattr(tasks, "score_answer", None)):
        raise ConfigError(f"{type(tasks).__name__} has no score_answer; allowed: a reasoning-gym dataset")
    return lambda: ReasoningGymEnvironment(tasks)
