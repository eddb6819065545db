"""Limits of a micro-batch, and the rows that need one."""

from __future__ import annotations

from dataclasses import dataclass

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.objectives import OBJECTIVES


@dataclass(frozen=True)
class MicroBatchBudget:
    """Limits of a micro-batch, and the rows that need one.

    fixed: keep the micro-batches as they are.
    micro_batch_size: configured sequences per micro-batch.
    max_completion_length: configured tokens per completion.
    skip_zero_advantage: skip rows whose loss tokens all have advantage zero; they have no gradient.
    skip_masked: skip rows without loss tokens; they have no gradient.
    world_size: number of ranks that share the rows.
    rank: this rank.
    """

    fixed: bool
    micro_batch_size: int
    max_completion_length: int
    skip_zero_advantage: bool
    skip_masked: bool = True
    world_size: int = 1
    rank: int = 0


def micro_batch_budget(
    trainer: object, config: GRPOConfig, *, aux_loss: bool, has_reference: bool
) -> MicroBatchBudget:
    """Derive the limits of a micro-batch from the configuration.

    Rows with zero advantage are skipped unless they have another gradient: the KL to the reference, an
    entropy bonus, or an objective registered without ``zero_grad_at_zero_advantage``. A loss method of a
    class that does not declare ``zero_grad_at_zero_advantage = True`` may have a gradient in every row, also
    in one without loss tokens.

    Args:
        aux_loss: the model has a balancing loss (mixture of experts).
        has_reference: there is a reference model. β may become positive before the rows of a generation are
            used up, so their log-probs are computed even while it is 0.
    """
    return MicroBatchBudget(
        # Neither a balancing loss nor Liger's normalization is a sum over rows.
        fixed=aux_loss or config.use_liger_kernel,
        micro_batch_size=config.per_device_train_batch_size,
        max_completion_length=config.max_completion_length,
        skip_zero_advantage=not reason_for_all_rows(trainer, config, has_reference=has_reference),
        skip_masked=_declares_zero_grad(trainer),
        world_size=config.world_size,
        rank=config.process_index,
    )


def reason_for_all_rows(trainer: object, config: GRPOConfig, *, has_reference: bool) -> str:
    """Return why rows with zero advantage are computed; "": they are skipped."""
    if not config.skip_zero_advantage:
        return "skip_zero_advantage=False"
    if not _declares_zero_grad(trainer):
        return f"the loss of {type(trainer).__name__} may have a gradient there"
    if not OBJECTIVES[config.loss_type].zero_grad_at_zero_advantage:
        return f"loss_type={config.loss_type!r} may have a gradient there"
    if has_reference and not config.kl_in_reward:
        return "the KL to the reference has a gradient there"
    return "the entropy bonus has a gradient there" if config.has_entropy_bonus else ""


def _declares_zero_grad(trainer: object) -> bool:
    """Return the ``zero_grad_at_zero_advantage`` of what defines the loss, the instance or a class.

    An override may add terms with a gradient in any row, so the declaration of its base class does not count.
    """
    owners = [
        next(owner for owner in (trainer, *type(trainer).__mro__) if method in vars(owner))
        for method in ("compute_loss", "compute_policy_loss")
    ]
    return all(vars(owner).get("zero_grad_at_zero_advantage", False) for owner in owners)
