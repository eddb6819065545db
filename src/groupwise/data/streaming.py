"""Prompts that are read in order: of a streaming dataset, or of a dataloader that a subclass made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from groupwise.compat.torch import hide_dataloader_worker
from groupwise.data.prompt_source import PromptSource, identity
from groupwise.distributed import RankSlice, broadcast_from_first
from groupwise.records import Row

logger = logging.getLogger(__name__)


class StreamPrompts(PromptSource):
    """Prompts of a streaming dataset: rank 0 reads and broadcasts them.

    Args:
        check: called with every row and its number in the epoch.
        num_workers: more than 0: one process reads ahead. Several would change the order.
    """

    def __init__(
        self,
        dataset: Any,
        share: RankSlice,
        *,
        check: Callable[[Row, int], None],
        shuffle: bool,
        seed: int,
        num_workers: int = 0,
    ) -> None:
        super().__init__(self._read_stream, share)
        self.check, self.num_workers = check, num_workers
        self.dataset = _shuffled(dataset, seed) if shuffle else dataset

    def _read(self, count: int) -> list[tuple[tuple[int, int], Any]]:
        return broadcast_from_first(
            lambda: super(StreamPrompts, self)._read(count), self.share.rank == 0, self.share.world_size
        )

    def _read_stream(self, epoch: int) -> Iterator[Row]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return read_stream(self.dataset, self.check, self.num_workers)


class LoaderPrompts(PromptSource):
    """Rows of a dataloader that a subclass made: an item holds this rank's rows of a whole generation batch.

    As with TRL's loader, an item is repeated once per micro-batch that is trained on it; the first counts.
    """

    def __init__(self, make_loader: Callable[[], Iterable[Any]], share: RankSlice, *, repeats: int) -> None:
        super().__init__(self._read_loader, share, name="get_train_dataloader")
        self.make_loader, self.repeats = make_loader, repeats
        self._loader: Iterable[Any] | None = None

    def _read_loader(self, epoch: int) -> Iterator[Any]:
        self._loader = self._loader or self.make_loader()
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)
        return islice(self._loader, 0, None, self.repeats)

    def take(self, num_prompts: int) -> list[Row]:
        return super().take(1)

    def upcoming(self, num_batches: int, num_prompts: int, first: int = 1) -> Iterator[list[Row]]:
        return super().upcoming(num_batches, 1, first)

    def _rows(self, prompts: Sequence[Any]) -> list[Row]:
        return list(prompts[0])


def read_stream(
    dataset: Any, check: Callable[[Row, int], None], num_workers: int = 0, max_rows: int | None = None
) -> Iterator[Row]:
    """Read and check the rows of a stream, with ``num_workers`` > 0 in one process that reads ahead."""
    rows = DataLoader(
        _IterableRows(dataset),
        batch_size=None,
        num_workers=min(num_workers, 1),
        collate_fn=identity,
        generator=torch.Generator(),  # starting a worker must not draw from the RNG that samples
    )
    for index, row in enumerate(islice(rows, max_rows)):
        check(row, index)
        yield row


class _IterableRows(IterableDataset[Row]):
    """Any iterable of rows, as DataLoader requires it."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Row]:
        hide_dataloader_worker()
        return iter(self.rows)


def _shuffled(dataset: Any, seed: int) -> Any:
    if hasattr(dataset, "shuffle"):
        return dataset.shuffle(seed=seed)
    logger.warning(
        "shuffle_dataset=True has no effect on train_dataset: a %s has no shuffle(); it is read in its own "
        "order",
        type(dataset).__name__,
    )
    return dataset
