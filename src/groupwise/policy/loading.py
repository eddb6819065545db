"""Loading of the policy and its tokenizer, and preparation of the model for training."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from groupwise.compat.accelerate import without_buffer_broadcast
from groupwise.compat.transformers import keep_undivided_layers
from groupwise.config.grpo_config import GRPOConfig
from groupwise.distributed import is_sharded
from groupwise.errors import ConfigError, boundary, nearest_name
from groupwise.policy.heads.weights import check_head, output_head
from groupwise.policy.introspection import (
    adapter_type,
    adapters_of,
    changes_base,
    evaluation_mode,
    has_adapter,
    load_config,
)
from groupwise.policy.quantization import check_quantized, keep_4bit_weights_unpacked, quantization_of
from groupwise.tokenization.images import image_token_id, is_processor
from groupwise.tokenization.text import ProcessingClass, set_pad_token, text_tokenizer

if TYPE_CHECKING:
    from peft import PeftConfig

logger = logging.getLogger(__name__)

#: Names of one field before transformers 5.24 and since.
_CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
#: Noise in the inputs of routers. PhiMoE's ``router_jitter_noise`` is no noise: evaluation uses it too.
_JITTERS = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")
_DTYPES = ("bfloat16", "float16", "float32")

#: Architectures without image tokens in the prompt, and where they put images instead.
_IMAGES_OUTSIDE_THE_PROMPT = {
    "mllama": "its language model attends to images through separate cross-attention layers",
    "instructblip": "its images become queries in front of the prompt",
    "blip-2": "its images become queries in front of the prompt",
    "git": "its images become embeddings in front of the prompt",
}


def check_loading(
    model: str | PreTrainedModel,
    config: GRPOConfig,
    quantization_config: QuantizationConfigMixin | None,
    peft_config: PeftConfig | None,
) -> None:
    """Check the trainer's arguments against the configuration of the policy, before its weights are loaded.

    Raises:
        ConfigError: the settings, the model, its quantization and the adapter do not fit together.
    """
    if config.use_liger_kernel:
        from groupwise.policy.liger import check_liger

        check_liger(model, config, peft_config)
    if quantization := quantization_of(model, config, quantization_config):
        check_quantized(quantization, adapters_of(model, peft_config), use_vllm=config.use_vllm)
    if peft_config is not None:
        _check_targets(model, config, peft_config)


def prepare_policy(
    model: str | PreTrainedModel,
    config: GRPOConfig,
    quantization_config: QuantizationConfigMixin | None,
    peft_config: PeftConfig | None,
) -> PreTrainedModel:
    """Load the policy and apply the settings of dropout, head precision, adapter and gradient checkpointing.

    Args:
        model: Hub id, directory or a loaded model, which is changed in place.

    Raises:
        ConfigError: the settings, the model and the adapter do not fit together.
    """
    policy = load_policy(model, config, quantization_config)
    if "groupwise.policy.frozen_weights" in sys.modules:  # of an earlier run
        sys.modules["groupwise.policy.frozen_weights"].restore_float32(policy)
    if config.cast_lm_head_to_fp32:
        cast_head_to_fp32(policy)
    _check_checkpointing(policy, config)
    keep_4bit_weights_unpacked(policy)
    make_generation_config_savable(policy)
    keep_undivided_layers(policy)
    policy = apply_peft(policy, peft_config)
    if config.disable_dropout:
        disable_dropout(policy)  # that of the adapter, too
    if has_adapter(policy) and not any(parameter.requires_grad for parameter in policy.parameters()):
        raise ConfigError(
            f"the adapters of the PeftModel ({', '.join(policy.peft_config)}) are frozen: training would "
            "change nothing; load them with PeftModel.from_pretrained(base, directory, is_trainable=True)"
        )
    kinds = [adapter_type(adapter) for adapter in adapters_of(policy)]
    if any(map(changes_base, adapters_of(policy))):
        logger.warning(
            "attaching the adapter changed the base weights (init_lora_weights), and what is saved is an "
            "adapter of these: PEFT computes them again when it loads PiSSA, OLoRA or LoftQ onto the same "
            "model, but not CorDA (an error) and LoRA-GA (another policy); for these and for other programs, "
            "save trainer.model.merge_and_unload()"
        )
    if "PVERA" in kinds:
        raise ConfigError(
            "PVeRA samples the weights of its adapter in every forward pass of training, and ratios and KL "
            "would be those of the noise; use VeRA (VeraConfig)"
        )
    if config.gradient_checkpointing and {"PREFIX_TUNING", "CARTRIDGE"}.intersection(kinds):
        raise ConfigError(
            f"the adapter ({', '.join(kinds)}) is a cache of keys and values, which gradient checkpointing "
            "drops; set gradient_checkpointing=False"
        )
    shared_layers = getattr(policy.config.get_text_config(decoder=True), "num_kv_shared_layers", 0)
    if shared_layers and uses_reentrant_checkpoints(config):
        raise ConfigError(
            f"{shared_layers} layers of the model use the keys of earlier ones, which gradient checkpoints "
            "with use_reentrant=True detach, so that their gradients would be lost; set "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
        )
    if config.gradient_checkpointing and has_adapter(policy):
        # Embeddings are frozen: without a gradient at its inputs, checkpointing computes no gradients.
        policy.enable_input_require_grads()
    return policy


def load_policy(
    model: str | PreTrainedModel,
    config: GRPOConfig,
    quantization_config: QuantizationConfigMixin | None = None,
) -> PreTrainedModel:
    """Load the policy from a Hub id or directory; return a model object unchanged, without loading options.

    The default dtype is float32, since half precision would round small updates to zero.

    Raises:
        ConfigError: an unknown dtype.
    """
    options = dict(cast(dict[str, Any], config.model_init_kwargs or {}))
    if not isinstance(model, str):
        for name, given in (("model_init_kwargs", options), ("quantization_config", quantization_config)):
            if given:
                logger.warning(
                    "%s has no effect: the model is a loaded %s; pass its name to load it with these options",
                    name,
                    type(model).__name__,
                )
        return model
    options["dtype"] = _dtype(options)
    options.pop("torch_dtype", None)
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    options.setdefault("trust_remote_code", config.trust_remote_code)
    return auto_class(load_config(model, config)).from_pretrained(model, **options)


def shapes_of_policy(
    model: str, config: GRPOConfig, peft_config: PeftConfig | None = None
) -> PreTrainedModel:
    """Return the policy with its adapter on the meta device: names, shapes and dtypes without memory."""
    of_model, dtype = load_config(model, config), _dtype(cast(dict[str, Any], config.model_init_kwargs or {}))
    dtype = of_model.dtype or torch.float32 if dtype == "auto" else dtype
    with torch.device("meta"):
        policy = auto_class(of_model).from_config(
            of_model, dtype=dtype, trust_remote_code=config.trust_remote_code
        )
        return apply_peft(policy, peft_config)


def _dtype(options: Mapping[str, Any]) -> torch.dtype | str:
    given = options.get("dtype") or options.get("torch_dtype") or torch.float32
    name = str(given).removeprefix("torch.")
    dtype = name if name == "auto" else getattr(torch, name, None)
    if dtype != "auto" and not isinstance(dtype, torch.dtype):
        known = [*_DTYPES, "auto"]
        nearest = nearest_name(name, known)
        raise ConfigError(
            f"model_init_kwargs has dtype={given!r}; allowed: {', '.join(known)}; nearest valid: {nearest!r}"
        )
    return dtype


def auto_class(
    config: PretrainedConfig,
) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """Return the auto class of a checkpoint, which includes the vision part if the checkpoint has one."""
    # A checkpoint of the language part alone has another architecture in its config.
    kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if kind is None or (config.architectures and kind.__name__ not in config.architectures):
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def load_processing_class(
    processing_class: ProcessingClass | None, model: str | PreTrainedModel, config: GRPOConfig
) -> ProcessingClass:
    """Return `processing_class`, by default loaded from the model's name with left padding.

    Sets a missing pad token to the EOS token.

    Raises:
        ConfigError: `processing_class` is None and the model has no name, or it has no token for padding.
    """
    if processing_class is None:
        name = model if isinstance(model, str) else model.config.name_or_path
        if not name:
            raise ConfigError(
                f"processing_class is missing, and the {type(model).__name__} has no name or path to load it "
                "from; pass the tokenizer or processor as processing_class"
            )
        if isinstance(model, str):
            load_config(model, config)  # its error is about the id, not about a file of the tokenizer
        with boundary(ConfigError, f"the tokenizer of {name!r}"):
            processing_class = AutoProcessor.from_pretrained(name, trust_remote_code=config.trust_remote_code)
        tokenizer = text_tokenizer(processing_class)
        # Scripts pad prompts for sampling with it; BaseTrainer saves it with the side of the model.
        tokenizer.saved_padding_side, tokenizer.padding_side = tokenizer.padding_side, "left"
    set_pad_token(text_tokenizer(processing_class), "the policy")
    return processing_class


def check_image_model(policy: PreTrainedModel, processing_class: ProcessingClass) -> None:
    """Refuse a processor with a model that has no image tokens in its prompts.

    Raises:
        ConfigError: naming where the model puts images, or the missing token.
    """
    if not is_processor(processing_class):
        return
    model_type, model = policy.config.model_type, type(policy).__name__
    if policy.config.is_encoder_decoder or model_type in _IMAGES_OUTSIDE_THE_PROMPT:
        reason = _IMAGES_OUTSIDE_THE_PROMPT.get(model_type, "it is an encoder-decoder")
        raise ConfigError(
            f"{model} cannot be trained on images: {reason}; choose a model whose images are tokens of the "
            "prompt, such as Qwen-VL, Gemma 3, SmolVLM or LLaVA"
        )
    if image_token_id(policy.config) is None:
        raise ConfigError(
            f"processing_class is a {type(processing_class).__name__}, but the config of {model} names "
            "no image token (image_token_id); pass the tokenizer alone to train on text"
        )


def uses_reentrant_checkpoints(config: GRPOConfig) -> bool:
    """Return True if gradient checkpoints recompute in a backward pass of their own."""
    kwargs = config.gradient_checkpointing_kwargs
    return bool(config.gradient_checkpointing and isinstance(kwargs, dict) and kwargs.get("use_reentrant"))


def set_ddp_defaults(
    accelerator: Accelerator, config: GRPOConfig, model: nn.Module, *, with_images: bool
) -> None:
    """Set what DDP needs here; ``ddp_broadcast_buffers`` and ``ddp_find_unused_parameters`` have precedence.

    Each forward would wait for a broadcast of buffers, and the forked layout runs other numbers of them on
    each rank. A micro-batch of text has no gradient in a vision tower, nor any in an indexer of keys;
    reentrant checkpointing does not support such parameters.
    """
    handler = accelerator.ddp_handler or DistributedDataParallelKwargs()
    reentrant = uses_reentrant_checkpoints(config)
    if config.ddp_broadcast_buffers is None:
        handler = without_buffer_broadcast(handler)
    if config.ddp_find_unused_parameters is None and not reentrant:
        by_ddp = accelerator.num_processes > 1 and not is_sharded(accelerator)
        unused = parameters_without_gradient(model) if by_ddp and not with_images else []
        if unused:
            logger.warning(
                "DDP looks for parameters without a gradient in every step (ddp_find_unused_parameters): the "
                "forward of a text does not use %d trained ones, the first of which is %s",
                *(len(unused), unused[0]),
            )
        if with_images or unused:
            handler = replace(handler, find_unused_parameters=True)
    accelerator.ddp_handler = handler


def parameters_without_gradient(model: nn.Module) -> list[str]:
    """Return the names of trained parameters that the forward of a text of two tokens does not use."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        return []
    with evaluation_mode(model), torch.enable_grad():
        ids_12 = torch.zeros(1, 2, dtype=torch.long, device=next(iter(trained.values())).device)
        total = model(input_ids=ids_12, use_cache=False).logits.float().sum()
        gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
    return [name for name, gradient in zip(trained, gradients, strict=True) if gradient is None]


