"""Check datasets and build the source of training prompts and the rows of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.trainer_utils import IntervalStrategy

from groupwise.config.grpo_config import GRPOConfig
from groupwise.data.prompt_checks import PromptCheck, context_length, known_prompts
from groupwise.data.prompt_source import (
    DatasetPrompts,
    EvaluationStream,
    GenerationBatches,
    LoaderPrompts,
    PromptSource,
    StreamPrompts,
    is_streaming,
)
from groupwise.data.sampler import GroupSampler, as_rows, repeat_rows
from groupwise.distributed import RankSlice
from groupwise.errors import ConfigError
from groupwise.policy.introspection import text_config
from groupwise.records import Row
from groupwise.tokenization.prompts import Prompt


@dataclass(frozen=True)
class PreparedData:
    """Data of a trainer, checked as far as possible before they are read.

    train_dataset: as given; rows that are computed on access are checked when they are read.
    eval_datasets: evaluation sets whose prompts have been checked.
    make_check: returns the check of the rows of a dataset, by its name in messages.
    """

    train_dataset: Any
    eval_datasets: tuple[Any, ...]
    make_check: Callable[[str], PromptCheck]


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
    if not is_streaming(dataset):
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
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    as_rendered: Callable[[Prompt], Prompt] | None = None,
) -> PreparedData:
    """Check every prompt that is available now; prompts computed on access are checked when they are read.

    Args:
        as_rendered: returns a prompt as the chat template gets it; None: user code renders prompts.

    Raises:
        ConfigError: naming the row whose prompt is missing, empty, too long or cannot be rendered to tokens.
    """
    context = context_length(model, config)
    num_embeddings = getattr(text_config(model, config), "vocab_size", None)

    def check(name: str) -> PromptCheck:
        return PromptCheck(name, processing_class, config, context, num_embeddings, as_rendered)

    if train_dataset is not None and not is_streaming(train_dataset):
        prompts = known_prompts(train_dataset)
        if prompts is None:
            train_dataset = CheckedRows(train_dataset, check("train_dataset"))
        else:
            check("train_dataset").check_all(prompts)
    eval_datasets = named_datasets(None, eval_dataset)
    for name, dataset in eval_datasets.items():
        _check_evaluation_prompts(dataset, check(name), config)
    return PreparedData(train_dataset, tuple(eval_datasets.values()), check)


def _check_evaluation_prompts(dataset: Any, check: PromptCheck, config: GRPOConfig) -> None:
    """Check the prompts that an evaluation reads, unless they are computed on access."""
    prompts = None if is_streaming(dataset) else known_prompts(dataset)
    check.check_all(islice(prompts or (), config.eval_max_samples))


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


def make_group_sampler(dataset: Any, config: GRPOConfig) -> GroupSampler:
    """Build the sampler of an indexed dataset: prompts in random order, or in the dataset's order."""
    return GroupSampler(
        dataset,
        num_generations=config.num_generations,
        prompts_per_batch=config.prompts_per_batch,
        repeats=config.micro_batches_per_generation,
        shuffle=config.shuffle_dataset,
        seed=_data_seed(config),
        drop_last=not config.dynamic_sampling,
    )


def make_prompt_source(
    data: PreparedData,
    config: GRPOConfig,
    make_sampler: Callable[[], Sampler[int]],
    make_loader: Callable[[], Iterable[Any]] | None = None,
) -> PromptSource:
    """Build the source of training prompts at its beginning.

    Args:
        make_sampler: returns the order of an indexed dataset.
        make_loader: returns the dataloader of a subclass; None: the dataset is read directly.

    Raises:
        ConfigError: dynamic sampling with a dataloader of a subclass.
    """
    share = RankSlice(config.num_generations, config.process_index, config.world_size)
    repeats = config.micro_batches_per_generation
    if make_loader is not None:
        if config.dynamic_sampling:
            raise ConfigError(
                "dynamic_sampling=True takes as many prompts as a step needs, but get_train_dataloader is "
                "overridden and its items are whole generation batches; override _get_train_sampler instead"
            )
        return LoaderPrompts(make_loader, share, repeats=repeats)
    if is_streaming(data.train_dataset):
        return StreamPrompts(
            data.train_dataset,
            share,
            check=data.make_check("train_dataset"),
            shuffle=config.shuffle_dataset,
            seed=_data_seed(config),
            num_workers=config.dataloader_num_workers,
        )
    return DatasetPrompts(
        data.train_dataset,
        make_sampler,
        share,
        prompts_per_batch=config.prompts_per_batch,
        repeats=repeats,
        drop_last=not config.dynamic_sampling,
        num_workers=config.dataloader_num_workers,
        prefetch_factor=config.dataloader_prefetch_factor,
    )


