"""Dataset rows to loaders, generations to micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.data import Dataset
from transformers import TrainerState

from groupwise.config.grpo_config import GRPOConfig
from groupwise.data.batches import ExperienceBuffer, GroupSampler
from groupwise.data.dynamic_sampling import (
    Feed,
    Filled,
    FillSettings,
    LeftoverGroups,
    fill_batch,
    with_old_logps,
)
from groupwise.data.prompt_source import rows_of_rank
from groupwise.data.rebalancing import MicroBatchBudget, WindowStats, rebalance
from groupwise.records import MicroBatch, RewardBatch, RolloutBatch, Row


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

    def rows_of_step(self, rows: list[Row]) -> list[Row]:
        """This rank's rows of a generation batch: those of the loader, or the next ones of the stream."""
        return rows if self.feed.source is None else self._next_rows(self._fill_settings().num_prompts)

    def fill(
        self,
        sample: Callable[[list[Row]], tuple[RolloutBatch, RewardBatch]],
        score: Callable[[RolloutBatch], list[list[float]]],
    ) -> Filled:
        """Sample a generation batch of groups with reward variance, as far as there are enough.

        Args:
            sample: rows to completions with rewards.
            score: log-probs of completions under the current policy.
        """
        settings = self._fill_settings()
        filled = fill_batch(
            self.feed.carry, settings, lambda count: sample(self._next_rows(count)), gather_object
        )
        surplus = with_old_logps(filled.surplus, settings, score, gather_object)
        self.feed.carry = LeftoverGroups(surplus, filled.share_with_variance)
        self.feed.warn_of_flat_groups(filled, settings)
        return filled

    def _fill_settings(self) -> FillSettings:
        args = self.args
        return FillSettings(
            num_prompts=args.generation_batch_size // args.num_generations,
            num_generations=args.num_generations,
            max_rounds=args.dynamic_sampling_max_rounds,
            aggregation=args.multi_objective_aggregation,
            ranks=self.accelerator.num_processes,
            rank=self.accelerator.process_index,
        )

    def _next_rows(self, num_prompts: int) -> list[Row]:
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
        """The window without rows that have no gradient, in micro-batches of about equal cost."""
        return rebalance(window, layout, self.micro_batch_budget, self._rows_of_all_ranks)

    def _rows_of_all_ranks(self, batch: MicroBatch) -> MicroBatch:
        """Gather the rows of all ranks."""
        if self.accelerator.num_processes == 1:
            return batch
        gathered = gather_object([batch.state_dict()])
        return MicroBatch.concatenate([MicroBatch.from_state(state) for state in gathered]).to(
            self.accelerator.device
        )
