"""A ``transformers.Trainer`` that splits micro-batches which do not fit in memory; nothing is about GRPO."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from groupwise.errors import BackendError

logger = logging.getLogger(__name__)


class SplittingTrainer(Trainer):
    """Trains a window again in smaller pieces when memory runs out, and stays with the smaller size.

    The loss has to be a sum over rows, however they are split. A subclass says how inputs are measured and
    split, and what to take back when a window starts again.
    """

    piece_limit: int | None = None
    _exchanges = False  # the backward of the piece at hand may have to send gradients to other ranks
    _window: tuple[Any, ...] = ()
    _before: Any = None

    def num_tokens(self, inputs: Any) -> int:
        """What the memory of a micro-batch grows with."""
        raise NotImplementedError

    def split_in_half(self, inputs: Any) -> list[Any]:
        """The inputs in two parts, or in one if they cannot be split."""
        raise NotImplementedError

    def split_for_cache(self, inputs: Any) -> list[Any]:
        """The inputs in parts that are better computed one after the other even if all of them fit."""
        return [inputs]

    def window_state(self) -> Any:
        """What a window changes beside gradients."""
        raise NotImplementedError

    def restore_window_state(self, state: Any) -> None:
        """Take back what a window has changed."""
        raise NotImplementedError

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Loss and gradients of one micro-batch.

        Raises:
            BackendError: a micro-batch does not fit in memory and cannot be split.
        """
        if not self._window:
            self._before = self.window_state()
        window = (*self._window, inputs)
        loss, failure = self._attempt(model, [inputs], num_items_in_batch)
        while failure is not None:
            self._lower_limit(window, failure)
            # Some gradients of the failed attempt are already added up, so the whole window starts again.
            clear_device_cache(garbage_collection=True)
            model.zero_grad()
            _skip_broadcast(model)
            self.restore_window_state(self._before)
            loss, failure = self._attempt(model, window, num_items_in_batch)
        self._window = () if self.accelerator.sync_gradients else window
        return loss

    def _attempt(
        self, model: nn.Module, batches: Sequence[Any], num_items_in_batch: Any
    ) -> tuple[torch.Tensor, RuntimeError | None]:
        """Add up the gradients of ``batches``: the loss of the last one, or what says that memory ran out."""
        losses: list[torch.Tensor] = []
        try:
            for batch in batches:
                pieces, losses = self._pieces(batch), []
                for piece in pieces:
                    final = batch is batches[-1] and piece is pieces[-1]
                    self._exchanges = False
                    with self._noting_forward(model) if final else self.accelerator.no_sync(model):
                        losses.append(super().training_step(model, piece, num_items_in_batch))
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            return torch.zeros(()), error.with_traceback(None)  # the traceback holds all activations
        return torch.stack(losses).sum(), None

    def _noting_forward(self, model: nn.Module) -> Any:
        """A context that notes when a forward is over: DDP sends the gradients of whatever comes next."""

        def note(*_: Any) -> None:
            self._exchanges = self.accelerator.sync_gradients

        return model.register_forward_hook(note)

    def _pieces(self, inputs: Any) -> list[Any]:
        return [piece for part in self.split_for_cache(inputs) for piece in self._within_limit(part)]

    def _within_limit(self, inputs: Any) -> list[Any]:
        """The inputs, split until each part is within the limit or cannot be split."""
        if self.piece_limit is None or self.num_tokens(inputs) <= self.piece_limit:
            return [inputs]
        halves = self.split_in_half(inputs)
        return (
            halves if len(halves) == 1 else [piece for half in halves for piece in self._within_limit(half)]
        )

    def _lower_limit(self, window: Sequence[Any], failure: RuntimeError) -> None:
        largest = max((piece for batch in window for piece in self._pieces(batch)), key=self.num_tokens)
        size = self.num_tokens(largest)
        if len(self.split_in_half(largest)) == 1:
            raise BackendError(
                f"one micro-batch of {size} tokens does not fit in memory, and it cannot be split; lower "
                "max_completion_length or max_prompt_length, train an adapter (peft_config), or spread the "
                f"model over devices. {failure}"
            ) from failure
        sharded = self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        if self.accelerator.num_processes > 1 and (sharded or self._exchanges):
            rank = self.accelerator.process_index
            raise BackendError(
                f"memory ran out on rank {rank} at {size} tokens while it exchanged data with other ranks, "
                f"which cannot be repeated; lower per_device_train_batch_size. {failure}"
            ) from failure
        self.piece_limit = size // 2
        logger.warning(
            "a micro-batch of %d tokens did not fit in memory; the window is computed again, and from now on "
            "micro-batches are split to %d tokens where they have several rows: the update stays the same",
            *(size, self.piece_limit),
        )


def _skip_broadcast(model: Any) -> None:
    """The first forward of a window broadcasts buffers to all ranks; a second time, nobody would listen."""
    wrapper = getattr(model, "_orig_mod", model)
    if isinstance(wrapper, DistributedDataParallel):
        wrapper.require_forward_param_sync = False
