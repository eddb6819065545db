"""reasoning-gym datasets as training data, and their scoring as a reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from groupwise.errors import ConfigError
from groupwise.rewards.runtime.marking import per_sample_reward, with_settings
from groupwise.rewards.texts import Text, answer_text, require

if TYPE_CHECKING:
    from datasets import Dataset

#: Columns by which the reward finds the task of a row.
INDEX, QUESTION = "reasoning_gym_index", "reasoning_gym_question"


class Tasks(Protocol):
    """A reasoning-gym dataset: indexable tasks with ``question`` and ``answer``, and their scoring."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


def check_tasks(tasks: object) -> None:
    """Raise ``ConfigError`` unless ``tasks`` can score answers."""
    if not callable(getattr(tasks, "score_answer", None)):
        raise ConfigError(f"{type(tasks).__name__} has no score_answer; allowed: a reasoning-gym dataset")


def create_reasoning_gym(name: str, **settings: object) -> Tasks:
    """Create a reasoning-gym dataset by name; ``seed`` is required, because every process creates its own.

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


def reasoning_gym_dataset(tasks: Tasks, system_prompt: str | None = None) -> Dataset:
    """Convert reasoning-gym tasks to a training dataset for :func:`get_reasoning_gym_reward`.

    Args:
        system_prompt: None: text prompts; a string: chat prompts with this system message; an empty string:
            chat prompts without one.

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
    """Return the last ``<answer>...</answer>``, else the text after ``</think>``; None if empty."""
    answer, start = text.rpartition("</think>")[2], text.find("<answer>")
    # A regular expression would take quadratic time for many tags that are not closed.
    while start >= 0 and (end := text.find("</answer>", start)) >= 0:
        answer = text[start + len("<answer>") : end]
        start = text.find("<answer>", end)
    return answer.strip() or None


def get_reasoning_gym_reward(
    tasks: Tasks, extract: Callable[[str], str | None] = last_answer
) -> Callable[..., list[float | None]]:
    """Create a reward that is the score of a reasoning-gym dataset, from 0 to 1.

    Args:
        tasks: the argument of :func:`reasoning_gym_dataset`.
        extract: returns the answer in the text of a completion, or None.

    Returns:
        a reward function of the two ``reasoning_gym_`` columns; None for rows without them.

    Raises:
        ConfigError: ``tasks`` has no ``score_answer``. The reward raises it for a row of other tasks.
    """
    check_tasks(tasks)
    return with_settings(reasoning_gym_reward, tasks, extract)


@per_sample_reward
def reasoning_gym_reward(
    tasks: Tasks,
    extract: Callable[[str], str | None],
    /,
    completions: Sequence[Text],
    reasoning_gym_index: Sequence[int | None],
    reasoning_gym_question: Sequence[str | None],
    **_: object,
) -> list[float | None]:
    """Return the scores of :func:`get_reasoning_gym_reward`."""
    entries: dict[int, dict[str, Any]] = {}
    rewards: list[float | None] = []
    rows = zip(completions, reasoning_gym_index, reasoning_gym_question, strict=True)
    for completion, index, question in rows:
        if index is None:
            rewards.append(None)
            continue
        if index not in entries:
            entries[index] = _entry(tasks, index, question)
        answer = extract(answer_text(completion))
        rewards.append(float(tasks.score_answer(answer, entries[index])))
    return rewards


def _entry(tasks: Tasks, index: int, question: str | None) -> dict[str, Any]:
    # Generated again, not stored: metadata of a task cannot be a table column.
    entry = tasks[index] if index < len(tasks) else None
    if entry is None or entry["question"] != question:
        raise ConfigError(
            f"task {index} of the reward is not the one in the dataset ({question!r:.80}); create both "
            "from the same reasoning-gym dataset, with a seed"
        )
    return entry
