"""Conditions that settings depend on: ``no_effect_unless`` and ``requires`` of a `Setting`."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from groupwise.config.settings import Condition
from groupwise.core import surrogates
from groupwise.core.objectives import OBJECTIVES, Surrogate

if TYPE_CHECKING:
    from groupwise.config.grpo_config import GRPOConfig


def on(name: str) -> Condition:
    """Return the condition that the switch ``name`` is on."""
    return Condition(f"{name}=True", attrgetter(name))


def uses_surrogate(config: GRPOConfig, surrogate: Surrogate) -> bool:
    """Return True if the loss is computed with this surrogate of ``core.surrogates``."""
    return OBJECTIVES[config.loss_type].surrogate is surrogate


def _surrogate(text: str, surrogate: Surrogate) -> Condition:
    """Return the condition that the loss uses ``surrogate``, or a registered one: it may read any field."""
    others = {surrogates.clipped, surrogates.cispo, surrogates.sapo, surrogates.vespo} - {surrogate}
    return Condition(text, lambda c: OBJECTIVES[c.loss_type].surrogate not in others)


CLIPPED_RATIO = _surrogate("loss_type is grpo, bnpo, dr_grpo, dapo or luspo", surrogates.clipped)
SAPO = _surrogate("loss_type='sapo'", surrogates.sapo)
VESPO = _surrogate("loss_type='vespo'", surrogates.vespo)
KL = Condition("beta > 0", lambda c: c.beta > 0)
VLLM = on("use_vllm")
NOT_VLLM = Condition("use_vllm=False", lambda c: not c.use_vllm)
COLOCATE = Condition(
    "use_vllm=True with vllm_mode='colocate'", lambda c: c.use_vllm and c.vllm_mode == "colocate"
)
SERVER = Condition("use_vllm=True with vllm_mode='server'", lambda c: c.use_vllm and c.vllm_mode == "server")
CORRECTION = on("vllm_importance_sampling_correction")
RETRY = Condition("rollout_on_error='retry'", lambda c: c.rollout_on_error == "retry")
CORRECTION_WITHOUT_VLLM = Condition(
    "vllm_importance_sampling_correction=True with use_vllm=False",
    lambda c: c.vllm_importance_sampling_correction and not c.use_vllm,
)
PASS_AT_K = Condition("eval_pass_at_k is set", lambda c: c.eval_pass_at_k is not None)
