"""The engine shares the process with the trainer, but not its random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch


@contextmanager
def own_random_state() -> Iterator[None]:
    """What runs inside draws and seeds without effect outside: vLLM sets the seeds of the whole process."""
    states = random.getstate(), numpy.random.get_state()
    set_num_threads = torch.set_num_threads
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])
            torch.set_num_threads = set_num_threads  # vLLM's worker for CPUs takes it away
