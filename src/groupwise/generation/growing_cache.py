"""A key-value cache with spare capacity, written in place.

The ``DynamicLayer`` of transformers concatenates, which copies all keys and values at every token.

Axes: R rows, K key-value heads, S positions, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from groupwise.compat.transformers import select_cache_rows


class GrowingLayer(DynamicLayer):
    """``DynamicLayer`` whose keys and values are views of larger buffers.

    Full buffers grow by a quarter, so that memory follows the completions rather than their limit, and each
    position is copied only a few times. Buffers have the dtype of new values: under autocast new keys and
    ``filled`` are float32, and attention would cast every position again for every token.

    Args:
        filled: the layer after the prefill.
        limit: maximum number of positions.
    """

    keys: torch.Tensor
    values: torch.Tensor
    position_1: torch.Tensor | None  # of the next keys and values while addresses are fixed

    def __init__(self, filled: DynamicLayer, limit: int) -> None:
        super().__init__()
        self.dtype = filled.keys.dtype  # type: ignore[union-attr]
        self.device, self.is_initialized = filled.device, True
        self.limit, self.position_1 = limit, None
        self.buffers = [self._with_capacity(old) for old in (filled.keys, filled.values)]
        self._set_length(filled.get_seq_length())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append positions; returns all keys and values, (R, K, S, D) each, or the buffers if fixed."""
        if self.position_1 is not None:
            for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
                buffer.index_copy_(2, self.position_1, states.to(buffer.dtype))
            return self.buffers[0], self.buffers[1]
        start, end = self.get_seq_length(), self.get_seq_length() + key_states.shape[-2]
        if end > self.buffers[0].shape[-2] or value_states.dtype != self.dtype:
            self.dtype = value_states.dtype
            self.buffers = [self._with_capacity(old) for old in (self.keys, self.values)]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer.narrow(2, start, end - start).copy_(states)
        self._set_length(end)
        return self.keys, self.values

    def fix(self, position_1: torch.Tensor) -> None:
        """Write at ``position_1`` from now on, and return the buffers whole: no address or shape changes."""
        for buffer in self.buffers:  # new memory may contain NaN, which a weight of 0 does not remove
            buffer[:, :, self.get_seq_length() :] = 0
        self.position_1 = position_1

    def release(self, length: int) -> None:
        """Append again, after ``length`` positions."""
        self.position_1 = None
        self._set_length(length)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows."""
        length, rows = self.get_seq_length(), indices.to(self.device)
        self.buffers = [buffer[rows] for buffer in self.buffers]
        self._set_length(length)

    def _set_length(self, length: int) -> None:
        self.keys, self.values = (buffer.narrow(2, 0, length) for buffer in self.buffers)

    def _with_capacity(self, old: Any) -> torch.Tensor:
        rows, heads, length, size = old.shape
        capacity = max(length + 1, min(length + length // 4 + 32, self.limit))
        buffer = old.new_empty(rows, heads, capacity, size, dtype=self.dtype)
        buffer[:, :, :length] = old
        return buffer


def continue_rows(cache: DynamicCache, rows_R: torch.Tensor, limit: int) -> None:
    """Replace the rows of ``cache`` by ``rows_R``, which may repeat rows, and give its layers spare capacity.

    Args:
        limit: maximum number of positions.
    """
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            layer.batch_select_indices(rows_R.to(layer.device))
            cache.layers[index] = GrowingLayer(layer, limit)
        else:
            select_cache_rows(layer, rows_R)
