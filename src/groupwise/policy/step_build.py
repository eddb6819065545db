"""What a step computes with: the scorer, the parity gate and the way a window is cut."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import PreTrainedModel

from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import truncating
from groupwise.policy.build import router_aux_loss_coef
from groupwise.policy.layouts import HeadSettings
from groupwise.policy.logprob_mismatch import LogprobMismatchCheck, LogprobMismatchSettings
from groupwise.policy.logprobs import LogprobComputer, choose_layout


def make_logprob_computer(
    policy: PreTrainedModel, config: GRPOConfig, accelerator: Accelerator
) -> LogprobComputer:
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
    return LogprobComputer(
        layout, head, agree, sharded=sharded, mixed_precision=_mixed_precision(accelerator)
    )


def _mixed_precision(accelerator: Accelerator) -> torch.dtype | None:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)


def make_logprob_mismatch_check(
    scorer: LogprobComputer, config: GRPOConfig, accelerator: Accelerator, processing_class: Any
) -> LogprobMismatchCheck:
    """What compares the sampler's log-probs with the trainer's."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    settings = LogprobMismatchSettings(
        action=config.logprob_mismatch_check,
        every=config.logprob_mismatch_steps,
        prepended=tokenizer.bos_token_id,
        truncating=truncating(config),
    )

    def over_ranks(total: torch.Tensor) -> torch.Tensor:
        return accelerator.reduce(total, "sum")

    return LogprobMismatchCheck(settings, scorer.head, over_ranks, _mixed_precision(accelerator))
