"""Properties of a model: modules below wrappers and adapters, configuration, mode, and what it supports."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
from accelerate.utils import extract_model_from_parallel, is_compiled_module
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import find_adapter_config_file

from groupwise.compat.torch import WRAPPER_NAMES
from groupwise.compat.transformers import has_routers
from groupwise.config.sampling import chosen_backend
from groupwise.errors import ConfigError, boundary
from groupwise.files import read_json
from groupwise.tokenization.images import image_token_id

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftConfig

    from groupwise.config.grpo_config import GRPOConfig

#: Causal language model, plain or PEFT; transformers has no type for it.
CausalLM: TypeAlias = Any

#: Loading options that select the configuration of a checkpoint.
_WHICH_FILE = ("revision", "token", "subfolder", "cache_dir")
_WHICH_CONFIG = ("trust_remote_code", "gguf_file")

_TRAIN_FURTHER = (
    'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{}"), "{}", is_trainable=True)'
)

#: Values of ``init_lora_weights`` with which an adapter leaves the base weights as they are.
KEEPS_BASE = (True, False, "gaussian", "orthogonal", "eva")

#: Names of E and K in configs.
_EXPERT_NAMES = (
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"),
)

#: Tokens of a row of which :func:`plain_logps` computes all logits.
_FEW_TOKENS = 128

# Below wrappers and adapters.


def unwrapped(model: nn.Module, keep_torch_compile: bool = False) -> PreTrainedModel:
    """Return the model below DDP, FSDP, DeepSpeed and torch.compile; wrappers for mixed precision remain."""
    if not any(hasattr(model, name) for name in ("module", *WRAPPER_NAMES)):
        return cast(PreTrainedModel, model)  # accelerate's function reads metadata of DeepSpeed in every call
    return extract_model_from_parallel(model, keep_torch_compile=keep_torch_compile)


def check_model(model: object, argument: str) -> None:
    """Refuse a model whose checkpoints would have other names of weights than it was loaded with.

    Raises:
        ConfigError: it has a wrapper, or is no model of transformers or PEFT.
    """
    known = isinstance(model, PreTrainedModel) or (isinstance(model, nn.Module) and has_adapter(model))
    if known and unwrapped(cast(nn.Module, model)) is model:
        refused = [part for part in cast(nn.Module, model).modules() if is_compiled_module(part)]
    else:
        refused = [cast(nn.Module, model)]
    if refused:
        raise ConfigError(
            f"{argument} is or contains a {type(refused[0]).__name__}; allowed: a PreTrainedModel or "
            "PeftModel, hub id or directory. A wrapper (torch.compile, DataParallel, a value head) renames "
            "weights, so that a checkpoint would load as random ones; the trainer wraps the model for its "
            "processes, and torch_compile=True compiles it"
        )


def without_adapter(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model below a PEFT adapter, or ``model`` itself."""
    return cast(PreTrainedModel, getattr(model, "get_base_model", lambda: model)())


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the causal LM below wrappers and adapters."""
    return without_adapter(unwrapped(model))


# Configuration.


def load_config(model: str, args: GRPOConfig) -> PretrainedConfig:
    """Load the configuration of a Hub id or directory with the options of ``args.model_init_kwargs``.

    Raises:
        ConfigError: no such model, no access, or an adapter.
    """
    given = cast(dict[str, Any], args.model_init_kwargs or {})
    options = {"trust_remote_code": args.trust_remote_code, **given}
    of_files = {name: options[name] for name in _WHICH_FILE if name in options}
    with boundary(ConfigError, f"model {model!r}"):
        adapter_file = find_adapter_config_file(model, **of_files)
        if adapter_file is None:
            others = {name: options[name] for name in _WHICH_CONFIG if name in options}
            return AutoConfig.from_pretrained(model, **of_files, **others)
        adapter = read_json(Path(adapter_file), {})
    base = adapter.get("base_model_name_or_path") or "base"
    raise ConfigError(
        f"model={model!r} is an adapter ({adapter.get('peft_type')}) of the model {base!r}; to train it "
        f"further, pass model={_TRAIN_FURTHER.format(base, model)}"
    )


def text_config(model: str | PreTrainedModel, args: GRPOConfig) -> PretrainedConfig:
    """Return the config of the language model; for a Hub id or directory, only the config is loaded."""
    config = load_config(model, args) if isinstance(model, str) else model.config
    return config.get_text_config(decoder=True)


class Context(NamedTuple):
    """Maximum number of prompt and completion tokens, and the setting that it comes from."""

    tokens: int
    setting: str


def context_length(model: str | PreTrainedModel, config: GRPOConfig) -> Context | None:
    """Return the limit of prompt and completion tokens; None if there is none."""
    of_model = text_config(model, config)
    limits = {"max_position_embeddings": _scaled_positions(of_model)}
    if chosen_backend(config) == "colocate":
        limits["vllm_max_model_length"] = config.vllm_max_model_length
    known = {name: tokens for name, tokens in limits.items() if tokens is not None}
    return min((Context(tokens, name) for name, tokens in known.items()), default=None)


def _scaled_positions(config: PretrainedConfig) -> int | None:
    """Return the positions that rotary embeddings reach with their scaling, as engines compute them."""
    trained = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}  # or a dictionary per kind of layer
    kinds = [each for each in (rope, *rope.values()) if isinstance(each, dict)]
    scaled = [each for each in kinds if each.get("rope_type") in ("linear", "dynamic", "yarn")]
    lengths = [(each.get("original_max_position_embeddings") or trained) * each["factor"] for each in scaled]
    return trained if trained is None else int(max([trained, *lengths]))


def autocast_dtype(accelerator: Accelerator) -> torch.dtype | None:
    """Return the dtype of matrix products under autocast; None: that of the weights."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)


