"""Data of a trainer: checked, and as the loaders and samplers that its hooks of ``Trainer`` return."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import PreTrainedModel

from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.settings import raise_for
from groupwise.config.validation import cut_eval_groups
from groupwise.data.dataset_checks import (
    check_dataset,
    check_ranks,
    checked_rows,
    is_streaming,
    named_datasets,
)
from groupwise.data.evaluation import EvaluationStream
from groupwise.data.prompt_checks import PromptCheck
from groupwise.data.prompt_source import DatasetPrompts, PromptSource
from groupwise.data.sampler import FirstRepeats, GroupSampler, PromptSampler, as_rows, checked_eval_sampler
from groupwise.distributed import RankSlice
from groupwise.errors import ConfigError, warn_once
from groupwise.policy.introspection import context_length, text_config
from groupwise.records import Row
from groupwise.tokenization.text import ProcessingClass, text_tokenizer

logger = logging.getLogger(__name__)

#: Least share of the embeddings that the model's own tokenizer uses; the others are padding.
_LEAST_USED = 0.5


class GenerationBatches(Dataset[Row]):
    """Items of the train dataloader: this rank's rows of a generation batch, once per micro-batch of it.

    ``Trainer`` takes only their number, since :class:`PromptSource` reads the rows of a run. A script may
    iterate them; every iteration is the next epoch. The object is both the dataset and the batch sampler of
    the loader: a batch holds rows, not their indices.

    Args:
        make_source: returns the source of the rows, at its beginning.
        config: settings of the run.
        count: micro-batches of an epoch.
    """

    def __init__(self, make_source: Callable[[], PromptSource], config: GRPOConfig, count: int) -> None:
        self.make_source, self.config, self.count = make_source, config, count
        self.source: PromptSource | None = None
        self.epoch = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: Row) -> Row:
        return row

    def __iter__(self) -> Iterator[list[Row]]:
        self.source = self.source or self.make_source()
        self.source.seek(self.epoch)
        self.epoch += 1
        rows: list[Row] = []
        for number in range(self.count):
            if number % self.config.micro_batches_per_generation == 0:
                rows = self.source.take(self.config.prompts_per_batch)
                self.source.snapshot()
            yield rows


@dataclass(frozen=True)
class TrainerData:
    """Checked datasets of a trainer, with the loaders, samplers and prompt sources that its hooks return.

    train_dataset: as given to the trainer.
    rows: the same, as :func:`checked_rows` returns it.
    eval_datasets: evaluation sets as given, and as :func:`checked_rows` returns them.
    make_check: returns the check of the rows of a dataset, by its name in messages.
    """

    config: GRPOConfig
    train_dataset: Any
    rows: Any
    eval_datasets: list[tuple[Any, Any]]
    make_check: Callable[[str], PromptCheck]

    collate = staticmethod(as_rows)
    is_streaming = staticmethod(is_streaming)
    checked_eval_sampler = staticmethod(checked_eval_sampler)

    def group_sampler(self, dataset: Any) -> GroupSampler:
        """Build the sampler of an indexed dataset in TRL's order, for subclasses: the run reads prompts."""
        return GroupSampler(PromptSampler(dataset, self.config), self.config)

    def evaluation_rows(self, dataset: Any, name: str) -> Dataset[Row] | EvaluationStream:
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
        config = self.config
        if dataset is None:
            raise ConfigError("there is no eval_dataset; give one to the trainer or to evaluate()")
        check = self.make_check(name)
        rows = next((rows for given, rows in self.eval_datasets if given is dataset), None)
        if rows is None:  # not one that the trainer was built with
            check_dataset(name, dataset)
            rows = checked_rows(dataset, check, config.eval_max_samples)
        size, group = config.eval_batch_size * config.world_size, config.generations_per_eval_prompt
        raise_for({"": [*cut_eval_groups(config)]}, name)
        if is_streaming(rows):
            return EvaluationStream(rows, check, config)
        indices = range(len(rows))[: config.eval_max_samples]
        if config.dataloader_drop_last and len(indices) * group < size:
            raise ConfigError(
                f"{name} has {len(indices)} rows, less than an evaluation batch of {size // group}, which "
                "dataloader_drop_last=True drops; set it to False, or lower per_device_eval_batch_size"
            )
        return Subset(rows, [index for index in indices for _ in range(group)])

    def train_loader(
        self, make_sampler: Callable[[], Any], generator: torch.Generator | None
    ) -> DataLoader[Any]:
        """Build the loader that ``Trainer`` counts: a generation batch once per micro-batch of it.

        Args:
            generator: iterating the loader draws a seed from it; None: from the one that samples.
        """
        config, repeats = self.config, self.config.micro_batches_per_generation
        if is_streaming(self.train_dataset):  # those of the whole run
            count = config.max_steps * config.gradient_accumulation_steps
        else:  # of an epoch on each rank
            rows_per_batch = config.prompts_per_batch * config.num_generations
            count = len(make_sampler()) // (rows_per_batch * repeats) * repeats
        make_source = partial(self.prompt_source, self.train_dataset, make_sampler)
        batches = GenerationBatches(make_source, config, count)
        return DataLoader(batches, batch_sampler=batches, collate_fn=as_rows, generator=generator)  # type: ignore[arg-type]

    def prompt_source(
        self,
        train_dataset: Any,
        make_sampler: Callable[[], Any],
        make_loader: Callable[[], Iterable[Any]] | None = None,
        curriculum: Callable[..., Any] | None = None,
    ) -> PromptSource:
        """Build the source of training prompts at its beginning.

        Args:
            train_dataset: of the trainer, now.
            make_sampler: returns the sampler of an indexed dataset, which a subclass may have made.
            make_loader: returns the dataloader of a subclass; None: the dataset is read directly.
            curriculum: of the trainer.

        Raises:
            ConfigError: ``train_dataset`` was replaced after the trainer was built, or dynamic sampling or a
                curriculum with a dataloader of a subclass.
        """
        config = self.config
        if train_dataset is not self.train_dataset:
            raise ConfigError(
                "trainer.train_dataset was replaced, but its prompts are checked when the trainer is built; "
                "build a trainer with the other dataset and model=trainer.model"
            )
        share = RankSlice(config.num_generations, config.process_index, config.world_size)
        chooses = config.prompt_filter is not None or curriculum is not None
        if make_loader is not None:
            if config.dynamic_sampling or chooses:
                name = "dynamic_sampling=True" if config.dynamic_sampling else "prompt_filter or curriculum"
                raise ConfigError(
                    f"{name} takes the prompts that a step needs, but get_train_dataloader is overridden and "
                    "its items are whole generation batches; override _get_train_sampler instead"
                )
            from groupwise.data.sources import LoaderPrompts

            return LoaderPrompts(make_loader, share, repeats=config.micro_batches_per_generation)
        if is_streaming(self.rows):
            from groupwise.data.sources import StreamPrompts

            return StreamPrompts(self.rows, share, self.make_check("train_dataset"), config)

        def make_prompt_sampler() -> Any:
            sampler = make_sampler()
            own, drop = type(sampler) is GroupSampler, not (config.dynamic_sampling or chooses)
            return sampler.prompts if own else FirstRepeats(sampler, config, drop_last=drop)

        if chooses:
            from groupwise.data.sources import CurriculumPrompts

            return CurriculumPrompts(self.rows, make_prompt_sampler, share, config, curriculum)
        return DatasetPrompts(self.rows, make_prompt_sampler, share, config)


