"""Order of the prompts in an epoch, and of the rows in an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from groupwise.config.grpo_config import GRPOConfig
from groupwise.errors import ConfigError
from groupwise.records import Row, copied


class GroupSampler(Sampler[int]):
    """Indices of the rows of each generation batch, in the order of TRL's repeat sampler.

    A generation batch has ``prompts_per_batch`` prompts, each ``num_generations`` times in a row, and is
    repeated ``repeats`` times, once per micro-batch that is trained on it. Every iteration is an epoch: it
    draws the next order from a generator of the sampler's own.

    Args:
        drop_last: drop an incomplete last generation batch.

    Example: prompts 0 and 1, G = 2, one prompt per batch, 2 repeats: ``0 0 0 0 1 1 1 1``.
    """

    def __init__(
        self,
        source: Sized,
        *,
        num_generations: int,
        prompts_per_batch: int,
        repeats: int,
        shuffle: bool,
        seed: int,
        drop_last: bool = True,
    ) -> None:
        left_over = len(source) % prompts_per_batch if drop_last else 0
        self.num_prompts, self.num_yielded = len(source), len(source) - left_over
        self.num_generations = num_generations
        self.prompts_per_batch = prompts_per_batch
        self.repeats = repeats
        self.shuffle = shuffle
        self.generator = torch.Generator().manual_seed(seed)

    def prompt_order(self) -> list[int]:
        """Return every prompt once, in the order of the next epoch."""
        if not self.shuffle:
            return list(range(self.num_prompts))
        return torch.randperm(self.num_prompts, generator=self.generator).tolist()

    def __iter__(self) -> Iterator[int]:
        order = self.prompt_order()[: self.num_yielded]
        for start in range(0, len(order), self.prompts_per_batch):
            for _ in range(self.repeats):
                for index in order[start : start + self.prompts_per_batch]:
                    yield from [index] * self.num_generations

    def __len__(self) -> int:
        return self.num_yielded * self.num_generations * self.repeats


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