def is_quantized(model: object) -> bool:
    """Return True for a loaded model with quantized weights."""
    return bool(getattr(model, "is_quantized", False))


def router_aux_loss_coef(model: PreTrainedModel, args: GRPOConfig) -> float:
    """Return the weight of the balancing loss: the setting, else the model's default; 0 for a dense model.

    The config alone does not decide: Llama 4 has a weight, and no balancing loss in its forward.

    Raises:
        ConfigError: the setting is not zero, but the model has no expert router, or computes no such loss.
    """
    own = getattr(model.config.get_text_config(), "router_aux_loss_coef", None)
    missing = "" if own is not None else "has no expert router"
    if not missing and not ("output_router_logits" in accepted_arguments(model) and has_routers(model)):
        missing = "computes no balancing loss"
    if args.router_aux_loss_coef is None:
        return 0.0 if missing else float(own or 0.0)
    if missing and args.router_aux_loss_coef != 0.0:
        raise ConfigError(
            f"router_aux_loss_coef={args.router_aux_loss_coef}, but {type(model).__name__} {missing}; leave "
            "it at None"
        )
    return args.router_aux_loss_coef


def experts_of(model: nn.Module) -> tuple[int, int] | None:
    """Return the number E of experts in a layer and the number K that a token uses; None without experts."""
    config = base_model(model).config.get_text_config(decoder=True)
    both = [next((n for name in names if (n := getattr(config, name, None))), 0) for names in _EXPERT_NAMES]
    return (
        (int(both[0]), int(both[1])) if all(isinstance(number, int) and number for number in both) else None
    )


def flops_per_token(model: CausalLM) -> float:
    """Return the operations of forward and backward per token: 4 · active + 2 · trained active weights.

    The products with a weight are one of the forward pass, one for the gradient of its input, and one for its
    own gradient if it is trained. A token uses K of E experts; embeddings are looked up.
    """
    num_experts, top_k = experts_of(model) or (0, 0)

    def active(trained: bool) -> float:
        in_experts = sum(
            parameter.numel()
            for name, parameter in model.named_parameters()
            if num_experts
            and (parameter.requires_grad or not trained)
            # A stack (E, in, out), or a module per expert, with the adapters of both.
            and (".experts." in name or (parameter.dim() == 3 and len(parameter) == num_experts))
        )
        unused = in_experts * (1 - top_k / num_experts) if in_experts else 0.0
        return float(model.num_parameters(only_trainable=trained, exclude_embeddings=True) - unused)

    return 4 * active(False) + 2 * active(True)


