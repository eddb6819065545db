"""Set-up of the policy: loading, log-prob computation, losses and checks."""

from __future__ import annotations

import importlib.util
import logging
from functools import partial
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from groupwise.compat.bitsandbytes import disable_cpu_packing
from groupwise.compat.versions import check_version
from groupwise.config.grpo_config import GRPOConfig
from groupwise.cpu import install_cpu_training
from groupwise.distributed import any_rank, is_sharded
from groupwise.errors import ConfigError
from groupwise.policy.heads import LogprobHead
from groupwise.policy.introspection import adapter_type, adapters_of, has_adapter, text_config
from groupwise.policy.loading import apply_peft, cast_head_to_fp32, disable_dropout, load_policy
from groupwise.policy.logprob_mismatch import LogprobMismatchCheck, LogprobMismatchSettings
from groupwise.policy.logprobs import LogprobComputer, choose_layout
from groupwise.policy.quantization import check_quantization

if TYPE_CHECKING:
    from peft import PeftConfig

#: The first version whose loss has the arguments that ``LigerLoss`` passes; the extra in pyproject.toml.
_OLDEST_LIGER = "0.8.1"

logger = logging.getLogger(__name__)


def prepare_policy(
    model: str | PreTrainedModel,
    config: GRPOConfig,
    quantization_config: QuantizationConfigMixin | None,
    peft_config: PeftConfig | None,
) -> PreTrainedModel:
    """Load the policy and apply the settings of dropout, head precision, adapter and gradient checkpointing.

    Args:
        model: Hub id, directory or a loaded model, which is changed in place.
        config: settings of the run.
        quantization_config, peft_config: as in transformers and PEFT.

    Raises:
        ConfigError: the settings, the model and the adapter do not fit together.
    """
    if config.use_liger_kernel:
        check_liger(model, config, peft_config)
    check_quantization(model, config, quantization_config, peft_config)
    policy = load_policy(model, config, quantization_config)
    if config.disable_dropout:
        disable_dropout(policy)
    if config.cast_lm_head_to_fp32:
        cast_head_to_fp32(policy)
    keep_weights_trainable_through(policy)
    policy = apply_peft(policy, peft_config)
    check_prefix_tuning(policy, config)
    if config.gradient_checkpointing and has_adapter(policy):
        # Embeddings are frozen: without a gradient at its inputs, checkpointing computes no gradients.
        policy.enable_input_require_grads()
    return policy


def check_prefix_tuning(policy: PreTrainedModel, config: GRPOConfig) -> None:
    """Refuse gradient checkpointing with an adapter whose virtual tokens are a key-value cache.

    Raises:
        ConfigError: transformers would drop the cache, and with it the adapter.
    """
    cached = ("PREFIX_TUNING", "CARTRIDGE")
    kinds = [adapter_type(adapter) for adapter in adapters_of(policy)]
    if config.gradient_checkpointing and any(kind in cached for kind in kinds):
        raise ConfigError(
            f"the adapter ({', '.join(kinds)}) is a cache of keys and values, which gradient checkpointing "
            "drops; set gradient_checkpointing=False"
        )


def keep_weights_trainable_through(model: PreTrainedModel) -> None:
    """Stop bitsandbytes from repacking 4-bit weights at their first use for sampling on a CPU.

    Repacked weights propagate no gradient, and adapters would silently not train. Those that an earlier
    forward repacked are unpacked, with a warning.
    """
    unpacked = [disable_cpu_packing(module) for module in model.modules()]
    if any(unpacked):
        logger.warning(
            "%d 4-bit layers were repacked by bitsandbytes in an earlier forward. They were unpacked; "
            "their scales are rounded. Load the model anew to train on exactly its weights.",
            sum(unpacked),
        )


