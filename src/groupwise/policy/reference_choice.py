"""Choice of the reference policy: none, a copy, or with an adapter the policy's own weights without it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from groupwise.config.grpo_config import GRPOConfig
from groupwise.errors import ConfigError, boundary
from groupwise.policy.introspection import changes_base, evaluation_mode, has_adapter
from groupwise.policy.reference import Reference, SeparateReference

if TYPE_CHECKING:
    from peft import PeftModel


@contextmanager
def _keeping_trainability(policy: nn.Module) -> Iterator[None]:
    """Context manager around PEFT's switches of adapters, which set ``requires_grad`` of whole adapters."""
    flags = [(parameter, parameter.requires_grad) for parameter in policy.parameters()]
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


class DisabledAdapter(Reference):
    """Base model of a policy whose adapter changes nothing at its start: the policy with it disabled."""

    @contextmanager
    def scoring(self, policy: nn.Module) -> Iterator[nn.Module]:
        with _keeping_trainability(policy), cast("PeftModel", policy).disable_adapter():
            yield policy


class FrozenAdapter(Reference):
    """Frozen copy of the initial adapter, added to the policy under the name ``reference``.

    Raises:
        ConfigError: PEFT supports no second adapter of this kind.
    """

    name = "reference"

    def __init__(self, policy: PeftModel) -> None:
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        self.trained = policy.active_adapter
        settings: Any = copy.copy(policy.peft_config[self.trained])
        settings.inference_mode = True  # of virtual tokens, only the output of the encoder is copied
        if changes_base(settings):
            settings.init_lora_weights = True  # the base is changed once
        start = get_peft_model_state_dict(policy, adapter_name=self.trained)
        with _keeping_trainability(policy), boundary(ConfigError, "PEFT's copy of the adapter for beta > 0"):
            if self.name not in policy.peft_config:
                policy.add_adapter(self.name, settings)
            set_peft_model_state_dict(policy, start, adapter_name=self.name)
            policy.set_adapter(self.trained)
        for name, parameter in policy.named_parameters():
            if f".{self.name}" in name:
                parameter.requires_grad_(False)

    @contextmanager
    def scoring(self, policy: nn.Module) -> Iterator[nn.Module]:
        adapters = cast("PeftModel", policy)
        with _keeping_trainability(policy):
            adapters.set_adapter(self.name)
            try:
                yield policy
            finally:
                adapters.set_adapter(self.trained)


def make_reference(policy: PreTrainedModel, config: GRPOConfig, *, fresh_adapter: bool) -> Reference:
    """Build the reference policy; without KL term (``beta=0``) it has no model.

    Args:
        fresh_adapter: the adapter was attached to the policy just now.

    Raises:
        ConfigError: ``sync_ref_model=True`` with a PEFT policy.
    """
    if config.beta == 0.0:
        return Reference()
    if not has_adapter(policy):
        return SeparateReference(copy.deepcopy(policy))
    if config.sync_ref_model:
        raise ConfigError(
            "sync_ref_model=True needs a separate reference model, but the reference of a PEFT policy is its "
            "own base weights; set sync_ref_model=False or train without an adapter"
        )
    adapters = cast("PeftModel", policy)
    unchanged = _changes_nothing(adapters, fresh_adapter) or (fresh_adapter and _starts_at_base(adapters))
    return DisabledAdapter() if unchanged else FrozenAdapter(adapters)


def _starts_at_base(policy: PeftModel) -> bool:
    """Return True if a new adapter, of any kind, leaves the logits of a few tokens as they are without it.

    False for PiSSA and kin, which change the base weights, and for weights that are on no device (ZeRO-3).
    """
    if any(parameter.numel() == 0 or parameter.is_meta for parameter in policy.parameters()):
        return False
    ids_BS = torch.arange(1, 9, device=policy.device)[None]
    with torch.no_grad(), evaluation_mode(policy), _keeping_trainability(policy):
        logits_BSV = policy(input_ids=ids_BS).logits[:, -8:]  # virtual tokens have logits, too
        with policy.disable_adapter():
            difference_BSV = policy(input_ids=ids_BS).logits - logits_BSV
    return bool(difference_BSV.abs().max() <= 1e-5 * logits_BSV.abs().max())


def _changes_nothing(policy: PeftModel, fresh: bool) -> bool:
    """Return True if the active adapter is a LoRA adapter whose products B·A are zero, as at its start.

    False for older adapters that train other weights too, and for weights that are not on this rank (ZeRO-3).
    """
    settings: Any = policy.peft_config[policy.active_adapter]
    others = ("modules_to_save", "trainable_token_indices")
    if (
        settings.peft_type != "LORA"
        or changes_base(settings)
        or (not fresh and (settings.bias != "none" or any(getattr(settings, o, None) for o in others)))
    ):
        return False
    # One factor of each product starts at zero: B of linear layers and experts, A of embeddings.
    zeros = [
        parameter
        for name, parameter in policy.named_parameters()
        if (".lora_B." in name or ".lora_embedding_A." in name) and f".{policy.active_adapter}" in name
    ]
    return bool(zeros) and all(factor.numel() > 0 and not factor.any() for factor in zeros)
