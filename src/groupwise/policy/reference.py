"""The frozen policy that the KL term is measured against."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from groupwise.errors import ConfigError


class Reference:
    """What to measure the KL against; this one is nothing at all."""

    model: PreTrainedModel | None = None

    def scoring(self, policy: nn.Module) -> Any:
        """A context that yields the model to score with, or None."""
        return nullcontext(None)

    def mix(self, policy: nn.Module, alpha: float) -> None:
        """π_ref ← α π_θ + (1 − α) π_ref (TR-DPO, eq. 3)."""

    def complete_load(self, policy: nn.Module, directory: str) -> None:
        """Load what ``Trainer`` leaves out when it loads the policy from a checkpoint."""


class SeparateReference(Reference):
    """A frozen copy of the whole policy."""

    def __init__(self, policy: PreTrainedModel) -> None:
        self.model = copy.deepcopy(policy).eval().requires_grad_(False)

    def scoring(self, policy: nn.Module) -> Any:
        return nullcontext(self.model)

    @torch.no_grad()
    def mix(self, policy: nn.Module, alpha: float) -> None:
        assert self.model is not None
        for ours, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            ours.lerp_(theirs.to(ours), alpha)


class DisabledAdapter(Reference):
    """The base model below a fresh adapter."""

    @contextmanager
    def scoring(self, policy: Any) -> Iterator[nn.Module]:
        with policy.disable_adapter():
            yield policy


class FrozenAdapter(Reference):
    """A frozen copy of the adapter the run started from, beside the one that trains."""

    name = "reference"

    def __init__(self, policy: Any) -> None:
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        self.trained = policy.active_adapter
        start = get_peft_model_state_dict(policy, adapter_name=self.trained)
        if self.name not in policy.peft_config:
            policy.add_adapter(self.name, policy.peft_config[self.trained])
        set_peft_model_state_dict(policy, start, adapter_name=self.name)
        policy.set_adapter(self.trained)

    @contextmanager
    def scoring(self, policy: Any) -> Iterator[nn.Module]:
        # Switching adapters switches requires_grad as well; the trained one gets it back below.
        policy.set_adapter(self.name)
        try:
            yield policy
        finally:
            policy.set_adapter(self.trained)

    def complete_load(self, policy: Any, directory: str) -> None:
        # Of several adapters Trainer loads those in directories of their own; the default one lies at the
        # top.
        if self.trained == "default":
            policy.load_adapter(directory, self.trained, is_trainable=True)


def make_reference(policy: PreTrainedModel, config: Any, *, fresh_adapter: bool) -> Reference:
    """The reference that ``beta`` and the adapters call for; none when beta is 0."""
    if config.beta == 0.0:
        return Reference()
    if not hasattr(policy, "peft_config"):
        return SeparateReference(policy)
    if config.sync_ref_model:
        raise ConfigError(
            "sync_ref_model=True needs a reference model of its own, but a PEFT policy uses its own base "
            "weights as "
            "the reference; set sync_ref_model=False or train without an adapter"
        )
    return DisabledAdapter() if fresh_adapter else FrozenAdapter(policy)