def _check_checkpointing(model: PreTrainedModel, config: GRPOConfig) -> None:
    """Switch gradient checkpointing off for a model that has none; refuse it if it was asked for."""
    if not config.gradient_checkpointing or getattr(model, "supports_gradient_checkpointing", True):
        return
    names = [name for name in _CHECKPOINTING if hasattr(config, name)]
    name = type(model).__name__
    if asked := [each for each in names if each in getattr(config, "given", ())]:
        raise ConfigError(f"{asked[0]}=True, but {name} has no gradient checkpointing; set it to False")
    logger.warning("gradient checkpointing is off: %s does not have it", name)
    for each in names:
        setattr(config, each, False)


def disable_dropout(model: nn.Module) -> None:
    """Set to zero: the probabilities of dropout modules, and numbers of modules named as dropout or jitter.

    What is random beside them is found by the check of the layouts.
    """
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("drop" in name or name in _JITTERS) and isinstance(value, float):  # for functional dropout
                setattr(module, name, 0.0)


def make_generation_config_savable(model: PreTrainedModel) -> None:
    """Remove the values for which ``save_pretrained`` would refuse the model's generation config.

    It loads with them: ``do_sample=False`` with a temperature, for example, which then has no effect.
    """
    config, removed = getattr(model, "generation_config", None), dict[str, Any]()
    if config is None or _is_savable(config):
        return
    given = {name: value for name, value in config.to_diff_dict().items() if name != "do_sample"}
    defaults = {name: getattr(GenerationConfig(), name, None) for name in given}
    config.update(**defaults)
    for name, value in given.items():
        setattr(config, name, value)
        if not _is_savable(config):
            removed[name] = value
            setattr(config, name, defaults[name])
    logger.warning(
        "the model's generation config cannot be saved with %r and do_sample=%r: these values are removed "
        "from it (the sampling settings of the run do not come from there)",
        removed,
        config.do_sample,
    )


