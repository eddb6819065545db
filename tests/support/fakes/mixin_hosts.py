"""Attributes of a trainer that a mixin uses, without a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from support.configs import config_of


class Ranks:
    """An accelerator of one of two ranks; the other rank contributes fixed values.

    Args:
        others: the other rank's contributions to ``reduce`` and ``gather``, call by call.
    """

    device = torch.device("cpu")
    num_processes = 2

    def __init__(self, others: Sequence[Any] = (), rank: int = 0) -> None:
        self.others, self.process_index = list(others), rank

    def reduce(self, local: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        return local + torch.tensor(self.others.pop(0))

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        parts = [local, torch.tensor(self.others.pop(0))]
        return torch.cat(parts if self.process_index == 0 else parts[::-1])

    def pad_across_processes(self, local: torch.Tensor, pad_index: float) -> torch.Tensor:
        further_axes = [0, 0] * (local.dim() - 1)
        return torch.nn.functional.pad(local, [*further_axes, 0, 2], value=pad_index)


def host(mixin: type, accelerator: Any = None, *, settings: dict[str, Any], **attributes: Any) -> Any:
    """An instance of ``mixin`` with the given settings and attributes."""
    made = mixin()
    made.args = config_of(**settings)
    made.accelerator = accelerator
    for name, value in attributes.items():
        setattr(made, name, value)
    return made
