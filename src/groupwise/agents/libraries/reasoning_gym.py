"""Adapter for reasoning-gym tasks: an environment with its own data and reward."""

from __future__ import annotations

from collections.abc import Callable

from groupwise.rewards.reasoning_gym import Tasks, check_tasks


class ReasoningGymEnvironment:
    """One task per rollout; its question is the observation."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks

    def reset(self, seed: int = 0, **row: object) -> str:
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
        """Return the score of the last answer."""
        return self._score


def reasoning_gym_factory(tasks: Tasks) -> Callable[[], ReasoningGymEnvironment]:
    """Return an ``environment_factory`` for a reasoning-gym dataset; leave out ``train_dataset``, set
    ``max_steps``.

    All completions of a group get the same task. For answers in the text instead of a tool call, see
    :func:`groupwise.rewards.reasoning_gym_dataset`.

    Args:
        tasks: dataset from ``groupwise.rewards.create_reasoning_gym(name, seed=..., size=...)``.

    Raises:
        ConfigError: ``tasks`` has no ``score_answer``.
    """
    check_tasks(tasks)
    return lambda: ReasoningGymEnvironment(tasks)
