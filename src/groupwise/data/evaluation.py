"""Rows of an evaluation of a stream: every prompt ``num_generations_eval`` times."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

from accelerate.state import GradientState

from groupwise.config.grpo_config import GRPOConfig
from groupwise.data.prompt_checks import PromptCheck
from groupwise.distributed import RankSlice, broadcast_from_first
from groupwise.errors import ConfigError
from groupwise.records import Row, copied

logger = logging.getLogger(__name__)

#: Rows of an evaluation stream without a limit after which a warning names the limit.
_MANY_ROWS = 10_000


class EvaluationRows(list[Row]):
    """Rows of this rank in a batch of an evaluation stream.

    num_valid: rows of the global batch that count; later ones are padding. None: all.
    """

    def __init__(self, rows: Iterable[Row], num_valid: int | None) -> None:
        super().__init__(rows)
        self.num_valid = num_valid


class EvaluationStream:
    """Batches of a streaming evaluation set: rank 0 reads and broadcasts the prompts of each batch.

    The batches are those of an indexed dataset with the same rows: every row G times in a row, divided
    equally over ranks in rank order. With several ranks the last batch is padded with the first rows.

    Args:
        check: called with every row and its number.
        config: settings of the run; G divides the completions of a batch. With ``dataloader_num_workers``,
            one process reads ahead.

    Attributes:
        num_samples: completions of all ranks that were read in the newest pass, padding excluded.
    """

    def __init__(self, dataset: Any, check: PromptCheck, config: GRPOConfig) -> None:
        self.dataset, self.check, self.config = dataset, check, config
        self.num_samples = 0

    def __iter__(self) -> Iterator[EvaluationRows]:
        from groupwise.data.sources import read_stream

        config, group, self.num_samples = self.config, self.config.generations_per_eval_prompt, 0
        share = RankSlice(group, config.process_index, config.world_size)
        workers, limit = config.dataloader_num_workers, config.eval_max_samples
        stream = read_stream(self.dataset, self.check, workers, limit)
        size = config.eval_batch_size * config.world_size // group  # prompts of a batch
        first: list[Row] = []
        while prompts := broadcast_from_first(
            lambda: list(islice(stream, size)), share.rank == 0, share.world_size
        ):
            is_last, num_valid = len(prompts) < size, len(prompts) * group
            if is_last and config.dataloader_drop_last:
                break
            first = first or list(prompts)
            if share.world_size > 1:  # every rank gets as many rows
                prompts += islice(cycle(first), size - len(prompts))
            self._count(num_valid)
            own = [copied(prompts[row // group]) for row in share.rows(len(prompts))]
            yield EvaluationRows(own, num_valid if is_last else None)
            if is_last:
                return
        if not first:
            few = f" but less than {size}, which dataloader_drop_last=True drops" if prompts else ""
            raise ConfigError(
                f"{self.check.name} gave no rows{few}; pass a dataset with rows that can be iterated again"
            )

    def _count(self, samples: int) -> None:
        limit = _MANY_ROWS * self.config.generations_per_eval_prompt
        if self.config.eval_max_samples is None and self.num_samples < limit <= self.num_samples + samples:
            logger.warning(
                "%s has given %d rows and is read to its end; eval_max_samples limits an evaluation",
                self.check.name,
                _MANY_ROWS,
            )
        self.num_samples += samples


def num_valid_rows(rows: Sequence[Row], gradient_state: GradientState) -> int | None:
    """Return how many rows of the global evaluation batch count, or None for all.

    Args:
        rows: rows of this rank.
        gradient_state: accelerate's, which knows the padding of its own dataloaders.
    """
    if isinstance(rows, EvaluationRows):
        return rows.num_valid
    remainder = gradient_state.remainder if gradient_state.end_of_dataloader else 0
    return remainder if remainder > 0 else None
