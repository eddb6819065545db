"""The prompts of a run in their order, one after the other: for what a sampler cannot plan in advance.

That is a stream, whose length nobody knows, and dynamic sampling, where the completions decide how many
prompts a step takes. The Trainer's loader then only counts micro-batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from accelerate.utils import broadcast_object_list
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import worker

from groupwise.data.batches import epoch_permutation
from groupwise.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Row = dict[str, Any]


class PromptQueue:
    """Prompts in order, pass after pass over the data; the position is all that a resume needs.

    Args:
        read_pass: the prompts of a pass, by its number.
        name: what they come from, for messages.
    """

    def __init__(self, read_pass: Callable[[int], Iterable[Any]], name: str = "train_dataset") -> None:
        self.read_pass = read_pass
        self.name = name
        self.finished_passes = 0
        self.position = 0  # prompts taken from the current pass
        self._rest: Iterator[Any] | None = None

    def take(self, count: int) -> list[Any]:
        """The next ``count`` prompts; where the data end, they begin anew.

        Raises:
            ConfigError: a pass has no prompt at all.
        """
        taken: list[Any] = []
        while len(taken) < count:
            if self._rest is None:
                self._rest = iter(self.read_pass(self.finished_passes))
            for prompt in self._rest:
                self.position += 1
                taken.append(prompt)
                if len(taken) == count:
                    break
            else:
                self._start_next_pass()
        return taken

    def _start_next_pass(self) -> None:
        if self.position == 0:
            again = ": it can be read only once" if self.finished_passes else ""
            raise ConfigError(
                f"{self.name} gave no rows in pass {self.finished_passes + 1} over it{again}; "
                "pass a dataset that can be iterated anew"
            )
        self.finished_passes, self.position, self._rest = self.finished_passes + 1, 0, None

    def state_dict(self) -> dict[str, int]:
        return {"finished_passes": self.finished_passes, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where ``state`` was made: what was taken before is read and dropped.

        Raises:
            ConfigError: the data have become fewer.
        """
        self.finished_passes, self.position = state["finished_passes"], 0
        self._rest = iter(self.read_pass(self.finished_passes))
        for _ in range(state["position"]):
            if next(self._rest, None) is None:
                raise ConfigError(
                    f"the checkpoint was made after row {state['position']} of {self.name}, which now has "
                    f"only {self.position}; resume with the same data"
                )
            self.position += 1


class PromptSource(Protocol):
    """The training prompts in order, the same on every rank."""

    queue: PromptQueue

    def take(self, count: int) -> list[Any]: ...


class IndexedRows:
    """Training rows by index, for dynamic sampling: every rank knows the order and reads its own rows."""

    def __init__(self, dataset: Any, *, shuffle: bool, seed: int) -> None:
        self.dataset = dataset
        self.queue = PromptQueue(lambda number: epoch_permutation(len(dataset), shuffle, seed, number))

    def take(self, count: int) -> list[Any]:
        return [LazyRow(self.dataset, index) for index in self.queue.take(count)]


class StreamedRows:
    """Training rows of a stream: the first process reads, the others receive.

    Args:
        check: called with every row and its number in the pass.
        workers: more than 0: a process of its own reads ahead. Never several, which would mix up the order.
        first: whether this is the first process.
        processes: how many there are.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        check: Callable[[Row, int], None],
        shuffle: bool,
        seed: int,
        workers: int = 0,
        first: bool = True,
        processes: int = 1,
    ) -> None:
        self.first, self.processes = first, processes
        self.check, self.workers = check, workers
        self.dataset = _shuffled(dataset, seed) if shuffle else dataset
        self.queue = PromptQueue(self._read_pass)

    def take(self, count: int) -> list[Row]:
        return from_first_process(lambda: self.queue.take(count), self.first, self.processes)

    def _read_pass(self, number: int) -> Iterator[Row]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(number)
        rows = DataLoader(
            _Iterated(self.dataset),
            batch_size=None,
            num_workers=min(self.workers, 1),
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # starting to read must not draw from the one that samples
        )
        for index, row in enumerate(rows):
            self.check(row, index)
            yield row


class LazyRow:
    """A row that is read when it is known which rank needs it."""

    def __init__(self, dataset: Any, index: int) -> None:
        self.dataset, self.index = dataset, index

    def read(self) -> Row:
        return self.dataset[self.index]


class _Iterated(IterableDataset):
    """Any iterable as what a loader takes."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Row]:
        # Streams of `datasets` take another order where they find themselves in a worker, be it the only one.
        worker._worker_info = None
        return iter(self.rows)


class StepCounterDataset(Dataset):
    """Stands for the rows where a loader only counts micro-batches."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        return {}


def rows_of_rank(prompts: list[Any], num_generations: int, rank: int, processes: int) -> list[Row]:
    """This rank's share of the rows of all completions: each prompt ``num_generations`` times in a row."""
    share = len(prompts) * num_generations // processes
    rows: dict[int, Row] = {}
    for place in range(rank * share, (rank + 1) * share):
        number = place // num_generations
        if number not in rows:
            prompt = prompts[number]
            rows[number] = prompt.read() if isinstance(prompt, LazyRow) else prompt
    return [rows[place // num_generations] for place in range(rank * share, (rank + 1) * share)]


def from_first_process(compute: Callable[[], T], first: bool, processes: int) -> T:
    """What ``compute`` gives on the first process, on all of them; so is a failure.

    Raises:
        ConfigError: on the other processes, when the first one failed.
    """
    if processes == 1:
        return compute()
    result: list[Any] = [None, None]
    failure: Exception | None = None
    if first:
        try:
            result[0] = compute()
        except Exception as error:
            failure, result[1] = error, f"{type(error).__name__}: {error}"
    broadcast_object_list(result)
    if failure is not None:
        raise failure
    if result[1] is not None:
        raise ConfigError(f"the first process could not read the data: {result[1]}")
    return result[0]


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can be iterated but not indexed."""
    return isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    )


def _shuffled(dataset: Any, seed: int) -> Any:
    if hasattr(dataset, "shuffle"):
        return dataset.shuffle(seed=seed)
    logger.warning(
        "shuffle_dataset=True has no effect on train_dataset: a %s has no shuffle(); it is read in its own "
        "order",
        type(dataset).__name__,
    )
    return dataset


def _as_it_is(row: Any) -> Any:
    return row
