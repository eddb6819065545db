"""Wall-clock time and memory of each phase of an optimizer step: generate, reward, log-probs, train, idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

from groupwise.core.metrics import Max, Mean, Metrics

#: Dense bf16 FLOP/s by a part of the accelerator's name (vendors' data sheets).
PEAK_FLOPS = {
    "B200": 2.25e15,
    "H200": 9.89e14,
    "H100": 9.89e14,
    "A100": 3.12e14,
    "L40S": 3.62e14,
    "L4": 1.21e14,
    "A10": 1.25e14,
    "RTX 4090": 1.65e14,
    "MI300X": 1.31e15,
}


class StepTimer:
    """Accumulate seconds and memory per phase and turn them into the metrics of an optimizer step.

    Args:
        show: receives the innermost phase that is being measured whenever it changes; "" between phases.
    """

    def __init__(self, show: Callable[[str], None] = lambda phase: None) -> None:
        self.seconds: dict[str, float] = {}
        self.gigabytes: dict[str, float] = {}
        self.start = time.perf_counter()
        self.show = show
        self._running = [""]  # phases of the nested blocks, innermost last

    @contextmanager
    def measure(self, phase: str, *, wait: bool = True) -> Iterator[None]:
        """Add the wall-clock time of the block to ``phase``, without that of phases inside the block.

        The memory of the phase is what is in use when the block ends: a peak inside it could only be measured
        by resetting the peak that the user may be measuring.

        Args:
            wait: synchronize the accelerator at the end of the block, so that kernels launched in it are
                counted in this phase and not in the next one that synchronizes.
        """
        start, inner = time.perf_counter(), sum(self.seconds.values())
        self._running.append(phase)
        self.show(phase)
        try:
            yield
        finally:
            self._running.pop()
            self.show(self._running[-1])
        if wait and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        inner -= sum(self.seconds.values())  # minus the seconds of phases inside the block
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start + inner
        self.gigabytes[phase] = max(self.gigabytes.get(phase, 0.0), memory_in_use())

    def phases(self) -> Metrics:
        """Return ``time/<phase>`` in seconds and ``memory/<phase>`` in GB since the last call; clear them."""
        phases: Metrics = {f"time/{phase}": Mean(seconds) for phase, seconds in self.seconds.items()}
        phases.update({f"memory/{phase}": Max(most) for phase, most in self.gigabytes.items()})
        self.seconds, self.gigabytes = {}, {}
        return phases

    def close_step(self, tokens: float, flops: float) -> Metrics:
        """End the optimizer step and return its metrics.

        Args:
            tokens: prompt and completion tokens of this rank in the step.
            flops: floating-point operations of their forward and backward passes.

        Returns:
            those of :meth:`phases`, ``time/idle`` (the rest of the step), ``step_time``,
            ``tokens_per_second`` and, on known accelerators, ``mfu``.
        """
        now = time.perf_counter()
        step_time, self.start = now - self.start, now
        train_time = self.seconds.get("train", 0.0)
        idle = max(step_time - sum(self.seconds.values()), 0.0)
        metrics: Metrics = {
            **self.phases(),
            "time/idle": Mean(idle),
            "step_time": Mean(step_time),
            "tokens_per_second": Mean(tokens, step_time),
        }
        peak = peak_flops()
        if peak is not None and train_time:
            metrics["mfu"] = Mean(flops, train_time * peak)
        return metrics


def memory_in_use() -> float:
    """Return the GB allocated on the accelerator, or without one the resident memory of the process."""
    if torch.cuda.is_initialized():
        return torch.cuda.memory_allocated() / 1e9
    return psutil.Process().memory_info().rss / 1e9


def peak_flops() -> float | None:
    """Return the dense bf16 FLOP/s of this process's accelerator, None for an unknown one."""
    if not torch.cuda.is_initialized():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
