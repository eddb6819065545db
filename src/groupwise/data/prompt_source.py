"""Prompts of a run in their order; streams, own dataloaders and curricula are in ``data/sources.py``.

A :class:`PromptSource` returns this rank's rows of the next prompts. Its position is a read cursor: a failed
step returns to the snapshot before it, so that it loses no prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.metrics import Metrics
from groupwise.distributed import RankSlice
from groupwise.errors import ConfigError
from groupwise.records import GroupRewards, Row, copied


class PromptSource:
    """Prompts in order, epoch after epoch, alike on all ranks.

    Args:
        read_epoch: returns the prompts of an epoch, by its number.
        share: this rank's part of the completions.
        name: the source of the prompts, for messages.

    Attributes:
        epoch: epoch of the position.
        index: prompts of the epoch that were taken.
        last: epoch and index of the last prompt that was returned, also of a later batch.
    """

    def __init__(
        self, read_epoch: Callable[[int], Iterable[Any]], share: RankSlice, name: str = "train_dataset"
    ) -> None:
        self.read_epoch, self.share, self.name = read_epoch, share, name
        self.epoch, self.index, self.last = 0, 0, (0, 0)
        self._prompts: Iterator[Any] | None = None  # of the epoch that is being read
        self._reading = (0, 0)  # position of the next prompt to read
        self._kept: deque[tuple[tuple[int, int], Any]] = deque()  # read, and not taken before the snapshot
        self._kept_from = (0, 0)  # position of the newest snapshot, at which _kept begins
        self._num_taken = 0  # prompts of _kept that were taken

    def take(self, num_prompts: int, step: int = 0) -> list[Row]:
        """Return this rank's rows of the next prompts: each prompt G times, B rows.

        Args:
            step: completed optimizer steps, which a curriculum receives.

        Raises:
            ConfigError: an epoch has no prompts.
        """
        prompts = self._ahead(0, num_prompts)
        self._num_taken += num_prompts
        self.epoch, self.index = self.last[0], self.last[1] + 1
        return self._rows(prompts)

    def add_rewards(self, rewards: GroupRewards, names: Sequence[str]) -> Metrics:
        """Receive the rewards of all ranks for the prompts that were taken last; a curriculum reads them.

        Args:
            names: of the reward functions.
        """
        return {}

    def upcoming(self, num_batches: int, num_prompts: int, first: int = 1) -> Iterator[list[Row]]:
        """Yield this rank's rows of later batches without taking them, from the one after the next on."""
        for batch in range(first, first + num_batches):
            yield self._rows(self._ahead(batch * num_prompts, (batch + 1) * num_prompts))

    def read_ahead(self, count: int, *, same_epoch: bool = False) -> None:
        """Read until ``count`` prompts are ahead of the position, or with ``same_epoch`` its epoch ends."""
        missing = count - (len(self._kept) - self._num_taken)
        if missing > 0:
            self._kept.extend(self._read_in_epoch(missing) if same_epoch else self._read(missing))

    def snapshot(self) -> dict[str, Any]:
        """Return the position; prompts that were read later are kept until the next snapshot."""
        for _ in range(self._num_taken):
            self._kept.popleft()
        self._kept_from, self._num_taken = (self.epoch, self.index), 0
        return {"epoch": self.epoch, "index": self.index}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Return to a position. From any but that of the newest snapshot, the epoch is read again.

        Raises:
            ConfigError: the data have become fewer.
        """
        epoch, index = snapshot["epoch"], snapshot["index"]
        if (epoch, index) != self._kept_from:
            self.seek(epoch)
            for _ in range(index):
                self.read_ahead(1)
                (found, _), _ = self._kept.popleft()
                if found != epoch:
                    raise ConfigError(
                        f"the checkpoint was made after row {index} of {self.name}, which now has only "
                        f"{self._last_length}; resume with the same data"
                    )
        self.epoch, self.index = self._kept_from = epoch, index
        self._num_taken = 0

    def seek(self, epoch: int) -> None:
        """Continue at the beginning of an epoch."""
        self._kept.clear()
        self._num_taken = 0
        self._prompts, self._reading = None, (epoch, 0)
        self.epoch, self.index = self._kept_from = epoch, 0

    _last_length = 0  # prompts of the epoch that was read last

    def _ahead(self, start: int, stop: int) -> list[Any]:
        """Return the prompts from ``start`` to ``stop``, counted from the cursor."""
        self.read_ahead(stop)
        kept = list(islice(self._kept, self._num_taken + start, self._num_taken + stop))
        self.last = kept[-1][0]
        return [prompt for _, prompt in kept]

    def _read(self, count: int) -> list[tuple[tuple[int, int], Any]]:
        read: list[tuple[tuple[int, int], Any]] = []
        while len(read) < count:
            if self._prompts is None:
                self._prompts = iter(self.read_epoch(self._reading[0]))
            read += self._read_in_epoch(count - len(read))
            if len(read) < count:
                self._end_epoch()
        return read

    def _read_in_epoch(self, count: int) -> list[tuple[tuple[int, int], Any]]:
        """Read the next prompts of the epoch: ``count``, or as many as are left."""
        epoch, index = self._reading
        prompts = islice(self._prompts or (), count)
        read = [((epoch, place), prompt) for place, prompt in enumerate(prompts, start=index)]
        self._reading = epoch, index + len(read)
        return read

    def _end_epoch(self) -> None:
        epoch, self._last_length = self._reading
        if self._last_length == 0:
            again = ": it can be read only once" if epoch else ""
            raise ConfigError(
                f"{self.name} gave no rows in epoch {epoch + 1}{again}; pass a dataset that can be "
                "iterated again"
            )
        self._prompts, self._reading = None, (epoch + 1, 0)

    def _rows(self, prompts: Sequence[Any]) -> list[Row]:
        numbers = self.share.prompts(len(prompts))
        rows = dict(zip(numbers, self._read_rows([prompts[n] for n in numbers]), strict=True))
        size = self.share.num_generations
        # Copies: user code may change the row of one completion, and a rollback reads the prompts again.
        return [copied(rows[row // size]) for row in self.share.rows(len(prompts))]

    def _read_rows(self, prompts: Sequence[Any]) -> list[Row]:
        return list(prompts)


class DatasetPrompts(PromptSource):
    """Prompts of an indexed dataset in the order of a sampler; a rank reads the rows of its completions only.

    Args:
        make_sampler: returns a sampler of the indices of the prompts. One with ``set_epoch`` is set to each
            epoch; of any other, every iteration is the next epoch.
        config: settings of the run. ``dataloader_num_workers`` processes read rows ahead; with 0 they are
            read when they are taken. ``dynamic_sampling`` keeps the incomplete last generation batch of an
            epoch.
    """

    def __init__(
        self, dataset: Any, make_sampler: Callable[[], Sampler[int]], share: RankSlice, config: GRPOConfig
    ) -> None:
        super().__init__(self._read_epoch, share)
        self.dataset, self.make_sampler, self.config = dataset, make_sampler, config
        self._sampler: Any = None  # made when it is read: a subclass may keep the newest that it made
        self._next_epoch = 0  # of a sampler without set_epoch
        self._resumed_at = (0, 0)

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Return to a position; no rows are read before it."""
        self._resumed_at = snapshot["epoch"], snapshot["index"]
        super().restore(snapshot)

    def _read_epoch(self, epoch: int) -> Iterator[tuple[int, Row | None]]:
        """Return the prompts of an epoch: index, and the row if a worker reads it."""
        batches = self._generation_batches(epoch)
        if self.config.dataloader_num_workers == 0:
            return ((index, None) for batch in batches for index, _ in batch)
        loader = DataLoader(
            _OwnRows(self.dataset),
            batch_sampler=batches,  # type: ignore[arg-type]
            num_workers=self.config.dataloader_num_workers,
            prefetch_factor=self.config.dataloader_prefetch_factor,  # generation batches
            collate_fn=identity,
            generator=torch.Generator(),  # starting workers must not draw from the RNG that samples
        )
        return chain.from_iterable(loader)

    def _generation_batches(self, epoch: int) -> Iterator[list[tuple[int, bool]]]:
        """Yield the indices of each generation batch, True for those whose row this rank reads."""
        indices, place, size = iter(self._sampler_of(epoch)), 0, self.config.prompts_per_batch
        while batch := list(islice(indices, size)):
            if len(batch) < size and not self.config.dynamic_sampling:
                return
            own = self.share.prompts(len(batch))
            yield [
                (index, number in own and (epoch, place + number) >= self._resumed_at)
                for number, index in enumerate(batch)
            ]
            place += len(batch)

    def _sampler_of(self, epoch: int) -> Any:
        """Return the sampler, whose next iteration is the epoch."""
        if self._sampler is None or epoch < self._next_epoch:
            self._sampler, self._next_epoch = self.make_sampler(), 0
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        else:
            for _ in range(self._next_epoch, epoch):  # random samplers draw each epoch from one generator
                deque(self._sampler, maxlen=0)
            self._next_epoch = epoch + 1
        return self._sampler

    def _read_rows(self, prompts: Sequence[tuple[int, Row | None]]) -> list[Row]:
        return [self.dataset[index] if row is None else row for index, row in prompts]


class _OwnRows(Dataset[tuple[int, "Row | None"]]):
    """Rows by index, read if they are marked as this rank's."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, entry: tuple[int, bool]) -> tuple[int, Row | None]:
        index, is_own = entry
        return index, self.dataset[index] if is_own else None


def identity(row: Any) -> Any:
    """Return a row as it is, in place of DataLoader's collation."""
    return row