def speed_up(models: list[nn.Module | None], config: GRPOConfig, accelerator: Accelerator) -> None:
    """Install the CPU speed-ups of training in `models`, if the run uses a CPU."""
    if accelerator.device.type == "cpu":
        install_cpu_training(
            [model for model in models if model is not None],
            onednn_linears=not is_sharded(accelerator) and not config.torch_compile,
        )


def check_liger(
    model: str | PreTrainedModel, config: GRPOConfig, peft_config: PeftConfig | None = None
) -> None:
    """Check that Liger's loss supports the model and its adapter.

    Raises:
        ConfigError: liger-kernel is not installed or too old, the model bounds its logits by a softcap, or an
            adapter adds virtual tokens.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError(
            "use_liger_kernel=True needs liger-kernel, which is not installed; install groupwise[liger], or "
            "set use_liger_kernel=False"
        )
    softcap = getattr(text_config(model, config), "final_logit_softcapping", None)
    if softcap is not None:
        raise ConfigError(
            f"use_liger_kernel=True, but the model bounds its logits (final_logit_softcapping={softcap}), "
            "which Liger's loss does not; set use_liger_kernel=False"
        )
    for adapter in adapters_of(model, peft_config):
        if adapter.is_prompt_learning:
            raise ConfigError(
                f"use_liger_kernel=True with a {type(adapter).__name__}, whose virtual tokens Liger's fused "
                "loss would count as tokens of the prompt; set use_liger_kernel=False, or use LoRA"
            )
    check_version(
        "liger-kernel",
        _OLDEST_LIGER,
        "use_liger_kernel=True",
        "whose loss lacks arguments; upgrade it, or set use_liger_kernel=False",
    )


def router_aux_loss_coef(model: PreTrainedModel, config: GRPOConfig) -> float:
    """Return the weight of the balancing loss: the setting, else the model's default; 0 for a dense model.

    Raises:
        ConfigError: the setting is not zero, but the model has no expert router.
    """
    own = getattr(model.config.get_text_config(), "router_aux_loss_coef", None)
    if config.router_aux_loss_coef is None:
        return float(own or 0.0)
    if own is None and config.router_aux_loss_coef != 0.0:
        raise ConfigError(
            f"router_aux_loss_coef={config.router_aux_loss_coef}, but {type(model).__name__} has no expert "
            "router; leave it at None"
        )
    return config.router_aux_loss_coef


def make_logprob_computer(
    policy: PreTrainedModel, config: GRPOConfig, accelerator: Accelerator
) -> LogprobComputer:
    """Build the log-prob computer with the configured layout and head."""
    # NEFTune scales its noise by the length of a row: that of a sequence in the padded layout alone.
    only_padded = config.use_liger_kernel or config.neftune_noise_alpha is not None
    layout = choose_layout(
        "padded" if only_padded else config.sequence_layout,
        policy,
        group_size=config.num_generations,
        with_aux_loss=router_aux_loss_coef(policy, config) != 0.0,
    )
    head = LogprobHead(
        "chunked" if config.logprob_head == "auto" else config.logprob_head,
        fp32=config.cast_lm_head_to_fp32,
    )

    return LogprobComputer(
        layout,
        head,
        partial(any_rank, accelerator),
        sharded=is_sharded(accelerator),
        mixed_precision=_mixed_precision(accelerator),
    )


def make_logprob_mismatch_check(
    logprob_computer: LogprobComputer, config: GRPOConfig, accelerator: Accelerator
) -> LogprobMismatchCheck:
    """Build the comparison of the sampler's log-probs with the trainer's."""
    settings = LogprobMismatchSettings(config.logprob_mismatch_check, config.logprob_mismatch_steps)

    def sum_over_ranks(total: torch.Tensor) -> torch.Tensor:
        return accelerator.reduce(total, "sum")

    return LogprobMismatchCheck(
        settings, logprob_computer.head, sum_over_ranks, _mixed_precision(accelerator)
    )


def _mixed_precision(accelerator: Accelerator) -> torch.dtype | None:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
