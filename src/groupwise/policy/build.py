"""The policy: loaded, changed as the configuration asks, and sped up where it can be."""

from __future__ import annotations

import importlib.util
import inspect
import logging
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import AutoConfig, PreTrainedModel

from groupwise.config.grpo_config import GRPOConfig
from groupwise.cpu import install_cpu_training
from groupwise.errors import ConfigError
from groupwise.policy.loading import apply_peft, cast_head_to_fp32, disable_dropout, load_policy

logger = logging.getLogger(__name__)


def prepare_policy(
    model: str | PreTrainedModel, config: GRPOConfig, quantization_config: Any, peft_config: Any
) -> PreTrainedModel:
    """The policy, loaded and changed as the configuration asks."""
    if config.use_liger_kernel:
        prepare_liger(model, config)
    policy = load_policy(model, config, quantization_config)
    if config.disable_dropout:
        disable_dropout(policy)
    if config.cast_lm_head_to_fp32:
        cast_head_to_fp32(policy)
    keep_weights_trainable_through(policy)
    policy = apply_peft(policy, peft_config)
    if config.gradient_checkpointing and hasattr(policy, "peft_config"):
        # The frozen embedding gives activations without gradients; recomputation would then have none to
        # return.
        policy.enable_input_require_grads()
    return policy


def keep_weights_trainable_through(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from packing 4-bit weights anew when they are first used for sampling on a CPU.

    It does so for good, and through packed weights no gradient flows: adapters would not learn, unnoticed.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def speed_up(models: list[Any], config: GRPOConfig, accelerator: Accelerator) -> None:
    """Install the speed-ups of CPU training, if the run uses a CPU."""
    if accelerator.device.type == "cpu":
        sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        install_cpu_training(
            [model for model in models if model is not None],
            onednn_linears=not sharded and not config.torch_compile,
        )


def prepare_liger(model: str | PreTrainedModel, config: GRPOConfig) -> None:
    """Refuse what Liger's loss cannot do, and say which of its layer kernels ``Trainer`` puts into the model.

    Those are Triton kernels: on other devices than GPUs all of them stay off. So does its cross-entropy,
    which replaces the model's forward.

    Raises:
        ConfigError: liger-kernel is not installed, or the model bounds its logits by a softcap.
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
    if config.device.type == "cuda":
        chosen = {"fused_linear_cross_entropy": False, **(config.liger_kernel_config or {})}
    else:
        if config.liger_kernel_config is not None:
            logger.warning(
                "liger_kernel_config is ignored: Liger's layers need a GPU; its loss is used alone"
            )
        chosen = dict.fromkeys(_liger_switches(), False)
    config.liger_kernel_config = chosen


def text_config(model: str | PreTrainedModel, config: GRPOConfig) -> Any:
    """The configuration of the language model; that of a model given by name is read alone."""
    if not isinstance(model, str):
        return model.config.get_text_config(decoder=True)
    given: Any = config.model_init_kwargs or {}
    options = {"trust_remote_code": config.trust_remote_code, **given}
    known = ("trust_remote_code", "revision", "token", "subfolder", "gguf_file", "cache_dir")
    named = {name: options[name] for name in known if name in options}
    return AutoConfig.from_pretrained(model, **named).get_text_config(decoder=True)


def _liger_switches() -> set[str]:
    """The names of all layer kernels of all architectures."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as functions

    parameters = [p for f in functions.values() for p in inspect.signature(f).parameters.values()]
    return {parameter.name for parameter in parameters if isinstance(parameter.default, bool)}


def router_aux_loss_coef(model: PreTrainedModel, config: GRPOConfig) -> float:
    """Weight of the balancing loss: the configuration's, else the model's; 0 for a dense model.

    Raises:
        ConfigError: a weight was asked for, but the model has no router.
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
