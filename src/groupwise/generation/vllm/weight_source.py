"""Weights of the policy for engines that read them on other CUDA streams, or packed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import torch

NamedTensor = tuple[str, torch.Tensor]


class EngineWeights:
    """Weights of the policy as vLLM's trainer engines read them: the two channels of its ``WeightSource``.

    Engines may read on any CUDA stream and in any thread: every tensor is made on the stream on which
    :meth:`begin` was called, and the reader's stream waits for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: Callable[[], Iterator[NamedTensor]] = lambda: iter(())
        self._rest = self._read()
        self._stream: torch.cuda.Stream | None = None
        self._metadata: list[NamedTensor] | None = None

    def begin(self, read: Callable[[], Iterator[NamedTensor]]) -> None:
        """Begin a pass over the weights that ``read`` iterates over."""
        self._read, self._rest, self._stream = read, _aligned(read()), current_stream()

    def metadata(self) -> list[NamedTensor]:
        """Return the weights on the meta device, in the order of iteration.

        The first call reads all weights once more, which is a collective if they are sharded.
        """
        if self._metadata is None:
            weights = _aligned(self._read())
            self._metadata = [
                (name, torch.empty(one.shape, dtype=one.dtype, device="meta")) for name, one in weights
            ]
        return self._metadata

    def __iter__(self) -> Iterator[NamedTensor]:
        """Iterate over the rest of the pass."""
        while (pair := self._next()) is not None:
            yield pair

    def _next(self) -> NamedTensor | None:
        with self._lock:
            with torch.cuda.stream(self._stream):
                pair = next(self._rest, None)
            if pair is not None and self._stream is not None:
                # Otherwise the reader could copy values of before the last update, and its copy could read
                # memory that the allocator has given to another tensor of the first stream.
                reader = torch.cuda.current_stream()
                reader.wait_event(self._stream.record_event())
                if pair[1].is_cuda:
                    pair[1].record_stream(reader)
        return pair

    def end(self, *, read_rest: bool) -> None:
        """End the pass, also for a thread that is still reading: it gets no further tensor.

        Args:
            read_rest: read the rest first, because other ranks wait for this one in its collectives.
        """
        with self._lock:  # waits until another thread has merged its tensor and the policy is restored
            rest, self._rest = self._rest, iter(())
            for _ in rest if read_rest else ():
                pass


def _aligned(weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Move weights whose size is not a multiple of 8 bytes to the end, large items first.

    vLLM packs tensors without gaps and views them in place: each must begin at a multiple of its item size.
    """
    last = []
    for name, tensor in weights:
        if tensor.nbytes % 8:
            last.append((name, tensor))
        else:
            yield name, tensor
    yield from sorted(last, key=lambda pair: pair[1].element_size(), reverse=True)


def current_stream() -> torch.cuda.Stream | None:
    """Return the current CUDA stream, None without a GPU."""
    return torch.cuda.current_stream() if torch.cuda.is_available() else None
