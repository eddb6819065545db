"""The engine shares the process with the trainer, but not its random numbers and not its classes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch
from torch import nn
from transformers import PreTrainedModel


@contextmanager
def preserve_rng_state() -> Iterator[None]:
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


@contextmanager
def own_classes(model: nn.Module) -> Iterator[None]:
    """What runs inside leaves the classes of the model as they were.

    With ``model_impl="transformers"`` vLLM builds its model from the same class of transformers and rewrites
    that class for its own compiler, after which the policy could neither be called nor made again.
    """
    classes = {type(module) for module in model.modules() if isinstance(module, PreTrainedModel)}
    before = {cls: (cls.__bases__, dict(vars(cls))) for cls in classes}
    try:
        yield
    finally:
        for cls, (bases, attributes) in before.items():
            if cls.__bases__ != bases:
                cls.__bases__ = bases
            for name in vars(cls).keys() - attributes.keys():
                delattr(cls, name)
            for name, value in attributes.items():
                if vars(cls)[name] is not value:
                    setattr(cls, name, value)
