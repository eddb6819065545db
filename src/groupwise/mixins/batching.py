"""Dataset rows to loaders, generations to micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.data import Dataset
from transformers import TrainerState

from groupwise.config.grpo_config import GRPOConfig
from groupwise.data.batches import ExperienceBuffer, GroupSampler
from groupwise.data.dynamic_sampling import Feed
from groupwise.data.exchange import all_to_all_objects
from groupwise.data.prompt_source import rows_of_rank
from groupwise.data.rebalancing import MicroBatchBudget, WindowStats, rebalance
from groupwise.records import MicroBatch, Row


class BatchingMixin:
    """Owns where rows come from, the buffer of generated micro-batches, and how a window may be cut."""

    args: GRPOConfig
    state: TrainerState
    accelerator: Accelerator
    buffer: ExperienceBuffer
    micro_batch_budget: MicroBatchBudget
    feed: Feed

    def make_group_sampler(self, dataset: Dataset) -> GroupSampler:
        """Indices of the prompts of each generation batch, repeated once per micro-batch trained on it."""
        args = self.args
        return GroupSampler(
            dataset,  # type: ignore[arg-type]
            num_generations=args.num_generations,
            prompts_per_batch=args.generation_batch_size // args.num_generations,
            repeats=args.steps_per_generation * args.num_iterations,
            shuffle=args.shuffle_dataset,
            seed=args.seed if args.data_seed is None else args.data_seed,
            epoch=lambda: int(self.state.epoch or 0),
        )

    def next_rows(self, num_prompts: int) -> list[Row]:
        """Return this rank's rows of the next prompts of a source without a loader."""
        assert self.feed.source is not None
        prompts = self.feed.source.take(num_prompts)
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        return rows_of_rank(prompts, self.args.num_generations, rank, ranks)

    @contextmanager
    def rollback_on_failure(self, error: type[Exception], then: Callable[[], None]) -> Iterator[None]:
        """Restore the buffer when ``error`` ends the block, call ``then``, and re-raise."""
        buffer = replace(self.buffer)
        try:
            yield
        except error:
            self.buffer = buffer
            then()
            raise

    def is_exactly_on_policy(self) -> bool:
        """Return True if every generation is used within one optimizer step, so that ℓ_old = sg(ℓ)."""
        uses = self.args.steps_per_generation * self.args.num_iterations
        return self.args.gradient_accumulation_steps % uses == 0

    def rebalance_micro_batches(
        self, window: list[MicroBatch], layout: str
    ) -> tuple[list[MicroBatch | None], WindowStats]:
        """Skip rows without gradient and balance the others over micro-batches and ranks; same update.

        Args:
            window: this rank's micro-batches of one optimizer step, with token weights.
            layout: ``padded``, ``packed`` or ``shared_prefix``.

        Returns:
            as many entries as before, None first where fewer micro-batches suffice; and the work saved.
        """
        # Every rank receives the lengths of all rows, then only the rows that it trains on.
        exchange = partial(all_to_all_objects, device=self.accelerator.device)
        return rebalance(window, layout, self.micro_batch_budget, gather_object, exchange)
