"""Check datasets before anything expensive, and every prompt that is in memory."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, islice, product, zip_longest
from typing import Any

from accelerate.utils import gather_object
from torch.utils.data import Dataset, IterableDataset
from transformers.trainer_utils import IntervalStrategy

from groupwise.config.grpo_config import GRPOConfig
from groupwise.data.prompt_checks import PromptCheck, known_prompts
from groupwise.errors import ConfigError, shortened
from groupwise.records import Row
from groupwise.tokenization.images import IMAGE_COLUMNS, is_processor, processor_required
from groupwise.tokenization.prompts import prompt_digest

#: Tables of other libraries, by package, and the dataset to pass.
_TABLES = {
    "pandas": "datasets.Dataset.from_pandas({})",
    "polars": "datasets.Dataset.from_polars({})",
    "pyarrow": "datasets.Dataset({})",
}


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
        check_dataset(name, dataset)
    if isinstance(eval_dataset, dict) and config.eval_strategy != "no":
        sets, name = list(eval_dataset), (config.metric_for_best_model or "").removeprefix("eval_")
        if name and not any(name.startswith(f"{key}_") for key in sets):
            # Trainer looks for the metric after the first evaluation, which can be hours into a run.
            raise ConfigError(
                f"metric_for_best_model={config.metric_for_best_model!r} is of none of the evaluation sets "
                f"{', '.join(map(repr, sets))}; the metrics of several sets carry their names: use "
                f"{f'{sets[0]}_{name}'!r}"
            )
    if train_dataset is None:
        return
    if is_streaming(train_dataset):
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
    needed = config.prompts_per_batch
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


def check_dataset(name: str, dataset: Any) -> None:
    if way_out := _TABLES.get(type(dataset).__module__.partition(".")[0]):
        raise ConfigError(f"{name} is a {type(dataset).__name__}; pass {way_out.format(name)}")
    if isinstance(dataset, dict) and "prompt" in dataset:
        raise ConfigError(f"{name} is a dict of columns; pass datasets.Dataset.from_dict({name})")
    if isinstance(dataset, dict):  # what load_dataset returns without a split
        splits = ", ".join(map(repr, dataset))
        raise ConfigError(f"{name} is a {type(dataset).__name__} of {splits}; pass one of these datasets")
    if isinstance(dataset, str):
        raise ConfigError(
            f"{name} is the string {dataset!r}; pass a dataset: datasets.load_dataset({dataset!r}, …)"
        )
    columns = column_names(dataset)
    if not is_streaming(dataset):
        if len(dataset) == 0:
            raise ConfigError(f"{name} is empty")
        for row in () if columns else dataset if isinstance(dataset, (list, tuple)) else [dataset[0]]:
            if not isinstance(row, Mapping):
                given = f"{name} has the row {shortened(row)}, of type {type(row).__name__}"
                raise ConfigError(f"{given}; a row is a dictionary with a 'prompt' and what rewards need")
        columns = columns or list(dataset[0])
    if columns and "prompt" not in columns:
        raise ConfigError(f"{name} has no 'prompt' column; its columns are {', '.join(map(repr, columns))}")


def checked_rows(dataset: Any, check: PromptCheck, max_rows: int | None = None) -> Any:
    """Check the columns of images, and the prompts that are in memory of the first ``max_rows`` rows.

    Returns:
        The dataset, unless its rows are computed on access: then one that checks each row when it is read. A
        stream is returned as it is; ``read_stream`` checks its rows.

    Raises:
        ConfigError: two columns of images, one without a processor, or a prompt that cannot be used.
    """
    columns = column_names(dataset)
    with_images = [column for column in IMAGE_COLUMNS if column in columns]
    if len(with_images) == 2:
        raise ConfigError(
            f"{check.name} has both an 'image' and an 'images' column; keep one: 'image' for one image per "
            "row, 'images' for a list of them"
        )
    if with_images and not is_processor(check.processing_class):
        raise processor_required(f"{check.name} has a column {with_images[0]!r}", check.processing_class)
    if is_streaming(dataset):
        return dataset
    prompts = known_prompts(dataset)
    if prompts is None:
        return CheckedRows(dataset, check)
    for index, prompt in enumerate(islice(prompts, max_rows)):
        check.check_prompt(prompt, index)
    return dataset


def check_ranks(datasets: dict[str, Any], max_eval_rows: int | None = None) -> None:
    """Check that all ranks have the same prompts in the same order, of datasets in memory. A collective.

    Raises:
        ConfigError: on all ranks, naming dataset, rank and the first row that differs from rank 0.
    """
    own: dict[str, list[int]] = {}
    for name, dataset in datasets.items():
        prompts = None if is_streaming(dataset) else known_prompts(dataset)
        limit = None if name == "train_dataset" else max_eval_rows
        own[name] = [prompt_digest(prompt) for prompt in islice(prompts or (), limit)]
    # Of each dataset one number; rows only if a dataset differs.
    if len({str(each) for each in gather_object([{n: prompt_digest(rows) for n, rows in own.items()}])}) == 1:
        return
    ranks = gather_object([own])
    for rank, name in product(range(1, len(ranks)), dict.fromkeys(chain(*ranks))):
        first, other = (of_rank.get(name, []) for of_rank in (ranks[0], ranks[rank]))
        row = next((row for row, (one, two) in enumerate(zip_longest(first, other)) if one != two), None)
        if row is not None:
            raise ConfigError(
                f"{name} is not the same on all ranks: row {row} of rank {rank} ({len(other)} rows) is not "
                f"that of rank 0 ({len(first)} rows); every rank needs the same rows in the same order: give "
                "shuffle() a seed, and do not split the data by rank"
            )


class CheckedRows(Dataset[Row]):
    """Rows that are computed on access, and checked then."""

    def __init__(self, dataset: Any, check: PromptCheck) -> None:
        self.dataset, self.check = dataset, check

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Row:
        row = self.dataset[index]
        self.check(row, index)
        return row


def column_names(dataset: Any) -> list[str]:
    """Return the columns of a dataset; none if it does not name them."""
    return list(getattr(dataset, "column_names", None) or [])


def named_columns(train_dataset: Any, eval_dataset: Any) -> dict[str, list[str]]:
    """Return the columns of the datasets that have them before a row is read, by the name of the dataset."""
    columns = {}
    for name, dataset in named_datasets(train_dataset, eval_dataset).items():
        if isinstance(dataset, (list, tuple)):
            columns[name] = list({column: None for row in dataset if isinstance(row, dict) for column in row})
        elif getattr(dataset, "format", {"type": None})["type"] != "custom":  # a transform may add some
            columns[name] = column_names(dataset)
    return {name: names for name, names in columns.items() if names}


def has_image_columns(train_dataset: Any, eval_dataset: Any) -> bool:
    """Return True if a dataset has a column of images."""
    datasets = named_datasets(train_dataset, eval_dataset).values()
    return any(column in IMAGE_COLUMNS for dataset in datasets for column in column_names(dataset))


def is_streaming(dataset: Any) -> bool:
    """Return True if a dataset can be iterated but not indexed."""
    return isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    )
