"""Loader of the training data that ``Trainer`` counts, and the source that a run reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from groupwise.config.grpo_config import GRPOConfig
from groupwise.data.dataset_checks import PreparedData, is_streaming
from groupwise.data.prompt_source import DatasetPrompts, PromptSource
from groupwise.data.sampler import as_rows, data_seed
from groupwise.distributed import RankSlice
from groupwise.errors import ConfigError
from groupwise.records import Row


class GenerationBatches(Dataset[Row]):
    """Items of the train dataloader: this rank's rows of a generation batch, once per micro-batch of it.

    ``Trainer`` takes only their number, since :class:`PromptSource` reads the rows of a run. A script may
    iterate them; every iteration is the next epoch. The object is both the dataset and the batch sampler of
    the loader: a batch holds rows, not their indices.

    Args:
        make_source: returns the source of the rows, at its beginning.
        num_prompts: prompts of a generation batch.
        repeats: micro-batches that are trained on it.
        count: micro-batches of an epoch.
    """

    def __init__(
        self, make_source: Callable[[], PromptSource], *, num_prompts: int, repeats: int, count: int
    ) -> None:
        self.make_source = make_source
        self.num_prompts, self.repeats, self.count = num_prompts, repeats, count
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
            self.source.begin_window(1, -number % self.repeats)
            if number % self.repeats == 0:
                rows = self.source.take(self.num_prompts)
                self.source.snapshot()
            yield rows


def make_train_loader(
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
    if is_streaming(data.train_dataset):  # those of the whole run
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
        from groupwise.data.streaming import LoaderPrompts

        return LoaderPrompts(make_loader, share, repeats=repeats)
    if is_streaming(data.train_dataset):
        from groupwise.data.streaming import StreamPrompts

        return StreamPrompts(
            data.train_dataset,
            share,
            check=data.make_check("train_dataset"),
            shuffle=config.shuffle_dataset,
            seed=data_seed(config),
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