def _is_savable(config: GenerationConfig) -> bool:
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True


def cast_head_to_fp32(model: PreTrainedModel) -> None:
    """Compute the head in float32: parameters, inputs and outputs (ScaleRL, arXiv 2510.13786, section 3.2).

    A tied embedding becomes float32 too; its output is cast back to the dtype of the other layers.
    """
    head, embedding = output_head(model), model.get_input_embeddings()
    activation_dtype = embedding.weight.dtype
    tied = head.weight is embedding.weight
    head.float()
    head.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))
    if tied:
        embedding.register_forward_hook(lambda _, __, output: output.to(activation_dtype))


def _check_targets(model: str | PreTrainedModel, config: GRPOConfig, adapter: PeftConfig) -> None:
    """Compare an adapter's ``target_modules`` with the names of the model's modules, before it is loaded.

    Raises:
        ConfigError: none of them is in the model.
    """
    targets: Any = getattr(adapter, "target_modules", None)
    if not targets or targets == "all-linear" or getattr(adapter, "target_parameters", None):
        return
    model = shapes_of_policy(model, config) if isinstance(model, str) else model
    modules = dict(model.named_modules())
    # As PEFT reads them: a string is a regular expression, the names of a list are ends of paths.
    patterns = [targets] if isinstance(targets, str) else [rf"(.*\.)?{re.escape(name)}" for name in targets]
    if not any(re.fullmatch(pattern, name) for pattern in patterns for name in modules):
        weights = {name: getattr(module, "weight", None) for name, module in modules.items()}
        matrices = {n.rpartition(".")[2] for n, w in weights.items() if torch.is_tensor(w) and w.dim() == 2}
        raise ConfigError(
            f"target_modules={targets!r} of the adapter match nothing in {type(model).__name__}; its "
            f"matrices are {', '.join(sorted(matrices))}, and 'all-linear' takes all but the output layer"
        )


def apply_peft(model: PreTrainedModel, peft_config: PeftConfig | None) -> PreTrainedModel:
    """Add an adapter to the model; without `peft_config`, only check an existing one.

    Raises:
        ConfigError: PEFT is not installed, the model already has an adapter, or an adapter changes the head.
    """
    if peft_config is not None:
        try:
            from peft import PeftModel, get_peft_model
        except ImportError as missing:
            raise ConfigError("peft_config needs PEFT: pip install 'groupwise[peft]'") from missing
        if isinstance(model, PeftModel):
            raise ConfigError(
                "peft_config was given for a model that already has an adapter; drop peft_config to continue "
                "that adapter, or merge it first (model = model.merge_and_unload())"
            )
        from groupwise.compat.peft import without_checkpointing_warning

        with without_checkpointing_warning():
            model = cast(PreTrainedModel, get_peft_model(model, peft_config))  # forwards attribute access
    check_head(model)
    return model