def prepare_data(
    train_dataset: Any,
    eval_dataset: Any,
    config: GRPOConfig,
    model: str | PreTrainedModel,
    processing_class: ProcessingClass,
    renders: bool = False,
) -> TrainerData:
    """Check every prompt that is available now; prompts computed on access are checked when they are read.

    Args:
        renders: the prompts are rendered to tokens here; False: by user code.

    Raises:
        ConfigError: naming the dataset with two image columns, or with one and no processor; or the row whose
            prompt is missing, empty, too long or cannot be rendered to tokens; or ranks have different data.
    """
    context = context_length(model, config)
    num_embeddings = getattr(text_config(model, config), "vocab_size", None)
    if num_embeddings and (size := len(text_tokenizer(processing_class))) < _LEAST_USED * num_embeddings:
        warn_once(
            logger,
            "the tokenizer has %d tokens and the model embeds %d: it is probably of another model; leave "
            "processing_class out to load the model's own",
            *(size, num_embeddings),
        )

    def check(name: str) -> PromptCheck:
        return PromptCheck(name, processing_class, config, context, num_embeddings, renders=renders)

    rows = None if train_dataset is None else checked_rows(train_dataset, check("train_dataset"))
    evaluated = named_datasets(None, eval_dataset).items()
    limit = config.eval_max_samples
    eval_datasets = [(dataset, checked_rows(dataset, check(name), limit)) for name, dataset in evaluated]
    if config.world_size > 1:
        check_ranks(named_datasets(rows, eval_dataset), limit)
    data = TrainerData(config, train_dataset, rows, eval_datasets, check)
    for name, dataset in evaluated if config.eval_strategy != "no" else ():
        data.evaluation_rows(dataset, name)  # its errors, which may be hours before the first evaluation
    return data
