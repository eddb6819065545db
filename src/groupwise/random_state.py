"""Random numbers of a run: the generator of samples, and two streams of the global generators."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import set_seed
from torch.overrides import TorchFunctionMode

from groupwise.records.serialization import NotSaved

if TYPE_CHECKING:
    from transformers import TrainingArguments

#: Distance of the seed of the user's functions from the seed of the rank.
_USER_SEED = 1_000_003


class RandomState:
    """Random numbers of this rank: the generator of samples, and two streams of torch's global generators.

    Samples come from ``generator``, so that no thread of the user changes them. Dropout draws from the stream
    of the run. Reward functions, tools and environments draw from and seed a second stream. ``Trainer`` saves
    and restores the stream of the run; the snapshot of a checkpoint has the others.

    Args:
        device: that of the sampler.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._in_user_code = False
        self._unused = _torch_state()  # of the stream that is not in the global generators
        try:
            self.generator: torch.Generator | None = torch.Generator(device)
        except NotImplementedError:  # of a device without generators: samples share torch's global one
            self.generator = None

    def seed(self, seed: int) -> None:
        """Seed the samples, and the stream of the user's functions.

        Args:
            seed: of this rank.
        """
        if self.generator is not None:
            self.generator.manual_seed(seed)
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
        """Return the states of the generator and of both streams."""
        states = {"run": NotSaved(get_state()), "user_code": self._unused}
        return {**states, "samples": None if self.generator is None else self.generator.get_state()}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Restore the generator and the streams, that of the run unless ``Trainer`` does."""
        self._unused = snapshot["user_code"]
        if self.generator is not None:
            self.generator.set_state(snapshot["samples"])
        if snapshot["run"] is not None:  # of a mark, not of a checkpoint
            set_state(snapshot["run"].value)

    def merge(self, snapshots: Sequence[dict[str, Any]], args: TrainingArguments) -> dict[str, Any]:
        """Seed all streams of this rank from the one that user code on the first rank had reached."""
        reached = torch.Generator()
        reached.set_state(snapshots[0]["user_code"][0])
        seed = int(torch.randint(2**31, (), generator=reached)) + args.process_index
        set_seed(seed)
        self.seed(seed)
        return self.snapshot()


class DrawnFrom(TorchFunctionMode):
    """Context manager in which ``torch.multinomial`` draws from ``generator``, in this thread.

    For decoding loops that take no generator; other threads may draw and seed meanwhile.

    Args:
        generator: random numbers of all rows; or an object that samples a token per row from probabilities.
    """

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.multinomial, torch.Tensor.multinomial):
            if not isinstance(self.generator, torch.Generator):
                return self._sample(*args, **(kwargs or {}))
            kwargs = {"generator": self.generator, **(kwargs or {})}
        return func(*args, **(kwargs or {}))

    def _sample(self, probabilities_RV: torch.Tensor, num_samples: int, **others: Any) -> torch.Tensor:
        """Sample without replacement, one token of each row after the other: (R, num_samples)."""
        # A tiny probability is drawn where no other token is left: beams of a truncated distribution.
        left_RV, drawn = probabilities_RV.clamp(min=torch.finfo(probabilities_RV.dtype).tiny), []
        for _ in range(num_samples):
            drawn.append(self.generator.sample(left_RV).unsqueeze(1))
            left_RV = left_RV.scatter(1, drawn[-1], 0.0)
        return torch.cat(drawn, dim=1)


def derived_seed(*parts: object) -> int:
    """Return a seed that depends on all parts: 62 bits, so that with a row added it is a signed integer."""
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") >> 2


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
