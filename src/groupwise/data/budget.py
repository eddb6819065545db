"""Limits of a micro-batch under a configuration."""

from __future__ import annotations

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.objectives import OBJECTIVES
from groupwise.data.rebalancing import MicroBatchBudget

_LOSS_VERBS = ("compute_loss", "compute_policy_loss")
_OUR_LOSS = ("groupwise.trainer", "groupwise.mixins.loss")


def micro_batch_budget(trainer: type, config: GRPOConfig, *, aux_loss: bool) -> MicroBatchBudget:
    """Derive the limits of a micro-batch from the configuration.

    Rows with zero advantage are skipped unless they have another gradient: the KL to the reference, an
    entropy bonus, an objective without ``zero_grad_at_zero_advantage``, or the loss of a subclass.

    Args:
        trainer: class of the trainer.
        aux_loss: the model has a balancing loss (mixture of experts).
    """
    kl_in_loss = config.beta != 0.0 and not config.kl_in_reward
    bonus = config.use_adaptive_entropy or config.entropy_coef != 0.0
    # A subclass may have added terms of its own to either verb.
    own_loss = any(getattr(trainer, verb).__module__ not in _OUR_LOSS for verb in _LOSS_VERBS)
    flat = OBJECTIVES[config.loss_type].zero_grad_at_zero_advantage and not own_loss
    return MicroBatchBudget(
        # Neither a balancing loss nor Liger's normalisation is a sum over rows.
        fixed=aux_loss or config.use_liger_kernel,
        micro_batch_size=config.per_device_train_batch_size,
        max_completion_length=config.max_completion_length,
        skip_zero_advantage=config.skip_zero_advantage and flat and not kl_in_loss and not bonus,
        world_size=config.world_size,
        rank=config.process_index,
    )
