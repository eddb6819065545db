"""Datasets that can be trained and evaluated on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset
from transformers import PreTrainedModel
from transformers.trainer_utils import IntervalStrategy

from groupwise.config.grpo_config import GRPOConfig
from groupwise.data.batches import repeat_rows
from groupwise.data.prompt_checks import PromptCheck, context_length, known_prompts
from groupwise.data.prompt_source import (
    IndexedRows,
    PromptSource,
    StreamedRows,
    from_first_process,
    is_stream,
)
from groupwise.errors import ConfigError

#: An evaluation set is read whole; a stream that goes on longer is taken for endless.
MOST_EVALUATION_ROWS = 100_000


@dataclass(frozen=True)
class PreparedData:
    """Data that have been checked as far as they can be before they are used.

    eval_dataset: as given, streams read whole.
    new_source: where training prompts come from when the loader only counts; None when it does not.
    checked_eval: another evaluation set, checked and read in the same way.
    """

    train_dataset: Any
    eval_dataset: Any
    new_source: Callable[[], PromptSource | None]
    checked_eval: Callable[[Any], Any]


def check_data(train_dataset: Any, eval_dataset: Any, config: GRPOConfig) -> None:
    """Refuse datasets that cannot fill a batch or have no prompts.

    Raises:
        ConfigError: naming the dataset, what it has and what is needed.
    """
    if train_dataset is None and eval_dataset is None:
        raise ConfigError("train_dataset is missing (and there is no eval_dataset either); pass a dataset")
    if eval_dataset is None and config.eval_strategy != "no":
        strategy = IntervalStrategy(config.eval_strategy).value
        raise ConfigError(f"eval_strategy={strategy!r} needs an eval_dataset; pass one, or set it to 'no'")
    for name, dataset in named_datasets(train_dataset, eval_dataset).items():
        _check_dataset(name, dataset)
    if isinstance(eval_dataset, dict) and config.eval_strategy != "no":
        _check_best_metric(config.metric_for_best_model, list(eval_dataset))
    if train_dataset is None:
        return
    if is_stream(train_dataset):
        if config.rollout_staleness > 0:
            raise ConfigError(
                f"rollout_staleness={config.rollout_staleness} looks ahead in the data, which a "
                f"{type(train_dataset).__name__} does not allow; pass a Dataset, or set rollout_staleness=0"
            )
        if config.max_steps <= 0:
            raise ConfigError(
                f"train_dataset is a {type(train_dataset).__name__}, whose length is not known, and "
                f"max_steps={config.max_steps}; set max_steps to the number of optimizer steps"
            )
        return
    needed = config.generation_batch_size // config.num_generations
    if len(train_dataset) < needed:
        raise ConfigError(
            f"train_dataset has {len(train_dataset)} prompts, but one generation batch takes {needed} "
            f"(generation_batch_size={config.generation_batch_size} / "
            f"num_generations={config.num_generations}); use more prompts or a smaller batch"
        )


def named_datasets(train_dataset: Any, eval_dataset: Any) -> dict[str, Any]:
    """Every dataset that there is, by what to call it in a message."""
    several = eval_dataset if isinstance(eval_dataset, dict) else None
    named = {"train_dataset": train_dataset, "eval_dataset": None if several else eval_dataset}
    named.update({f"eval_dataset[{key!r}]": dataset for key, dataset in (several or {}).items()})
    return {name: dataset for name, dataset in named.items() if dataset is not None}


def _check_best_metric(metric: str | None, sets: list[str]) -> None:
    """Trainer looks for the metric after the first evaluation, which can be hours into a run."""
    name = (metric or "").removeprefix("eval_")
    if name and not any(name.startswith(f"{key}_") for key in sets):
        raise ConfigError(
            f"metric_for_best_model={metric!r} is of none of the evaluation sets "
            f"{', '.join(map(repr, sets))}; the metrics of several sets carry their names: use "
            f"{f'{sets[0]}_{name}'!r}"
        )


def _check_dataset(name: str, dataset: Any) -> None:
    if isinstance(dataset, dict):  # what load_dataset returns without a split
        splits = ", ".join(map(repr, dataset))
        raise ConfigError(f"{name} is a {type(dataset).__name__} of {splits}; pass one of these datasets")
    if isinstance(dataset, str):
        raise ConfigError(
            f"{name} is the string {dataset!r}; pass a dataset: datasets.load_dataset({dataset!r}, …)"
        )
    columns = getattr(dataset, "column_names", None)
    if not is_stream(dataset):
        if len(dataset) == 0:
            raise ConfigError(f"{name} is empty")
        columns = columns or list(dataset[0])
    if columns and "prompt" not in columns:
        raise ConfigError(f"{name} has no 'prompt' column; its columns are {', '.join(map(repr, columns))}")


def prepare_data(
    train_dataset: Any,
    eval_dataset: Any,
    config: GRPOConfig,
    model: str | PreTrainedModel,
    processing_class: Any,
) -> PreparedData:
    """Check every prompt that is at hand, the others when they are read, and read evaluation streams.

    Raises:
        ConfigError: naming the row whose prompt is missing, empty or too long.
    """
    context = context_length(model, config)

    def check(name: str) -> PromptCheck:
        return PromptCheck(name, processing_class, config, context)

    def ready(name: str, dataset: Any) -> Any:
        if dataset is None or (name == "train_dataset" and is_stream(dataset)):
            return dataset
        if is_stream(dataset):
            return read_whole(dataset, config, name, check(name))
        prompts = known_prompts(dataset)
        if prompts is None:
            return CheckedRows(dataset, check(name))
        check(name).check_all(prompts)
        return dataset

    train_dataset = ready("train_dataset", train_dataset)
    if isinstance(eval_dataset, dict):
        eval_dataset = {key: ready(f"eval_dataset[{key!r}]", given) for key, given in eval_dataset.items()}
    else:
        eval_dataset = ready("eval_dataset", eval_dataset)

    def checked_eval(dataset: Any) -> Any:
        if dataset is None:
            raise ConfigError("there is no eval_dataset; give one to the trainer or to evaluate()")
        _check_dataset("eval_dataset", dataset)
        return ready("eval_dataset", dataset)

    return PreparedData(
        train_dataset,
        eval_dataset,
        new_source=lambda: _source(train_dataset, config, check("train_dataset")),
        checked_eval=checked_eval,
    )


class CheckedRows(Dataset):
    """Rows that come to be when they are read, and are checked then."""

    def __init__(self, dataset: Any, check: PromptCheck) -> None:
        self.dataset, self.check = dataset, check

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        row = self.dataset[index]
        self.check(row, index)
        return row


def _source(train_dataset: Any, config: GRPOConfig, check: PromptCheck) -> PromptSource | None:
    seed = config.seed if config.data_seed is None else config.data_seed
    if train_dataset is not None and is_stream(train_dataset):
        return StreamedRows(
            train_dataset,
            check=check,
            shuffle=config.shuffle_dataset,
            seed=seed,
            workers=config.dataloader_num_workers,
            first=config.process_index == 0,
            processes=config.world_size,
        )
    if train_dataset is not None and config.dynamic_sampling:
        return IndexedRows(train_dataset, shuffle=config.shuffle_dataset, seed=seed)
    return None


def num_micro_batches(train_dataset: Any, config: GRPOConfig) -> int:
    """Micro-batches of an epoch on each rank; of a stream those of the whole run."""
    if is_stream(train_dataset):
        return config.max_steps * config.gradient_accumulation_steps
    batches = len(train_dataset) // (config.generation_batch_size // config.num_generations)
    return batches * config.steps_per_generation * config.num_iterations


def read_whole(dataset: Any, config: GRPOConfig, name: str, check: Callable[[Any, int], None]) -> list[Any]:
    """All rows of an evaluation stream, read once by the first process.

    Raises:
        ConfigError: it has no rows, or goes on without end.
    """

    def rows() -> Iterator[Any]:
        for index, row in enumerate(itertools.islice(dataset, MOST_EVALUATION_ROWS + 1)):
            check(row, index)
            yield row

    whole = from_first_process(lambda: list(rows()), config.process_index == 0, config.world_size)
    if not whole:
        raise ConfigError(f"{name} is empty")
    if len(whole) > MOST_EVALUATION_ROWS:
        raise ConfigError(
            f"{name} gave more than {MOST_EVALUATION_ROWS} rows; an evaluation goes over all of them: end "
            "the stream, for example with dataset.take(500)"
        )
    return whole


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
