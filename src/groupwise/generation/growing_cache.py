"""A key-value cache that is written in place while rows are decoded.

transformers' own layer concatenates, which copies the keys and values of every row at every token.

Axes: R rows, K key-value heads, S positions, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer


class GrowingLayer(DynamicLayer):
    """A ``DynamicLayer`` whose keys and values are views of buffers with room for more positions.

    Full buffers grow by a quarter: a long limit that few completions reach takes no memory ahead of time, and
    a position is copied only a few times in all.

    Args:
        filled: the layer after the prefill.
        rows_R: which row of it each row of this layer continues.
        limit: number of positions that will not be exceeded.
    """

    def __init__(self, filled: DynamicLayer, rows_R: torch.Tensor, limit: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = filled.dtype, filled.device, True
        self.limit = limit
        rows = rows_R.to(self.device)
        self.buffers = [self._with_room(old, rows) for old in (filled.keys, filled.values)]
        self._set_length(filled.get_seq_length())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new positions behind the present ones; returns all of them, (R, K, S, D) each."""
        start, end = self.get_seq_length(), self.get_seq_length() + key_states.shape[-2]
        if end > self.buffers[0].shape[-2]:
            rows = torch.arange(len(key_states), device=self.device)
            self.buffers = [self._with_room(old, rows) for old in (self.keys, self.values)]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer.narrow(2, start, end - start).copy_(states)
        self._set_length(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows."""
        length, rows = self.get_seq_length(), indices.to(self.device)
        self.buffers = [buffer[rows] for buffer in self.buffers]
        self._set_length(length)

    def _set_length(self, length: int) -> None:
        self.keys, self.values = (buffer.narrow(2, 0, length) for buffer in self.buffers)

    def _with_room(self, old: Any, rows: torch.Tensor) -> torch.Tensor:
        length = old.shape[-2]
        room = max(length + 1, min(length + length // 4 + 32, self.limit))
        buffer = old.new_empty(len(rows), old.shape[1], room, old.shape[-1])
        buffer[:, :, :length] = old[rows]
        return buffer


def continue_rows(cache: DynamicCache, rows_R: torch.Tensor, limit: int) -> None:
    """Let the cache hold the given rows of itself, in order and as often as they are named, ready to grow.

    Args:
        limit: number of positions that will not be exceeded.
    """
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[index] = GrowingLayer(layer, rows_R, limit)
        else:
            layer.batch_select_indices(rows_R)  # type: ignore[union-attr]
