"""StepTimer: phases and idle time add up to the step, rates are totals over totals, memory is a maximum."""

from __future__ import annotations

import pytest
import torch

from groupwise.reporting import timing
from groupwise.reporting.timing import StepTimer, peak_flops


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""

    class Clock:
        now = 100.0

        def __call__(self):
            return self.now

    moved = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", moved)
    return moved


def values(metrics):
    named = {name: reduction.value() for name, reduction in metrics.items()}
    return {name: value for name, value in named.items() if not name.startswith("memory/")}


def test_phases_and_idle_time_add_up_to_the_step(clock):
    timer = StepTimer()
    for phase, seconds in (("generate", 3.0), ("train", 1.0), ("train", 2.0)):
        with timer.measure(phase):
            clock.now += seconds
    clock.now += 0.5
    assert values(timer.close_step(tokens=130, flops=0)) == {
        "time/generate": 3.0,
        "time/train": 3.0,
        "time/idle": 0.5,
        "step_time": 6.5,
        "tokens_per_second": 20.0,
    }
    clock.now += 2.0
    assert values(timer.close_step(tokens=8, flops=0)) == {
        "time/idle": 2.0,
        "step_time": 2.0,
        "tokens_per_second": 4.0,
    }


def test_a_phase_inside_another_counts_once(clock):
    timer = StepTimer()
    with timer.measure("train"):
        clock.now += 1.0
        with timer.measure("generate"):
            clock.now += 3.0
        clock.now += 0.5
    assert values(timer.phases()) == {"time/train": 1.5, "time/generate": 3.0}


def test_memory_of_a_phase_is_the_largest_at_its_end(clock, monkeypatch):
    in_use = iter([3e9, 5e9, 4e9, 2e9])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some Card")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(in_use))
    timer = StepTimer()
    for phase in ("train", "train", "generate"):
        with timer.measure(phase):
            clock.now += 1.0
    first = timer.close_step(tokens=1, flops=0)
    assert (first["memory/train"].value(), first["memory/generate"].value()) == (5.0, 4.0)
    with timer.measure("train"):
        clock.now += 1.0
    second = timer.close_step(tokens=1, flops=0)
    assert second["memory/train"].value() == 2.0 and "memory/generate" not in second
    assert first["memory/train"].merge(second["memory/train"]).value() == 5.0


def test_memory_without_an_accelerator_is_that_of_the_process():
    timer, held = StepTimer(), bytearray(0)
    with timer.measure("reward"):
        pass
    before = timer.phases()["memory/reward"].value()
    with timer.measure("reward"):
        held = bytearray(b"1") * 200_000_000
    after = timer.phases()["memory/reward"].value()
    # 0.2 GB more, unless the operating system reuses pages that were free.
    assert 0.15 < after - before < 0.3 and len(held) == 200_000_000


def test_rates_of_several_steps_are_totals_over_totals(clock):
    timer = StepTimer()
    clock.now += 1.0
    first = timer.close_step(tokens=10, flops=0)
    clock.now += 3.0
    second = timer.close_step(tokens=90, flops=0)
    merged = first["tokens_per_second"].merge(second["tokens_per_second"])
    assert merged.value() == 25.0  # 100 tokens in 4 seconds, not the mean of 10 and 30


def test_utilisation_is_known_on_known_accelerators_only(clock, monkeypatch):
    assert peak_flops() is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    timer = StepTimer()
    with timer.measure("train"):
        clock.now += 2.0
    # 40 % of 989 teraflops for two seconds
    assert values(timer.close_step(tokens=1, flops=0.4 * 989e12 * 2))["mfu"] == pytest.approx(0.4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some Card")
    with timer.measure("train"):
        clock.now += 2.0
    assert "mfu" not in timer.close_step(tokens=1, flops=1.0)
