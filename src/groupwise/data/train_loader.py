"""Loader of the training data that ``Trainer`` counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from groupwise.config.grpo_config import GRPOConfig
from groupwise.data.dataset_checks import PreparedData, is_streaming
from groupwise.data.prompt_source import PromptSource, make_prompt_source
from groupwise.data.sampler import as_rows
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