def _data_seed(config: GRPOConfig) -> int:
    return config.seed if config.data_seed is None else config.data_seed


def make_train_loader(
    train_dataset: Any,
    data: PreparedData,
    config: GRPOConfig,
    make_sampler: Callable[[], Any],
    generator: torch.Generator | None,
) -> DataLoader[Any]:
    """Build the loader that ``Trainer`` counts: an item is a generation batch, once per micro-batch of it.

    Args:
        generator: iterating the loader draws a seed from it; None: from the one that samples.
    """
    repeats = config.micro_batches_per_generation
    if is_streaming(train_dataset):  # those of the whole run
        count = config.max_steps * config.gradient_accumulation_steps
    else:  # of an epoch on each rank
        rows_per_batch = config.prompts_per_batch * config.num_generations
        count = len(make_sampler()) // (rows_per_batch * repeats) * repeats
    batches = GenerationBatches(
        partial(make_prompt_source, data, config, make_sampler),
        num_prompts=config.prompts_per_batch,
        repeats=repeats,
        count=count,
    )
    return DataLoader(batches, batch_sampler=batches, collate_fn=as_rows, generator=generator)  # type: ignore[arg-type]


def checked_eval_sampler(sampler: Any, rows: Any, owner: str) -> Any:
    """Return the sampler of the rows of an evaluation, which a subclass may override.

    Args:
        owner: class of the trainer, for the message.

    Raises:
        ConfigError: it repeats the rows, as TRL's does; an evaluation would take that many times as long.
    """
    if isinstance(sampler, Sized) and len(sampler) > len(rows):
        raise ConfigError(
            f"{owner}._get_eval_sampler returns {len(sampler)} indices for {len(rows)} rows, which are "
            "repeated num_generations_eval times already; return every index once"
        )
    return sampler


def evaluation_rows(
    dataset: Any, name: str, data: PreparedData, config: GRPOConfig
) -> Dataset[Row] | EvaluationStream:
    """Repeat every row ``num_generations_eval`` times in a row, so that batches contain whole groups.

    At most ``eval_max_samples`` rows are read.

    Args:
        dataset: evaluation set; one that was not given to the trainer is checked first.
        name: its name in messages.

    Returns:
        An indexed dataset of completions; for a stream, the batches of this rank.

    Raises:
        ConfigError: the dataset is missing or cannot be used, or the evaluation batch cuts a group.
    """
    if dataset is None:
        raise ConfigError("there is no eval_dataset; give one to the trainer or to evaluate()")
    check = data.make_check(name)
    if all(dataset is not known for known in data.eval_datasets):
        _check_dataset(name, dataset)
        _check_evaluation_prompts(dataset, check, config)
    size, group = config.eval_batch_size * config.world_size, config.generations_per_eval_prompt
    if size % group:
        below = size // group * group
        nearest = " or ".join(str(valid) for valid in (below, below + group) if valid)
        raise ConfigError(
            f"the evaluation batch of all processes has {size} completions, which is not divisible by "
            f"num_generations_eval={group}; nearest valid: {nearest} "
            "(per_device_eval_batch_size times the number of processes)"
        )
    if is_streaming(dataset):
        return EvaluationStream(
            dataset,
            RankSlice(group, config.process_index, config.world_size),
            check=check,
            batch_size=size,
            max_rows=config.eval_max_samples,
            drop_last=config.dataloader_drop_last,
            num_workers=config.dataloader_num_workers,
        )
    if known_prompts(dataset) is None:
        dataset = CheckedRows(dataset, check)
    return repeat_rows(dataset, group, config.eval_max_samples)
