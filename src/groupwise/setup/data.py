"""Datasets that can be trained and evaluated on."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset, IterableDataset

from groupwise.config import GRPOConfig
from groupwise.data import repeat_rows
from groupwise.errors import ConfigError


def check_data(train_dataset: Any, eval_dataset: Any, config: GRPOConfig) -> None:
    """Refuse datasets that cannot fill a batch or have no prompts.

    Raises:
        ConfigError: naming the dataset, what it has and what is needed.
    """
    if train_dataset is None and eval_dataset is None:
        raise ConfigError("train_dataset is missing (and there is no eval_dataset either); pass a dataset")
    for name, dataset in named_datasets(train_dataset, eval_dataset).items():
        _check_dataset(name, dataset)
    needed = config.generation_batch_size // config.num_generations
    if train_dataset is not None and len(train_dataset) < needed:
        raise ConfigError(
            f"train_dataset has {len(train_dataset)} prompts, but one generation batch takes {needed} "
            f"(generation_batch_size={config.generation_batch_size} / "
            f"num_generations={config.num_generations}); use more prompts or a smaller batch"
        )


def named_datasets(train_dataset: Any, eval_dataset: Any) -> dict[str, Any]:
    """Every dataset that there is, by what to call it in a message."""
    named = {"train_dataset": train_dataset}
    named.update(
        {f"eval_dataset[{key!r}]": value for key, value in eval_dataset.items()}
        if isinstance(eval_dataset, dict) and not hasattr(eval_dataset, "column_names")
        else {"eval_dataset": eval_dataset}
    )
    return {name: dataset for name, dataset in named.items() if dataset is not None}


def _check_dataset(name: str, dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{name} is a {type(dataset).__name__}: streaming data are not implemented yet; pass a Dataset"
        )
    if len(dataset) == 0:
        raise ConfigError(f"{name} is empty")
    columns = getattr(dataset, "column_names", None) or list(dataset[0])
    if "prompt" not in columns:
        raise ConfigError(f"{name} has no 'prompt' column; its columns are {', '.join(map(repr, columns))}")


def evaluation_rows(dataset: Any, config: GRPOConfig) -> Dataset:
    """Every row ``num_generations_eval`` times in a row, for batches that hold whole groups.

    Raises:
        ConfigError: with the nearest sizes that fit.
    """
    size, group = config.eval_batch_size * config.world_size, config.num_generations_eval
    if size % group:
        below = size // group * group
        nearest = " or ".join(str(valid) for valid in (below, below + group) if valid)
        raise ConfigError(
            f"the evaluation batch of all processes has {size} completions, which is not divisible by "
            f"num_generations_eval={group}; nearest valid: {nearest} "
            "(per_device_eval_batch_size times the number of processes)"
        )
    return repeat_rows(dataset, group)
