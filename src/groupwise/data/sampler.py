"""Order of the prompts in an epoch, and of the rows in an evaluation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Sized
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Sampler

from groupwise.config.grpo_config import GRPOConfig
from groupwise.errors import ConfigError
from groupwise.records import Row, copied


class PromptSampler(Sampler[int]):
    """Every prompt once: in the dataset's order, or shuffled.

    Every iteration is an epoch, whose permutation is drawn from a generator of the sampler's own, as TRL's.
    """

    def __init__(self, source: Sized, config: GRPOConfig) -> None:
        self.num_prompts, self.shuffle = len(source), config.shuffle_dataset
        self.generator = torch.Generator().manual_seed(data_seed(config))

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(self.num_prompts))
        return iter(torch.randperm(self.num_prompts, generator=self.generator).tolist())

    def __len__(self) -> int:
        return self.num_prompts


class GroupSampler(Sampler[int]):
    """Indices of completions in the order of TRL's repeat sampler, for subclasses that change the order.

    A generation batch has ``prompts_per_batch`` prompts, each ``num_generations`` times in a row, and is
    repeated ``repeats`` times, once per micro-batch that is trained on it. Every iteration is an epoch. An
    incomplete last generation batch is dropped, except for dynamic sampling.

    Args:
        prompts: order of the prompts, which a subclass may replace.
        config: settings of the run.

    Example: prompts 0 and 1, G = 2, one prompt per batch, 2 repeats: ``0 0 0 0 1 1 1 1``.
    """

    def __init__(self, prompts: Any, config: GRPOConfig) -> None:
        self.prompts, self.num_generations = prompts, config.num_generations
        self.prompts_per_batch, self.repeats = config.prompts_per_batch, config.micro_batches_per_generation
        incomplete = len(prompts) % self.prompts_per_batch
        self.num_yielded = len(prompts) - (0 if config.dynamic_sampling else incomplete)

    def __iter__(self) -> Iterator[int]:
        order = list(self.prompts)[: self.num_yielded]
        for start in range(0, len(order), self.prompts_per_batch):
            for _ in range(self.repeats):
                for index in order[start : start + self.prompts_per_batch]:
                    yield from [index] * self.num_generations

    def __len__(self) -> int:
        return self.num_yielded * self.num_generations * self.repeats


class FirstRepeats(Sampler[int]):
    """Prompts of a sampler in TRL's order (:class:`GroupSampler`): each prompt of a generation batch once.

    Args:
        sampler: of a subclass; its indices are read when their generation batch is.
        config: settings of the run.
        drop_last: drop an incomplete last generation batch.

    Raises:
        ConfigError: while it is iterated, if the indices of a generation batch are not groups.
    """

    def __init__(self, sampler: Any, config: GRPOConfig, *, drop_last: bool) -> None:
        self.sampler, self.drop_last = sampler, drop_last
        self.num_generations, self.repeats = config.num_generations, config.micro_batches_per_generation
        self.num_rows = config.prompts_per_batch * config.num_generations
        if hasattr(sampler, "set_epoch"):
            self.set_epoch = sampler.set_epoch

    def __iter__(self) -> Iterator[int]:
        indices, size = iter(self.sampler), self.num_rows
        for _ in range(len(self.sampler) // (size * self.repeats)):
            yield from self._prompts_of(list(islice(indices, size)))
            deque(islice(indices, size * (self.repeats - 1)), maxlen=0)
        rest = list(islice(indices, size * self.repeats))  # to the end of the sampler, if it has one
        if rest and not self.drop_last:
            yield from self._prompts_of(rest[: len(rest) // self.repeats])

    def _prompts_of(self, indices: list[int]) -> list[int]:
        """Return every prompt of a generation batch once."""
        size = self.num_generations
        groups = [indices[start : start + size] for start in range(0, len(indices), size)]
        if any(len(set(group)) > 1 or len(group) < size for group in groups) or not groups:
            raise ConfigError(
                f"the train sampler {type(self.sampler).__name__} does not yield groups: it must yield "
                f"the indices of a generation batch, each num_generations={size} times in a row, and "
                f"repeat the batch {self.repeats} times (steps_per_generation · num_iterations)"
            )
        return [group[0] for group in groups]


def data_seed(config: GRPOConfig) -> int:
    """Return the seed of the order of prompts."""
    return config.seed if config.data_seed is None else config.data_seed


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


def as_rows(rows: Sequence[Row]) -> Any:
    """Collate rows to a list of copies: reward functions take Python values, and may change them."""
    return [copied(row) for row in rows]
