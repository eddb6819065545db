"""reasoning-gym datasets as training data, and their own scoring as a reward."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from groupwise.errors import ConfigError
from groupwise.rewards.texts import answer_text, require

if TYPE_CHECKING:
    from datasets import Dataset

INDEX, QUESTION = "reasoning_gym_index", "reasoning_gym_question"


def create_reasoning_gym(name: str, **settings: Any) -> Any:
    """A reasoning-gym dataset by name; ``seed`` is required, because every process creates its own.

    Raises:
        ImportError: reasoning-gym is not installed.
        ConfigError: no seed.
    """
    gym = require("reasoning_gym", "create_reasoning_gym")
    if settings.get("seed") is None:
        raise ConfigError(
            "create_reasoning_gym needs a seed (an integer): all processes and a resumed run must create the "
            "same tasks"
        )
    return gym.create_dataset(name, **settings)


def reasoning_gym_dataset(tasks: Any, system_prompt: str | None = None) -> Dataset:
    """The tasks as rows with ``prompt`` and what :func:`get_reasoning_gym_reward` needs to find them again.

    Args:
        tasks: a reasoning-gym dataset: a sequence of dictionaries with ``question`` and ``answer``.
        system_prompt: makes chat prompts with it; None makes text prompts. An empty one makes chat prompts
            without a system message.

    Returns:
        columns ``prompt``, ``answer``, ``reasoning_gym_index``, ``reasoning_gym_question``.
    """
    from datasets import Dataset

    rows = []
    for index in range(len(tasks)):
        entry = tasks[index]
        question = entry["question"]
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        chat = [*system, {"role": "user", "content": question}]
        rows.append(
            {
                "prompt": question if system_prompt is None else chat,
                "answer": None if entry["answer"] is None else str(entry["answer"]),
                INDEX: index,
                QUESTION: question,
            }
        )
    return Dataset.from_list(rows)


def last_answer(text: str) -> str | None:
    """What the last ``<answer>...</answer>`` holds, else the text after the reasoning; None if empty."""
    tagged = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    answer = tagged[-1] if tagged else text.rpartition("</think>")[2]
    return answer.strip() or None


def get_reasoning_gym_reward(
    tasks: Any, extract: Callable[[str], str | None] = last_answer
) -> Callable[..., list[float | None]]:
    """The score that a reasoning-gym dataset gives to an answer, from 0 to 1.

    Args:
        tasks: the dataset that :func:`reasoning_gym_dataset` was made from.
        extract: text of a completion to the answer, None if there is none.

    Returns:
        a reward function that reads the two ``reasoning_gym_`` columns; None for rows without them.

    Raises:
        ConfigError: ``tasks`` cannot score. The reward raises it for a row that ``tasks`` does not have.
    """
    return _ReasoningGym(tasks, extract)


@dataclass(frozen=True)
class _ReasoningGym:
    per_sample_reward: ClassVar[bool] = True
    __name__: ClassVar[str] = "reasoning_gym_reward"

    tasks: Any
    extract: Callable[[str], str | None]

    def __post_init__(self) -> None:
        if not callable(getattr(self.tasks, "score_answer", None)):
            raise ConfigError(
                f"{type(self.tasks).__name__} has no score_answer; allowed: a reasoning-gym dataset"
            )

    def __call__(
        self,
        completions: Sequence[Any],
        reasoning_gym_index: Sequence[int | None],
        reasoning_gym_question: Sequence[str | None],
        **_: Any,
    ) -> list[float | None]:
        entries: dict[int, dict[str, Any]] = {}
        rewards: list[float | None] = []
        rows = zip(completions, reasoning_gym_index, reasoning_gym_question, strict=True)
        for completion, index, question in rows:
            if index is None:
                rewards.append(None)
                continue
            if index not in entries:
                entries[index] = self._entry(index, question)
            answer = self.extract(answer_text(completion))
            rewards.append(float(self.tasks.score_answer(answer, entries[index])))
        return rewards

    def _entry(self, index: int, question: str | None) -> dict[str, Any]:
        # Tasks are generated anew rather than stored: their metadata do not survive a table.
        entry = self.tasks[index] if index < len(self.tasks) else None
        if entry is None or entry["question"] != question:
            raise ConfigError(
                f"task {index} of the reward is not the one in the dataset ({question!r:.80}); create both "
                "from the same reasoning-gym dataset, with a seed"
            )
        return entry