def configs_with_router_logits(model: nn.Module) -> list[PretrainedConfig]:
    """Return the configs by which every forward of a mixture of experts computes the balancing loss."""
    config = base_model(model).config
    unique = {id(each): each for each in (config, config.get_text_config(decoder=True))}
    return [each for each in unique.values() if getattr(each, "output_router_logits", False)]


@contextmanager
def without_router_logits(model: nn.Module) -> Iterator[None]:
    """Context manager in which ``output_router_logits=True`` of the model's config has no effect.

    The balancing loss of a decoding step fails: the mask has the positions of the cache, the router not.
    """
    configs = configs_with_router_logits(model)
    for config in configs:
        config.output_router_logits = False
    try:
        yield
    finally:
        for config in configs:
            config.output_router_logits = True


# Adapters.


def has_adapter(model: object) -> bool:
    """Return True for a ``PeftModel``, below wrappers; the policy has no adapters of other kinds."""
    peft = sys.modules.get("peft")  # a model has no adapter of a module that is not loaded
    return peft is not None and isinstance(model, peft.PeftModel)


def adapters_of(model: Any, peft_config: PeftConfig | None = None) -> list[PeftConfig]:
    """Return the configurations of the model's adapters; if ``peft_config`` is given, only that one.

    Args:
        model: below wrappers; of a Hub id there are none.
    """
    if peft_config is not None:
        return [peft_config]
    return list(model.peft_config.values()) if has_adapter(model) else []


def check_adapter(model: Any, peft_config: PeftConfig | None) -> None:
    """Check the trainer's arguments ``model`` and ``peft_config`` before weights are loaded.

    Raises:
        ConfigError: the model's adapters are not those of a ``PeftModel``, are for another task, or give
            another policy where they are loaded.
    """
    if hasattr(model, "peft_config") and not has_adapter(model):
        base = model.config.name_or_path or "base"
        raise ConfigError(
            f"the {type(model).__name__} has adapters ({', '.join(model.peft_config)}) and is no PeftModel: "
            "they were added by model.add_adapter or by loading an adapter as a model. "
            f"Pass the base model and peft_config, or model={_TRAIN_FURTHER.format(base, 'adapter')}"
        )
    if peft_config is not None and not hasattr(peft_config, "peft_type"):
        example = f"LoraConfig(**{peft_config})" if isinstance(peft_config, dict) else "LoraConfig(r=16)"
        raise ConfigError(
            f"peft_config is a {type(peft_config).__name__}; pass one of PEFT, such as peft.{example}"
        )
    for one in adapters_of(model, peft_config):
        task = getattr(one.task_type, "value", one.task_type)
        if task not in (None, "CAUSAL_LM"):
            raise ConfigError(
                f"the adapter has task_type={task!r}, but a policy is a causal language model; set "
                "task_type='CAUSAL_LM', or leave it out"
            )
        initialization = getattr(one, "init_lora_weights", True)
        if str(initialization).startswith("pissa_niter_"):
            raise ConfigError(
                f"init_lora_weights={initialization!r} takes random factors out of the base weights, others "
                "when PEFT loads the saved adapter, which then gives another policy; set "
                "init_lora_weights='pissa', whose factors are always the same"
            )


def adapter_type(adapter: PeftConfig) -> str:
    """Return PEFT's name of an adapter, such as "LORA"."""
    return str(getattr(adapter.peft_type, "value", adapter.peft_type))


def changes_base(adapter: PeftConfig) -> bool:
    """Return True if attaching the adapter changes the base weights, as PiSSA and OLoRA do."""
    return getattr(adapter, "init_lora_weights", True) not in KEEPS_BASE


