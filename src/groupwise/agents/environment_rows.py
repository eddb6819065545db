"""Datasets of environments that provide the tasks themselves: rows without a prompt, or no dataset at all."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from groupwise.agents.environments import empty_prompt
from groupwise.agents.loop import AgentLoop
from groupwise.config.grpo_config import GRPOConfig
from groupwise.errors import ConfigError


class EnvironmentRows(Dataset):
    """Rows for environments that provide the tasks: an empty prompt, and a seed shared by a group."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return {"prompt": empty_prompt(), "seed": index}


def add_environment_rows(
    train_dataset: Any, eval_dataset: Any, loop: AgentLoop, config: GRPOConfig
) -> tuple[Any, Any]:
    """Return the datasets for a run with environments: missing prompts are empty, missing rows are generated.

    Without environments the datasets are returned as they are.

    Args:
        train_dataset: training data; None if the environment provides the tasks.
        eval_dataset: evaluation data, or a dict of them.

    Returns:
        Training and evaluation data.

    Raises:
        ConfigError: there is no dataset, and neither the length of training nor the environment of a row can
            be derived without it.
    """
    if not loop.provides_tasks:
        return train_dataset, eval_dataset
    if isinstance(eval_dataset, dict):
        eval_dataset = {name: _with_prompts(dataset) for name, dataset in eval_dataset.items()}
    else:
        eval_dataset = _with_prompts(eval_dataset)
    if train_dataset is not None:
        return _with_prompts(train_dataset), eval_dataset
    if loop.is_routed:
        raise ConfigError(
            "train_dataset is missing: with several environments its column 'environment' selects the "
            "environment of a row; pass a dataset with it, or a single environment_factory"
        )
    if config.max_steps <= 0:
        raise ConfigError(
            "train_dataset is missing, so the environment provides the tasks, but "
            f"max_steps={config.max_steps} does not limit training; allowed: max_steps > 0; nearest valid: 1"
        )
    batches_per_step = -(-config.gradient_accumulation_steps // config.steps_per_generation)  # type: ignore[operator]
    return EnvironmentRows(config.prompts_per_batch * batches_per_step * config.max_steps), eval_dataset


def _with_prompts(dataset: Any) -> Any:
    columns = getattr(dataset, "column_names", None)
    if not columns or "prompt" in columns:
        return dataset
    return dataset.map(lambda row: {"prompt": empty_prompt(), **row})
