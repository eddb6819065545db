"""Other sources of prompts: a streaming dataset, a dataloader that a subclass made, and a curriculum.

A curriculum weighs the prompts of a dataset by their solve rates. Axis suffixes: N prompts of the dataset, P
of a take, R completions of a take, F reward functions, G completions per prompt.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from groupwise.compat.torch import hide_dataloader_worker
from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.advantages import total_rewards
from groupwise.core.metrics import Mean, Metrics
from groupwise.data.prompt_source import DatasetPrompts, PromptSource, identity
from groupwise.data.sampler import as_rows, data_seed
from groupwise.distributed import RankSlice, broadcast_from_first
from groupwise.errors import ConfigError, boundary
from groupwise.records import GroupRewards, Row

logger = logging.getLogger(__name__)


class StreamPrompts(PromptSource):
    """Prompts of a streaming dataset: rank 0 reads and broadcasts them.

    Args:
        check: called with every row and its number in the epoch.
        config: settings of the run. With ``dataloader_num_workers``, one process reads ahead; several would
            change the order.
    """

    def __init__(
        self, dataset: Any, share: RankSlice, check: Callable[[Row, int], None], config: GRPOConfig
    ) -> None:
        super().__init__(self._read_stream, share)
        self.check, self.num_workers = check, config.dataloader_num_workers
        self.dataset = _shuffled(dataset, data_seed(config)) if config.shuffle_dataset else dataset

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

    def take(self, num_prompts: int, step: int = 0) -> list[Row]:
        return super().take(1)

    def upcoming(self, num_batches: int, num_prompts: int, first: int = 1) -> Iterator[list[Row]]:
        return super().upcoming(num_batches, 1, first)

    def _rows(self, prompts: Sequence[Any]) -> list[Row]:
        return as_rows(prompts[0])


@dataclass(frozen=True)
class PromptRates:
    """Difficulty of the N prompts of a dataset, 12 bytes each.

    rate_N: mean reward of the newest group, float32; NaN before the first.
    step_N: optimizer steps that were completed when it was sampled, int32; -1 before the first.
    count_N: groups so far, int32.

    Example: of three prompts, the first was solved by half of a group in step 4::

        PromptRates(tensor([0.5, nan, nan]), tensor([4, -1, -1]), tensor([1, 0, 0]))
    """

    rate_N: torch.Tensor
    step_N: torch.Tensor
    count_N: torch.Tensor

    @staticmethod
    def unseen(size: int) -> PromptRates:
        """Return the rates before the first group."""
        zero_N = torch.zeros(size, dtype=torch.int32)
        return PromptRates(torch.full((size,), math.nan), zero_N - 1, zero_N)

    def updated(self, rates: dict[int, float], step: int) -> PromptRates:
        """Return a copy with the groups of a step, mean rewards by prompt; NaN leaves the rate as it was."""
        index_P, rate_P = torch.tensor([*rates]), torch.tensor([*rates.values()])
        return PromptRates(
            self.rate_N.index_copy(0, index_P, torch.where(rate_P.isnan(), self.rate_N[index_P], rate_P)),
            self.step_N.index_fill(0, index_P, step),
            self.count_N.index_add(0, index_P, torch.ones_like(index_P, dtype=torch.int32)),
        )


#: A curriculum: weights of the prompts (N,), from their rates and the number of completed optimizer steps.
Curriculum = Callable[[PromptRates, int], Any]


class CurriculumPrompts(DatasetPrompts):
    """Prompts in the order of a sampler, of which ``prompt_filter`` and a curriculum skip some.

    A prompt is taken in an epoch with the probability weight / largest weight: always with the largest one,
    never with weight 0. The draws follow from seed and epoch, so that every rank and a resumed run skip the
    same prompts. Positions count skipped prompts.

    Args:
        curriculum: called before each take; None: ``prompt_filter`` alone.
    """

    def __init__(
        self,
        dataset: Any,
        make_sampler: Callable[[], Any],
        share: RankSlice,
        config: GRPOConfig,
        curriculum: Curriculum | None = None,
    ) -> None:
        super().__init__(dataset, make_sampler, share, config)
        self.curriculum = curriculum
        self.filter = cast("dict[str, Any]", config.prompt_filter or {})
        self.rates, self.step = PromptRates.unseen(len(dataset)), 0
        self._weights_N = torch.ones(len(dataset), dtype=torch.float64)
        self._taken: list[int] = []  # indices of the newest take, P
        self._num_read = 0  # prompts that it took or skipped

    def take(self, num_prompts: int, step: int = 0) -> list[Row]:
        """Return this rank's rows of the next prompts that are not skipped.

        Raises:
            ConfigError: the curriculum returned no weights, or all prompts are skipped.
        """
        self.step, self._num_read = step, 0
        *_, resting_N = self._outside()
        self._weights_N = (~resting_N).double()
        if self.curriculum is not None:
            self._weights_N *= self._weights_of(self.curriculum)
        if not self._weights_N.any():
            self._refuse()
        return super().take(num_prompts)

    def _weights_of(self, curriculum: Curriculum) -> torch.Tensor:
        with boundary(ConfigError, "curriculum", step=self.step):
            given_N = torch.as_tensor(curriculum(self.rates, self.step)).double()
        wrong = given_N[~((given_N >= 0) & (given_N < math.inf))]
        if wrong.numel() or given_N.shape != self._weights_N.shape:
            found = (
                f"the weight {wrong[0]:g}" if wrong.numel() else f"weights of shape {tuple(given_N.shape)}"
            )
            raise ConfigError(
                f"curriculum returned {found}; allowed: a finite number >= 0 for each of the "
                f"{len(self._weights_N)} prompts of train_dataset"
            )
        return given_N

    def _outside(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return which prompts are below and above the range, and which of them rest now, (N,) each."""
        low_N = self.rates.rate_N < self.filter.get("min", 0)  # False for NaN
        high_N = self.rates.rate_N > self.filter.get("max", 1)
        is_recent_N = self.step - self.rates.step_N < self.filter.get("again_after", math.inf)
        return low_N, high_N, (low_N | high_N) & is_recent_N

    def _refuse(self) -> None:
        low_N, high_N, resting_N = self._outside()
        others = int((self._weights_N == 0).sum() - resting_N.sum())  # of a curriculum
        raise ConfigError(
            f"none of the {len(low_N)} prompts is left after {self.step} steps: {low_N.sum()} have a solve "
            f"rate below min and {high_N.sum()} above max, {resting_N.sum()} of which are not due again "
            f"(prompt_filter={self.filter}); {others} others have weight 0. Widen the range, lower "
            "again_after, or end the run earlier"
        )

    def _read_epoch(self, epoch: int) -> Iterator[tuple[int, Row | None]]:
        return ((index, None) for index in self._sampler_of(epoch))

    def _read_in_epoch(self, count: int) -> list[tuple[tuple[int, int], Any]]:
        (epoch, first), read = self._reading, list[tuple[tuple[int, int], Any]]()
        digest = hashlib.blake2b(f"{data_seed(self.config)} {epoch}".encode(), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        draws_N = torch.rand(len(self._weights_N), generator=generator, dtype=torch.float64)  # below 1
        taken_N = (draws_N < self._weights_N / self._weights_N.max()).numpy().tobytes()  # 1 or 0 each
        place = first - 1
        for place, prompt in enumerate(self._prompts or (), start=first):
            if taken_N[prompt[0]]:
                read.append(((epoch, place), prompt))
                if len(read) == count:
                    break
        self._reading = epoch, place + 1
        self._num_read += place + 1 - first
        if first == 0 <= place and not read:  # a whole epoch: a sampler may leave prompts out
            self._refuse()
        return read

    def _rows(self, prompts: Sequence[Any]) -> list[Row]:
        self._taken = [index for index, _ in prompts]
        return super()._rows(prompts)

    def add_rewards(self, rewards: GroupRewards, names: Sequence[str]) -> Metrics:
        """Record the mean rewards of the prompts that were taken last, of all ranks.

        Raises:
            ConfigError: with ``prompt_filter``, a reward is not between 0 and 1.
        """
        sums, name = rewards.with_step_sums(), self.filter.get("reward")  # (R, F)
        if name is None:
            values_R = total_rewards(sums, self.config.multi_objective_aggregation)
        else:
            values_R = sums.rewards_NF[:, names.index(name)]
        wrong = values_R[(values_R < -1e-4) | (values_R > 1 + 1e-4)]  # sums of weights have rounding errors
        if self.filter and wrong.numel():
            of = "the sum of the weighted rewards" if name is None else f"reward function {name!r}"
            raise ConfigError(
                f"prompt_filter: {of} of a completion is {wrong[0]:g}, and a solve rate is a mean of rewards "
                f"from 0 to 1; nearest: {wrong[0].clamp(0, 1):g}. Scale the rewards, or name a function that "
                f"returns such rewards: prompt_filter={{'reward': {names[0]!r}}}"
            )
        rate_P = values_R.view(-1, rewards.num_generations).nanmean(-1).tolist()  # (R,) -> (P, G) -> (P,)
        self.rates = self.rates.updated(dict(zip(self._taken, rate_P, strict=True)), self.step)
        known_N = self.rates.rate_N[~self.rates.rate_N.isnan()]
        metrics: Metrics = {
            "prompts/skipped_share": Mean(float(self._num_read - len(self._taken)), self._num_read),
            "prompts/never_sampled": Mean(float((self.rates.count_N == 0).sum())),
        }
        return metrics | ({"prompts/solve_rate": Mean(known_N.mean().item())} if len(known_N) else {})

    def snapshot(self) -> dict[str, Any]:
        """Return position and rates, and the state of a curriculum that has ``state_dict``."""
        state_dict = getattr(self.curriculum, "state_dict", dict)
        return {**super().snapshot(), "rates": vars(self.rates), "curriculum": deepcopy(state_dict())}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Return to a snapshot; the prompts after it are chosen again.

        Raises:
            ConfigError: it has the rates of another number of prompts.
        """
        self.rates = PromptRates(**snapshot["rates"]) if "rates" in snapshot else self.rates
        if len(self.rates.rate_N) != len(self.dataset):
            raise ConfigError(
                f"the checkpoint has the solve rates of {len(self.rates.rate_N)} prompts, and train_dataset "
                f"has {len(self.dataset)}; resume with the same data"
            )
        load_state_dict = getattr(self.curriculum, "load_state_dict", None)
        if load_state_dict is not None and snapshot.get("curriculum"):
            load_state_dict(deepcopy(snapshot["curriculum"]))
        epoch, index = snapshot["epoch"], snapshot["index"]
        self.seek(epoch)
        self._prompts, self._reading = islice(self._read_epoch(epoch), index, None), (epoch, index)
        self.epoch, self.index = self._kept_from = epoch, index


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
