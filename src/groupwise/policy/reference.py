"""Reference policy of the KL term."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from transformers import PreTrainedModel

from groupwise.policy.weight_iterator import gathering, whole_tensor


class Reference:
    """Reference policy of the KL term. This base class has none (``beta=0``).

    model: weights of its own, prepared by the trainer; None if the reference shares the policy's.
    """

    model: PreTrainedModel | None = None

    @property
    def exists(self) -> bool:
        """True if there is a reference policy."""
        return type(self) is not Reference

    def scoring(self, policy: nn.Module) -> AbstractContextManager[nn.Module | None]:
        """Context manager that yields the model which computes reference log-probs, or None."""
        return nullcontext(None)

    def mix(self, policy: nn.Module, alpha: float) -> None:
        """Update the reference: π_ref ← α π_θ + (1 − α) π_ref (TR-DPO, arXiv 2404.09656, eq. 3)."""


class SeparateReference(Reference):
    """Frozen model: a copy of the whole policy, or a model that a script assigned."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval().requires_grad_(False)

    def scoring(self, policy: nn.Module) -> AbstractContextManager[nn.Module | None]:
        return nullcontext(self.model)

    @torch.no_grad()
    def mix(self, policy: nn.Module, alpha: float) -> None:
        assert self.model is not None
        for ours, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            with gathering([theirs]):  # of a sharded policy, one after the other on all ranks
                ours.lerp_(whole_tensor(theirs).to(ours), alpha)
