"""Isolate the trainer from an engine in the same process: random number generators and model classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from groupwise.random_state import preserved_state


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore all global random number generators at exit; vLLM seeds them for the whole process."""
    set_num_threads = torch.set_num_threads
    try:
        with preserved_state():
            yield
    finally:
        torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it


@contextmanager
def preserve_model_classes(model: nn.Module) -> Iterator[None]:
    """Restore the classes of the model's modules at exit.

    With ``model_impl="transformers"`` vLLM builds its model from the same transformers class and patches that
    class for its compiler, after which the policy could neither run nor be constructed again.
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
