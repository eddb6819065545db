"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from groupwise.core.metrics import Mean, Metrics

#: Dense bf16 operations a second of accelerators, by a part of their name (vendors' data sheets).
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
    """Seconds by stage since the last step, and what was computed in them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.start = time.perf_counter()

    @contextmanager
    def measure(self, stage: str, *, wait: bool = True) -> Iterator[None]:
        """Add the wall time of the block to ``stage``.

        Args:
            wait: let the accelerator finish first, so that its work counts here and not where it is missed.
        """
        start = time.perf_counter()
        yield
        if wait and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def restart(self) -> None:
        """Forget what was before: a run begins."""
        self.seconds, self.start = {}, time.perf_counter()

    def stages(self) -> Metrics:
        """``time/<stage>`` in seconds since this was last asked."""
        stages: Metrics = {f"time/{stage}": Mean(seconds) for stage, seconds in self.seconds.items()}
        self.seconds = {}
        return stages

    def close_step(self, tokens: float, flops: float) -> Metrics:
        """``time/<stage>``, what is left of the step as ``time/idle``, and the rates.

        Args:
            tokens: prompt and completion tokens that the step trained on, on this rank.
            flops: operations of their forward and backward.
        """
        now = time.perf_counter()
        step_time, self.start = now - self.start, now
        in_training = self.seconds.get("train", 0.0)
        idle = max(step_time - sum(self.seconds.values()), 0.0)
        metrics: Metrics = {
            **self.stages(),
            "time/idle": Mean(idle),
            "step_time": Mean(step_time),
            "tokens_per_second": Mean(tokens, step_time),
        }
        peak = peak_flops()
        if peak is not None and in_training:
            metrics["mfu"] = Mean(flops, in_training * peak)
        return metrics


def peak_flops() -> float | None:
    """Dense bf16 operations a second of this process's accelerator; None where that is not known."""
    if not torch.cuda.is_initialized():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
