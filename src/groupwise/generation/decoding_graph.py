"""Decoding steps as CUDA graphs: the host launches one graph per token, not every operator of every layer.

A graph repeats the same operators on the same memory, so it is recorded for one shape: R rows, and C
positions for which the cache has room. The length is data: the position of the new token, and a mask.

    eager step ─► recorded, repeated, compared ─► replay ─► replay ─► … ─► eager step ─► …
                                                  until rows are removed or the cache is full

Recording costs about three eager steps and happens a few times per generation: the cache grows by a quarter,
and rows are removed when half of them have finished. Nothing is kept between generations, neither the cache
nor casts of weights, so training has the memory, and weights may move.

Axes: R rows, S positions, C capacity of the cache, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from groupwise.compat.accelerate import forward_autocast
from groupwise.errors import shortened
from groupwise.generation.decoding import DecodingRows, OneQueryAttention, RowSampler
from groupwise.generation.growing_cache import GrowingLayer
from groupwise.policy.logprob_mismatch import TOLERANCES
from groupwise.records.fast_paths import FastPath

logger = logging.getLogger(__name__)

#: Runs a step once, records it, and returns a function that repeats its operators on the same memory.
Capture = Callable[[Callable[[], None]], Callable[[], None]]

#: Tensors that a step may take beside cache and mask, each (R, 1), (axes, R, 1) or (1,).
_INPUTS = frozenset({"input_ids", "position_ids", "cache_position"})


def capture_cuda_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Record a step as a CUDA graph; see :data:`Capture`.

    Raises:
        RuntimeError: a step waits for the device, such as for the number of tokens of an expert.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # loads kernels, and allocates the workspaces of libraries: both are forbidden in a capture
    # Threads of reward functions may allocate meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


@dataclass
class StepGraphs:
    """Use of graphs by the decoding steps of a run.

    capture: see :data:`Capture`.
    reason: why steps are eager; "": they are not.
    warns: the reason is not a choice of the user.
    passed: a graph has given the log-probs of an eager step.
    """

    capture: Capture = capture_cuda_graph
    reason: str = ""
    warns: bool = False
    passed: bool = False

    def loop(self) -> tuple[type[RowSampler], Callable[..., DecodingRows]]:
        """Return what makes sampler and rows of ``decode_groups``."""
        if self.reason:
            return RowSampler, DecodingRows
        return DelayedSampler, partial(GraphedRows, graphs=self)

    def path(self) -> FastPath:
        """Return the state of the run."""
        choice = "eager" if self.reason else "CUDA graph" if self.passed else "CUDA graph once it is checked"
        return FastPath("decoding steps", choice, self.reason, self.warns)

    def refuse(self, reason: str, *, warns: bool) -> None:
        """Decode eagerly for the rest of the run."""
        self.reason, self.warns = reason, warns
        level = logging.WARNING if warns else logging.INFO
        logger.log(level, "decoding steps are not recorded as CUDA graphs: %s", reason)


class DelayedSampler(RowSampler):
    """Learns which rows have finished one step late, so that the device never waits for the host.

    Finished rows get padding until they are removed, and so do all rows in one step after the last.
    """

    finished_share = 0.5  # each removal records a graph
    last_read: tuple[torch.Tensor, Callable[[], None]] | None = None  # a number, and what waits for it

    def _read(self, number: torch.Tensor) -> int:
        """Return the number of the step before."""
        before = self.last_read
        copied = number.to("cpu", non_blocking=True)  # to pinned memory
        wait = torch.cuda.current_stream().record_event().synchronize if number.is_cuda else lambda: None
        self.last_read = copied, wait
        if before is None:
            return len(self.running_R)
        copied, wait = before
        wait()
        return int(copied)


class GraphedRows(DecodingRows):
    """Rows whose steps run as graphs where they can be recorded.

    Args:
        rows: see :class:`DecodingRows`.
        graphs: of the run.
    """

    def __init__(self, *rows: Any, graphs: StepGraphs) -> None:
        super().__init__(*rows)
        self.graphs = graphs
        self.step: RecordedStep | None = None
        self.tolerance = TOLERANCES.get(
            forward_autocast(self.model) or self.model.dtype, TOLERANCES[torch.bfloat16]
        )

    def keep(self, rows_R: torch.Tensor) -> None:
        self._end_graph(self.tokens_RS.shape[1] - 1)
        super().keep(rows_R)

    def forward(self) -> dict[str, Any]:
        length = self.tokens_RS.shape[1]
        if self.step is not None and length <= self.step.capacity:
            self._update(self.step.run(self.tokens_RS[:, -1:]))
            return self.step.inputs
        self._end_graph(length - 1)
        inputs = super().forward()
        if not self.graphs.reason:
            self._record(inputs, length)
        return inputs

    def _record(self, inputs: dict[str, Any], length: int) -> None:
        """Record the step that has just run, if the cache has room for another; compare the logits."""
        tensors = {name for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        others = sorted(tensors - _INPUTS - {"attention_mask"})
        layers = [layer for layer in self.cache.layers if isinstance(layer, GrowingLayer)]
        if not self.supports_packing or len(layers) < len(self.cache.layers) or others:
            parts = (
                f"inputs {', '.join(others)}" if others else "sliding windows, states or attention of its own"
            )
            self.graphs.refuse(f"{type(self.model).__name__} has {parts}", warns=False)
            return
        if length >= layers[0].buffers[0].shape[-2]:  # the next step grows the cache
            return
        try:
            self.step = RecordedStep(self.model, inputs, layers, length)
            self.step.record(self.graphs.capture)
            logits_RV = self.step.run(self.tokens_RS[:, -1:]).logits[:, -1].float()
            difference = mean_difference(logits_RV, self.logits_RV)
            if difference <= self.tolerance:  # False for NaN
                self.graphs.passed = True
                return
            reason = (
                f"log-probs differ from those of an eager step by {difference:.2g} nats "
                f"(rounding accounts for at most {self.tolerance:.2g})"
            )
        except Exception as error:
            reason = f"recording failed with {shortened(error)}"
        self._end_graph(length)
        self.graphs.refuse(reason, warns=True)

    def _end_graph(self, length: int) -> None:
        """Make the cache grow again, after ``length`` positions."""
        if self.step is not None:
            for layer in self.step.layers:
                layer.release(length)
            self.step = None


class RecordedStep:
    """One decoding step on memory of its own: position, mask and tokens are its inputs, logits its output.

    Args:
        model, inputs: of an eager step.
        layers: of the cache, after that step.
        length: number of positions S after it, below the capacity.
    """

    def __init__(self, model: Any, inputs: dict[str, Any], layers: list[GrowingLayer], length: int) -> None:
        self.model, self.layers = model, layers
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        self.capacity = layers[0].buffers[0].shape[-2]
        self.position_1 = torch.tensor([length - 1], device=ids.device)
        self.mask_R11C = torch.zeros(len(ids), 1, 1, self.capacity, dtype=torch.bool, device=ids.device)
        self.mask_R11C[..., :length] = True if mask is None else mask
        own = {name: inputs[name].clone() for name in _INPUTS if isinstance(inputs.get(name), torch.Tensor)}
        attention = OneQueryAttention(self.mask_R11C)
        self.inputs = {**inputs, **own, "attention_mask": self.mask_R11C, "attention_function": attention}
        #: What a step changes for the next one.
        self.counters = [self.position_1, *(value for name, value in own.items() if name != "input_ids")]

    def record(self, capture: Capture) -> None:
        """Fix the cache and record the step; afterwards it is as if it had not run."""
        for layer in self.layers:
            layer.fix(self.position_1)
        changed = [*self.counters, self.mask_R11C]
        before = [tensor.clone() for tensor in changed]
        self.replay = capture(self._compute)
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)

    def run(self, tokens_R1: torch.Tensor) -> Any:
        """Return the outputs of the model after these tokens; the next run overwrites them."""
        self.inputs["input_ids"].copy_(tokens_R1)
        self.replay()
        return self.outputs

    def _compute(self) -> None:
        self.mask_R11C.index_fill_(-1, self.position_1, True)
        self.outputs = self.model(**self.inputs, return_dict=True)
        for counter in self.counters:
            counter += 1


def mean_difference(logits_RV: torch.Tensor, expected_RV: torch.Tensor) -> float:
    """Return E |difference of log-probs| under the expected distribution, the mean over rows, in nats."""
    logps_RV, expected_RV = logits_RV.log_softmax(-1), expected_RV.log_softmax(-1)
    weights_RV = expected_RV.exp()
    differences_RV = weights_RV * (logps_RV - expected_RV).abs()
    return float(differences_RV.where(weights_RV != 0, 0.0).sum(-1).mean())  # 0 · inf is no difference
