"""Repeat an accumulation window in smaller pieces after an out-of-memory error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import release_memory
from torch import nn

from groupwise.compat.accelerate import is_out_of_memory
from groupwise.compat.torch import skip_buffer_broadcast
from groupwise.distributed import is_sharded
from groupwise.errors import BackendError
from groupwise.hf.step_state import Stateful
from groupwise.records import MicroBatch

logger = logging.getLogger(__name__)


class OutOfMemorySplitter:
    """Run training steps; after an out-of-memory error repeat the window with smaller micro-batches.

    The failed backward pass has left some gradients in place, so the whole accumulation window is computed
    again. The loss must be a sum over rows, so that the gradients of the pieces add up to those of the whole
    micro-batch.

    Args:
        training_step: ``transformers.Trainer.training_step`` as a bound method.
        split: returns two micro-batches, or one if it cannot be split; with ``for_cache=True`` micro-batches
            that run faster one after the other, even if all fit at once.
        window_state: returns the components that a window changes besides gradients.
        free_activations: lets later micro-batches keep fewer activations; False: they keep none.

    Attributes:
        max_tokens: micro-batches with more tokens are split; None until an out-of-memory error.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        training_step: Callable[..., torch.Tensor],
        split: Callable[..., list[MicroBatch]],
        window_state: Callable[[], Sequence[Stateful]],
        free_activations: Callable[[], bool] = lambda: False,
    ) -> None:
        self.accelerator = accelerator
        self._training_step = training_step
        self._split = split
        self._window_state = window_state
        self._free_activations = free_activations
        self.reset()

    def reset(self) -> None:
        """Drop the size limit and an unfinished window, for a new run."""
        self.max_tokens: int | None = None
        self._window: list[MicroBatch] = []
        self._marks: list[tuple[Stateful, Any]] = []  # components and their state before the window
        # True from the end of the forward whose backward exchanges gradients with other ranks.
        self._is_exchanging = False

    def training_step(
        self, model: nn.Module, inputs: MicroBatch, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run forward and backward of one micro-batch and return its loss.

        Raises:
            BackendError: a micro-batch does not fit in memory and cannot be split, or the error came while
                ranks exchanged gradients.
        """
        if not self._window:
            self._marks = [(component, component.snapshot()) for component in self._window_state()]
        self._window.append(inputs)
        loss, failure = self._attempt(model, [inputs], num_items_in_batch)
        while failure is not None:
            self._lower_limit(failure)
            release_memory()
            model.zero_grad()
            # The other ranks do not repeat their broadcast; this rank would wait for it forever.
            skip_buffer_broadcast(model)
            for component, mark in self._marks:
                component.restore(mark)
            loss, failure = self._attempt(model, self._window, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self._window = []
        return loss

    def _attempt(
        self, model: nn.Module, batches: Sequence[MicroBatch], num_items_in_batch: torch.Tensor | int | None
    ) -> tuple[torch.Tensor, RuntimeError | None]:
        """Accumulate gradients of `batches`; return the loss of the last one, or the out-of-memory error."""
        losses: list[torch.Tensor] = []
        try:
            for batch in batches:
                pieces, losses = self._pieces(batch), []
                for piece in pieces:
                    is_last = batch is batches[-1] and piece is pieces[-1]
                    self._is_exchanging = False
                    with self._watch_forward(model) if is_last else self.accelerator.no_sync(model):
                        losses.append(self._training_step(model, piece, num_items_in_batch))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return torch.zeros(()), error.with_traceback(None)  # the traceback references all activations
        return torch.stack(losses).sum(), None

    def _watch_forward(self, model: nn.Module) -> AbstractContextManager[object]:
        """Set ``_is_exchanging`` when the forward returns: DDP all-reduces in the backward that follows."""

        def after_forward(*_: object) -> None:
            self._is_exchanging = self.accelerator.sync_gradients

        return model.register_forward_hook(after_forward)

    def _pieces(self, inputs: MicroBatch) -> list[MicroBatch]:
        parts = self._split(inputs, for_cache=True)
        return [piece for part in parts for piece in self._split_to_limit(part)]

    def _split_to_limit(self, inputs: MicroBatch) -> list[MicroBatch]:
        """Halve until every piece has at most ``max_tokens`` tokens or cannot be split."""
        if self.max_tokens is None or inputs.num_tokens() <= self.max_tokens:
            return [inputs]
        halves = self._split(inputs, for_cache=False)
        if len(halves) == 1:
            return halves
        return [piece for half in halves for piece in self._split_to_limit(half)]

    def _lower_limit(self, failure: RuntimeError) -> None:
        """Keep fewer activations; if none are kept, set ``max_tokens`` to half of the largest piece."""
        largest = max(
            (piece for batch in self._window for piece in self._pieces(batch)), key=MicroBatch.num_tokens
        )
        size = largest.num_tokens()
        can_repeat = self.accelerator.num_processes == 1 or not (
            is_sharded(self.accelerator) or self._is_exchanging
        )
        if can_repeat and self._free_activations():
            logger.warning(
                "a micro-batch of %d tokens did not fit in memory; the accumulation window is repeated, and "
                "more layers are recomputed for the rest of the run; the update stays the same",
                size,
            )
            return
        if len(self._split(largest, for_cache=False)) == 1:
            raise BackendError(
                f"one micro-batch of {size} tokens does not fit in memory and cannot be split; lower "
                "max_completion_length or max_prompt_length, train an adapter (peft_config), or shard the "
                f"model over devices. {failure}"
            ) from failure
        if not can_repeat:
            raise BackendError(
                f"rank {self.accelerator.process_index} ran out of memory at {size} tokens while it "
                "exchanged data with other ranks, which cannot be repeated; lower "
                f"per_device_train_batch_size. {failure}"
            ) from failure
        self.max_tokens = size // 2
        logger.warning(
            "a micro-batch of %d tokens did not fit in memory; the accumulation window is repeated, and "
            "micro-batches of several rows are split to at most %d tokens for the rest of the run; the "
            "update stays the same",
            *(size, self.max_tokens),
        )