def has_prompt_learning(model: nn.Module) -> bool:
    """Return True for an adapter of virtual tokens (prompt tuning, prefix tuning, p-tuning)."""
    return any(adapter.is_prompt_learning for adapter in adapters_of(unwrapped(model)))


# The forward pass.


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context manager that disables dropout and restores the mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def accepted_arguments(model: nn.Module) -> set[str]:
    """Return the parameter names of the causal LM's own forward."""
    return set(inspect.signature(type(base_model(model)).forward).parameters)


def plain_logps(
    model: nn.Module,
    ids_1S: torch.Tensor,
    predicting_N: torch.Tensor,
    images: Mapping[str, Any] = MappingProxyType({}),
    temperature: float = 1.0,
) -> torch.Tensor:
    """Compute log-probs (N,) of the tokens after the positions ``predicting_N`` by the model's own forward.

    The reference of all checks: one row without padding and cache, with the model's own positions, attention
    and head; differentiable.

    Args:
        images: arguments of the model for the images of the row.
    """
    accepted, from_end_N = accepted_arguments(model), predicting_N - ids_1S.shape[1]
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids_1S), "use_cache": False, **images}
    if ids_1S.shape[1] > _FEW_TOKENS:  # gigabytes of logits; else all S, however the model selects them
        options["logits_to_keep"] = from_end_N
    inputs = {name: value for name, value in options.items() if name in accepted}
    with without_router_logits(model):
        logits_NV = model(input_ids=ids_1S, **inputs).logits[0]
    if len(logits_NV) != len(from_end_N):  # of all positions; virtual tokens of an adapter precede the row
        logits_NV = logits_NV[from_end_N]
    logits_NV = logits_NV.float() if logits_NV.dtype.itemsize < 4 else logits_NV
    logps_NV = (logits_NV / temperature).log_softmax(-1)
    return logps_NV.gather(1, ids_1S[0, predicting_N + 1, None])[:, 0]


def config_numbers(config: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Iterate over the integers of a config and its parts, each with its name: lengths may be among them."""
    if isinstance(config, Mapping | list | tuple):
        parts = config.items() if isinstance(config, Mapping) else ((name, part) for part in config)
        for key, part in parts:
            yield from config_numbers(part, key)
    elif isinstance(config, int) and not isinstance(config, bool):
        yield name, config


def multimodal_part(model: nn.Module) -> Any:
    """Return the module that inserts images into a sequence, and has the positions of the last one."""
    base = base_model(model)
    return getattr(base, "model", base)


def has_own_positions(model: nn.Module) -> bool:
    """Return True if the model derives multi-dimensional positions of image tokens itself."""
    return hasattr(multimodal_part(model), "get_rope_index")


def is_text_only(model: nn.Module) -> bool:
    """Return True if the model has no vision or audio part."""
    config = base_model(model).config
    return config.get_text_config(decoder=True) is config


def cannot_continue_images(model: nn.Module) -> str | None:
    """Return the reason why text after images needs more than their cache; None if it does not."""
    config = base_model(model).config
    text = config.get_text_config(decoder=True)
    if is_text_only(model):
        return None
    if image_token_id(config) is None or hasattr(text, "cross_attention_layers"):
        return "it has a part whose inputs are not image tokens of the prompt"
    if has_own_positions(model) and not hasattr(multimodal_part(model), "rope_deltas"):
        return "it does not keep the positions after an image"
    return None


def dropout_of_attention(model: nn.Module) -> str | None:
    """Return the reason against a layout whose masks of dropout differ from the padded ones, or None."""
    for module in model.modules():
        own = ["dropout"] if "Attention" in type(module).__name__ else []
        for name in ("attention_dropout", "attn_dropout", *own):  # a number or a ``Dropout`` module
            dropout = getattr(module, name, None)
            if getattr(dropout, "p", dropout):
                return "its attention has dropout"
    return None
