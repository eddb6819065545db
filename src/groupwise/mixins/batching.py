"""Dataset rows to loaders, generations to micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.data import Dataset
from transformers import TrainerState

from groupwise.config import GRPOConfig
from groupwise.data import GenerationBuffer, GroupSampler
from groupwise.stages import TrainBatch
from groupwise.window import Cut, WindowWork, recut


class BatchingMixin:
    """Owns the buffer of generated micro-batches, and how a window of them may be cut."""

    args: GRPOConfig
    state: TrainerState
    accelerator: Accelerator
    generation_buffer: GenerationBuffer
    window_cut: Cut

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

    def take_micro_batch(
        self, rows: list[dict[str, Any]], generate: Callable[[list[dict[str, Any]]], list[TrainBatch]]
    ) -> TrainBatch:
        """The next micro-batch; ``generate(rows)`` refills the buffer when its last use is spent."""
        if self.generation_buffer.exhausted:
            self.generation_buffer = GenerationBuffer(generate(rows), self.args.num_iterations)
        return self.generation_buffer.next()

    def is_exactly_on_policy(self) -> bool:
        """Whether every generation is used within one optimizer step, so that ℓ_old = sg(ℓ)."""
        uses = self.args.steps_per_generation * self.args.num_iterations
        return self.args.gradient_accumulation_steps % uses == 0

    def recut_window(
        self, window: list[TrainBatch], layout: str
    ) -> tuple[list[TrainBatch | None], WindowWork]:
        """The window without rows that have no gradient, in micro-batches of about equal cost."""
        return recut(window, layout, self.window_cut, self._rows_of_all_ranks)

    def _rows_of_all_ranks(self, batch: TrainBatch) -> TrainBatch:
        """The rows of all ranks; ranks may differ in whether their sampler reported log-probs."""
        if self.accelerator.num_processes == 1:
            return batch
        gathered = gather_object([batch.state_dict()])
        names = {name for state in gathered for name in state}
        for state in gathered:
            for name in names - state.keys():
                state[name] = torch.full(state["completion_ids_BC"].shape, torch.nan)
        joined = TrainBatch.concatenate([TrainBatch.from_state(state) for state in gathered])
        return joined.to(self.accelerator.device)
