"""Ranks: the rows of each, sharded parameters, and results that all ranks must agree on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from groupwise.compat.torch import process_group_store
from groupwise.errors import ConfigError, GroupwiseError, TrainingError, warn_once

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

T = TypeVar("T")


def rows_of_rank(rank: int, num_rows: int) -> slice:
    """Return the rows of ``rank`` among those of all ranks, each of which has ``num_rows``, in rank order."""
    return slice(rank * num_rows, (rank + 1) * num_rows)


@dataclass(frozen=True)
class RankSlice:
    """Split of the completions of a batch over ranks: equal runs of rows in rank order.

    With two prompts of G = 3 and two ranks, rank 0 has rows 0 to 2 (prompt 0), and rank 1 rows 3 to 5. With
    three ranks, rank 1 has rows 2 and 3, of both prompts.

    num_generations: completions per prompt, G.
    """

    num_generations: int
    rank: int = 0
    world_size: int = 1

    def rows(self, num_prompts: int) -> range:
        """Return the indices of this rank's rows among the N = P · G rows of ``num_prompts`` prompts."""
        num_rows = num_prompts * self.num_generations
        return range(num_rows)[rows_of_rank(self.rank, num_rows // self.world_size)]

    def prompts(self, num_prompts: int) -> list[int]:
        """Return the indices of the prompts, of P in order, that this rank has completions of."""
        return sorted({row // self.num_generations for row in self.rows(num_prompts)})


def is_sharded(accelerator: Accelerator) -> bool:
    """Return True under FSDP and DeepSpeed, whose wrappers exchange data in forward and backward passes."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def gathers_in_forwards(accelerator: Accelerator) -> bool:
    """Return True under FSDP and ZeRO-3: a prepared model gathers its parameters in every forward pass."""
    return accelerator.distributed_type == DistributedType.FSDP or is_deepspeed_zero3_enabled()


def requires_lockstep_forwards(model: torch.nn.Module) -> bool:
    """Return True under ZeRO-3 and FSDP: ranks dead-lock unless all run the same number of forwards."""
    return is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)


def any_rank(accelerator: Accelerator, flag: bool) -> bool:
    """Return True on every rank if ``flag`` is true on one of them. A collective: all ranks call it."""
    return largest(accelerator, int(flag)) > 0


def largest(accelerator: Accelerator, value: int) -> int:
    """Return the largest value of all ranks. A collective: all ranks call it."""
    return int(accelerator.gather(torch.tensor([value], device=accelerator.device)).max())


def gather_or_raise(value: T, failure: Exception | None) -> list[T]:
    """Gather a value of every rank, or raise the error of a rank on every rank, on others with its number.

    A collective. Ranks that did not know of the error would wait for the failed one until the time limit of
    the process group, and then report a closed connection.
    """
    sent = failure
    if failure is not None and not isinstance(failure, GroupwiseError):
        # Its class may take other arguments than a message, or may not be picklable.
        sent = OSError(str(failure)) if isinstance(failure, OSError) else TrainingError(repr(failure))
    outcomes = gather_object([(value, sent)])
    if failure is not None:
        raise failure
    for rank, (_, error) in enumerate(outcomes):
        if error is not None:
            raise type(error)(f"rank {rank}: {error}")
    return [gathered for gathered, _ in outcomes]


def broadcast_from_first(compute: Callable[[], T], is_first: bool, world_size: int) -> T:
    """Run ``compute`` on rank 0 and return its result on every rank; a failure is raised on every rank.

    Raises:
        ConfigError: on the other ranks, if rank 0 failed.
    """
    if world_size == 1:
        return compute()
    result: list[Any] = [None, None]
    failure: Exception | None = None
    if is_first:
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


class RankStages:
    """Stages of all ranks in the store of the process group: a rank that is killed or stopped logs none."""

    def __init__(self, rank: int, world_size: int, timeout: float) -> None:
        self.rank, self.stage = rank, "start"
        self.others = [other for other in range(world_size) if other != rank]
        # transformers passes no ddp_timeout on a CPU: a rank would wait 30 minutes for one that has stopped.
        has_group = self.others and torch.distributed.is_initialized()
        self._store = process_group_store(timeout) if has_group else None

    def enter(self, stage: str) -> None:
        """Set the stage of this rank, such as "reward of step 3"."""
        self.stage = stage
        if self._store is not None:
            with suppress(RuntimeError):  # the store has ended; the next collective fails
                self._store.set(f"groupwise/{self.rank}", stage)  # does not wait for it

    def describe_failure(self, error: BaseException) -> str:
        """Return rank, stage and cause of a failure, and eight other ranks: those in other stages first."""
        mine, found, store = self.stage, list[bytes](), self._store
        self.enter(f"failed in {mine}: {type(error).__name__}: {error!s:.300}")

        def read() -> None:
            with suppress(RuntimeError):
                if store is not None:
                    found.extend(store.multi_get([f"groupwise/{other}" for other in self.others]))

        reader = Thread(target=read, daemon=True)
        reader.start()
        reader.join(5.0)  # a store whose process is stopped does not answer
        ranks = sorted(zip(self.others, found, strict=False), key=lambda pair: pair[1].decode() == mine)
        others = "; ".join(f"rank {rank}: {stage.decode()}" for rank, stage in ranks[:8]) or "no answer"
        return " ".join(f"rank {self.rank} {self.stage}. Others: {others}".split())


def check_groups(
    digests_N2: Sequence[tuple[int, int | None]], num_generations: int, rows_per_rank: int
) -> None:
    """Check that the completions of a group have one prompt, from digests of all ranks.

    Args:
        digests_N2: of the prompt in the dataset, and of the prompt in the rollout; None: it is dropped.

    Raises:
        TrainingError: the ranks read different data.
    """
    for first in range(0, len(digests_N2), num_generations):
        group = digests_N2[first : first + num_generations]
        rank = first // rows_per_rank
        for row, (given, _) in enumerate(group, start=first):
            if given != group[0][0] and row // rows_per_rank != rank:
                raise TrainingError(
                    f"row {row % rows_per_rank} of rank {row // rows_per_rank} has another prompt than row "
                    f"{first % rows_per_rank} of rank {rank}, which is of the same group: the ranks read "
                    "different data; every rank needs the same rows in the same order (a seed for shuffle(), "
                    "the same files)"
                )
        if len({prompt for _, prompt in group} - {None}) > 1:
            warn_once(
                logger,
                "rollouts of a group have different prompts, although their advantages compare them: reset "
                "of an environment, or an override of generate_rollouts, changes them; choose the task by "
                "columns of the row, such as seed, which the group shares",
            )
