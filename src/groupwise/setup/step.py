"""What a step computes with: the scorer, the parity gate and the way a window is cut."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import PreTrainedModel

from groupwise.config import GRPOConfig
from groupwise.core.objectives import OBJECTIVES
from groupwise.layout import HeadSettings, TokenScorer, choose_layout
from groupwise.parity import ParityGate, ParitySettings
from groupwise.setup.backend import truncating
from groupwise.setup.policy import router_aux_loss_coef
from groupwise.window import Cut


def make_scorer(policy: PreTrainedModel, config: GRPOConfig, accelerator: Accelerator) -> TokenScorer:
    """What computes log-probs, in the layout and with the output head that the configuration asks for."""
    layout = choose_layout(
        "padded" if config.use_liger_kernel else config.sequence_layout,
        policy,
        group_size=config.num_generations,
        with_aux_loss=router_aux_loss_coef(policy, config) != 0.0,
    )
    head = HeadSettings(
        "chunked" if config.logprob_head == "auto" else config.logprob_head,
        config.temperature,
        config.cast_lm_head_to_fp32,
    )

    def agree(here: bool) -> bool:
        disagreeing = torch.tensor(int(not here), device=accelerator.device)
        return accelerator.reduce(disagreeing, "sum").item() == 0

    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    return TokenScorer(layout, head, agree, sharded=sharded, mixed_precision=_mixed_precision(accelerator))


def _mixed_precision(accelerator: Accelerator) -> torch.dtype | None:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)


def make_parity_gate(
    scorer: TokenScorer, config: GRPOConfig, accelerator: Accelerator, processing_class: Any
) -> ParityGate:
    """What compares the sampler's log-probs with the trainer's."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    settings = ParitySettings(
        action=config.sampler_parity,
        every=config.sampler_parity_steps,
        prepended=tokenizer.bos_token_id,
        truncating=truncating(config),
    )

    def over_ranks(total: torch.Tensor) -> torch.Tensor:
        return accelerator.reduce(total, "sum")

    return ParityGate(settings, scorer.head, over_ranks, _mixed_precision(accelerator))


_LOSS_VERBS = ("compute_loss", "evaluate_objective")
_OUR_LOSS = ("groupwise.trainer", "groupwise.mixins.loss")


def window_cut(trainer: type, config: GRPOConfig, *, aux_loss: bool) -> Cut:
    """How an accumulation window may be cut under this configuration.

    Rows with zero advantage are skipped unless something else has a gradient there: the KL to the reference,
    an entropy bonus, an objective that does not promise to be flat, or one of a subclass.
    """
    kl_in_loss = config.beta != 0.0 and not config.kl_in_reward
    bonus = config.use_adaptive_entropy or config.entropy_coef != 0.0
    # A subclass may have added terms of its own to either.
    own_loss = any(getattr(trainer, verb).__module__ not in _OUR_LOSS for verb in _LOSS_VERBS)
    flat = OBJECTIVES[config.loss_type].flat_without_advantage and not own_loss
    return Cut(
        # Neither a balancing loss nor Liger's normalisation is a sum over rows.
        fixed=aux_loss or config.use_liger_kernel,
        rows=config.per_device_train_batch_size,
        completion_length=config.max_completion_length,
        skip_zero_advantage=config.skip_zero_advantage and flat and not kl_in_loss and not bonus,
        ranks=config.world_size,
        rank=config.process_index,
    )
