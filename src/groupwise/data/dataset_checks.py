"""Check datasets before anything expensive, and every prompt that is in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, product, zip_longest
from typing import Any, NoReturn

from accelerate.utils import gather_object
from torch.utils.data import Dataset, IterableDataset
from transformers.trainer_utils import IntervalStrategy

from groupwise.config.grpo_config import GRPOConfig
from groupwise.data.prompt_checks import PromptCheck, known_values
from groupwise.data.sampler import data_seed
from groupwise.errors import ConfigError, boundary, nearest_name, shortened
from groupwise.records import Row
from groupwise.tokenization.images import IMAGE_COLUMNS, is_processor, processor_required
from groupwise.tokenization.prompts import prompt_digest

#: Tables of other libraries, by package, and the dataset to pass.
_TABLES = {
    "pandas": "datasets.Dataset.from_pandas({})",
    "polars": "datasets.Dataset.from_polars({})",
    "pyarrow": "datasets.Dataset({})",
}

#: Column of a mixture with the name of the dataset that a row is from.
SOURCE = "source"


def is_mixture(train_dataset: Any) -> bool:
    """Return True for datasets by source; False for a dict of columns, or of splits (``DatasetDict``)."""
    return type(train_dataset) is dict and bool(train_dataset) and "prompt" not in train_dataset


def check_sources(setting: str, given: Mapping[str, Any], train_dataset: Any) -> None:
    """Check that a setting by source has the sources of a mixture.

    Raises:
        ConfigError: ``train_dataset`` is no mixture, a name is none of its sources, or some are missing.
    """
    if not is_mixture(train_dataset):
        raise ConfigError(
            f"{setting} by source needs datasets by name: train_dataset={{name: rows}}, or in a run file a "
            "source in each entry of datasets"
        )
    for name in given:
        if name not in train_dataset:
            _refuse(f"{setting} has {name!r}, no source of train_dataset", name, train_dataset)
    if missing := ", ".join(repr(name) for name in train_dataset if name not in given):
        has = f"{setting} has {', '.join(map(repr, given)) or 'no entry'} and lacks {missing}"
        raise ConfigError(f"{has}; give each source of train_dataset an entry")


def _refuse(fault: str, name: object, known: Iterable[object]) -> NoReturn:
    """Raise ConfigError with the known names, and the one nearest to ``name``."""
    names = [*map(str, known)]
    there = f"there are {', '.join(map(repr, names))}; nearest name: {nearest_name(str(name), names)!r}"
    raise ConfigError(f"{fault}; {there}")


def mix_sources(train_dataset: Any, eval_dataset: Any, config: GRPOConfig) -> tuple[Any, Any, str]:
    """Join datasets by source to one of ``datasets``, with the column ``source``.

    With ``dataset_weights`` the source of every row is drawn from ``data_seed``; without, the rows are
    concatenated, and streams take turns. An epoch ends when every source was read to its end; those that end
    before begin again. A column that a source lacks is None in its rows.

    Returns:
        The datasets, those that are no mixture as given; an evaluation set with the name of a source gets
        the column too. And the column whose values have metrics of their own, "" for none.

    Raises:
        ConfigError: naming the source that is empty, computes its rows, or has the column ``source``; weights
            of other names; or columns that have different types.
    """
    weights: Any = config.dataset_weights
    if weights is not None:
        check_sources("dataset_weights", weights, train_dataset)
    if not is_mixture(train_dataset):
        return train_dataset, eval_dataset, config.metrics_by or ""
    from datasets import concatenate_datasets, interleave_datasets

    streams = any(map(is_streaming, train_dataset.values()))
    sources = [_named(f"train_dataset[{n!r}]", rows, str(n), streams) for n, rows in train_dataset.items()]
    for name, rows in eval_dataset.items() if isinstance(eval_dataset, dict) else ():
        key = f"eval_dataset[{name!r}]"
        if name in train_dataset and SOURCE not in named_columns(None, {name: rows}).get(key, [SOURCE]):
            eval_dataset = {**eval_dataset, name: _named(key, rows, str(name), is_streaming(rows))}
    with boundary(ConfigError, "joining the sources of train_dataset"):
        if weights is None and not streams:
            mixed = concatenate_datasets(sources)
        else:
            shares = weights and [weights[name] / sum(weights.values()) for name in train_dataset]
            seed = data_seed(config)
            mixed = interleave_datasets(sources, shares, seed, stopping_strategy="all_exhausted")
        if streams:
            known = mixed.features if all(rows.features for rows in sources) else None
            mixed = mixed.map(_with_columns, fn_kwargs={"columns": mixed.column_names}, features=known)
    return mixed, eval_dataset, config.metrics_by or SOURCE


def _named(name: str, rows: Any, source: str, as_stream: bool) -> Any:
    """Return the rows of a source, a dataset or stream of ``datasets``, with the column ``source``."""
    from datasets import Dataset as Rows
    from datasets import Features, Value
    from datasets import IterableDataset as Stream

    check_dataset(name, rows)
    with boundary(ConfigError, name):
        rows = Rows.from_list(list(rows)) if isinstance(rows, (list, tuple)) else rows
    is_lazy = getattr(rows, "format", {"type": None})["type"] == "custom"  # a transform
    if is_lazy or not isinstance(rows, (Rows, Stream)):
        raise ConfigError(
            f"{name} is a {type(rows).__name__} whose rows are computed on access; a mixture takes lists "
            "and the datasets of the package datasets without a transform: see its from_generator and map"
        )
    _refuse_source(name, column_names(rows))
    if not as_stream:
        return rows.add_column(SOURCE, [source] * len(rows))
    rows = rows if is_streaming(rows) else rows.to_iterable_dataset()
    columns = rows.features and Features({**rows.features, SOURCE: Value("string")})
    return rows.map(_with_source, fn_kwargs={SOURCE: source}, features=columns)


def _refuse_source(name: str, columns: Collection[str]) -> None:
    if SOURCE in columns:
        raise ConfigError(f"{name} has a column {SOURCE!r}, which names the source of a row; rename it")


def _with_source(row: Row, source: str) -> Row:
    _refuse_source(f"train_dataset[{source!r}]", row)
    return {**row, SOURCE: source}


def _with_columns(row: Row, columns: Sequence[str]) -> Row:
    return {**dict.fromkeys(columns), **row}


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
    columns = named_columns(train_dataset, eval_dataset)
    if columns and config.metrics_by and not any(config.metrics_by in names for names in columns.values()):
        given = f"metrics_by={config.metrics_by!r} is no column of {' or '.join(columns)}"
        _refuse(given, config.metrics_by, dict.fromkeys(chain(*columns.values())))
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


def check_curriculum(
    config: GRPOConfig, curriculum: object, train_dataset: Any, reward_names: Sequence[str]
) -> None:
    """Refuse what chooses prompts by their solve rates where they are read before, or have no index.

    Raises:
        ConfigError: naming the setting that stands against it, or a reward function that there is not.
    """
    chosen = {"prompt_filter": config.prompt_filter, "curriculum": curriculum}
    name = next((name for name, value in chosen.items() if value is not None), None)
    if name is None:
        return
    if train_dataset is not None and is_streaming(train_dataset):
        raise ConfigError(
            f"{name} remembers prompts by their index, and a {type(train_dataset).__name__} has none; pass a "
            "Dataset"
        )
    for setting in ("rollout_staleness", "dataloader_num_workers"):
        if value := getattr(config, setting):
            raise ConfigError(
                f"{name} chooses prompts by earlier rewards: {setting}={value} reads ahead; set 0"
            )
    wanted = (config.prompt_filter or {}).get("reward")  # type: ignore[union-attr]
    if wanted is not None and wanted not in reward_names:
        _refuse(f"prompt_filter['reward']={wanted!r} is no reward function", wanted, reward_names)
    if curriculum is not None and not callable(curriculum):
        raise ConfigError(
            f"curriculum={shortened(curriculum)} is not callable; pass (rates, step) -> weights"
        )


def named_datasets(train_dataset: Any, eval_dataset: Any) -> dict[str, Any]:
    """Every dataset that there is, by what to call it in a message."""
    several = eval_dataset if isinstance(eval_dataset, dict) else None
    named = {"train_dataset": train_dataset, "eval_dataset": None if several else eval_dataset}
    if is_mixture(train_dataset):  # of a sweep: each run mixes it
        named = {**{f"train_dataset[{key!r}]": rows for key, rows in train_dataset.items()}, **named}
        del named["train_dataset"]
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
    prompts = known_values(dataset)
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
        prompts = None if is_streaming(dataset) else known_values(dataset)
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


def functions_by_source(reward_funcs: Any, train_dataset: Any) -> tuple[Any, list[tuple[Any, set[str]]]]:
    """Return the reward functions of a dict by source, each once, and with each its sources.

    Raises:
        ConfigError: the dict has another source than ``train_dataset``, or lacks one.
    """
    if not isinstance(reward_funcs, dict):
        return reward_funcs, []
    check_sources("reward_funcs", reward_funcs, train_dataset)
    found: dict[Any, tuple[Any, set[str]]] = {}
    for source, given in reward_funcs.items():
        for function in given if isinstance(given, (list, tuple)) else [given]:
            key = function if isinstance(function, str) else id(function)
            found.setdefault(key, (function, set()))[1].add(str(source))
    return [function for function, _ in found.values()], list(found.values())


def scored_columns(
    functions: Any, sources: list[Any], max_rows: int | None, train_dataset: Any, eval_dataset: Any
) -> Iterator[tuple[Any, dict[str, list[str]]]]:
    """Yield reward functions and, by dataset, the columns of rows that they score, as known in advance.

    Args:
        sources: functions that score some sources only, and these; an evaluation set in memory is then split
            by source.
        max_rows: rows that an evaluation reads.

    Raises:
        ConfigError: with ``sources``, an evaluation set has no column ``source``, or a source without reward.
    """
    yield functions, named_columns(train_dataset, None if sources else eval_dataset)
    columns = named_columns(None, eval_dataset)
    known = sorted({name for _, names in sources for name in names})
    for name, rows in named_datasets(None, eval_dataset).items() if sources else ():
        if SOURCE not in columns.get(name, [SOURCE]):
            needs = "which rewards by source need (eval_dataset={source: rows} adds it)"
            _refuse(f"{name} has no column {SOURCE!r}, {needs}", SOURCE, columns[name])
        for source in dict.fromkeys(islice(known_values(rows, SOURCE) or (), max_rows)):
            if source not in known:
                _refuse(f"{name} has rows of the source {source!r}, which has no reward", source, known)
            own = [function for function, names in sources if source in names]
            yield own, {f"{name} (source {source!r})": columns[name]}
