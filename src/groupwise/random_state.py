"""State of the global random number generators, and a stream of its own for the user's functions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from groupwise.records.serialization import NotSaved

#: Distance of the seed of the user's functions from the seed of the rank.
_USER_SEED = 1_000_003


class RandomState:
    """Random number generators of Python, NumPy and torch on this rank, with two streams of torch's.

    Sampling, dropout and shuffles draw from the stream of the run, which is that of TRL on the same seed.
    Reward functions, tools and environments draw from and seed a second stream: neither changes a sample.
    ``Trainer`` saves and restores the stream of the run; the snapshot of a checkpoint has the other alone.
    """

    def __init__(self) -> None:
        self._in_user_code = False
        self._unused = _torch_state()  # of the stream that is not in the global generators

    def seed_user_code(self, seed: int) -> None:
        """Seed the stream of the user's functions.

        Args:
            seed: of this rank.
        """
        with self.user_code():
            torch.manual_seed(seed + _USER_SEED)

    @contextmanager
    def user_code(self, active: bool = True) -> Iterator[None]:
        """Context manager in which torch draws from the stream of the user's functions.

        Args:
            active: False: from the stream of the run again, inside such a context.
        """
        changes = active != self._in_user_code
        if changes:
            self._exchange()
        try:
            yield
        finally:
            if changes:
                self._exchange()

    def _exchange(self) -> None:
        present = _torch_state()
        _set_torch_state(self._unused)
        self._unused, self._in_user_code = present, not self._in_user_code

    def snapshot(self) -> dict[str, Any]:
        """Return the states of both streams."""
        return {"run": NotSaved(get_state()), "user_code": self._unused}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Restore the stream of the user's functions, and that of the run unless ``Trainer`` does."""
        self._unused = snapshot["user_code"]
        if snapshot["run"] is not None:  # of a mark, not of a checkpoint
            set_state(snapshot["run"].value)


def get_state() -> tuple[Any, ...]:
    """Return the state of this process's Python, NumPy and torch generators, as a checkpoint can hold it."""
    kind, key, *others = np.random.get_state()
    return random.getstate(), (kind, key.tolist(), *others), _torch_state()  # type: ignore[attr-defined]


def set_state(state: tuple[Any, ...]) -> None:
    """Restore a state that :func:`get_state` returned."""
    python, numpy, of_torch = state
    random.setstate(python)
    np.random.set_state(numpy)
    _set_torch_state(of_torch)


@contextmanager
def preserved_state() -> Iterator[None]:
    """Context manager that restores the state of all global generators at exit."""
    state = get_state()
    try:
        yield
    finally:
        set_state(state)


def _torch_state() -> list[Any]:
    """Return the states of torch's generators: of the CPU and, once in use, of the accelerators."""
    devices = _accelerators()
    return [torch.get_rng_state(), None if devices is None else _function(devices, "get")()]


def _set_torch_state(state: list[Any]) -> None:
    cpu, accelerators = state
    torch.set_rng_state(cpu)
    if accelerators is not None:
        _function(_accelerators(), "set")(accelerators)


def _accelerators() -> Any:
    """Return torch's module for the accelerators of this process; None before their first use."""
    device = torch.accelerator.current_accelerator()
    module: Any = None if device is None else torch.get_device_module(device)
    in_use = hasattr(module, "get_rng_state") and getattr(module, "is_initialized", lambda: True)()
    return module if in_use else None


def _function(module: Any, verb: str) -> Callable[..., Any]:
    """Return the function for the generators of all devices, or of the only one (MPS)."""
    return getattr(module, f"{verb}_rng_state_all", None) or getattr(module, f"{verb}_rng_state")
