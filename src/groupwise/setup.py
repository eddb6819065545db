"""Building a run: what is checked before anything is loaded, and what is loaded."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.utils.data import Dataset, IterableDataset
from transformers import AutoConfig, PreTrainedModel

from groupwise.config import GRPOConfig
from groupwise.core.objectives import OBJECTIVES
from groupwise.data import repeat_rows
from groupwise.errors import ConfigError
from groupwise.heap import return_large_blocks
from groupwise.layout import HeadSettings, TokenScorer, choose_layout
from groupwise.linear import speed_up_linears
from groupwise.models import apply_peft, cast_head_to_fp32, disable_dropout, load_policy
from groupwise.rewards.calling import reward_name, unique_names
from groupwise.rewards.models import RewardModel, load_reward_model
from groupwise.window import Cut

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardSetup:
    """Reward functions as given: callables, models or names of models, with the tokenizers given for them."""

    functions: list[Any]
    processing_classes: list[Any]


@dataclass(frozen=True)
class LoadedRewards:
    """Reward functions ready to be called.

    functions: as given, names replaced by the models they stand for.
    callables: what is called, in the same order.
    names: unique names for metrics.
    processing_classes: the tokenizers of the reward models, None for callables.
    """

    functions: list[Any]
    callables: list[Callable[..., Any]]
    names: list[str]
    processing_classes: list[Any]


def model_name(model: str | PreTrainedModel) -> str:
    """The last component of a model's id or directory."""
    path = model if isinstance(model, str) else model.config._name_or_path
    return os.path.basename(os.path.normpath(path)) if path else type(model).__name__


def refuse_unavailable(**features: Any) -> None:
    """Raise for arguments whose feature does not exist yet."""
    given = [name for name, value in features.items() if value is not None]
    if given:
        raise ConfigError(
            f"not implemented yet: {', '.join(given)}; leave {'them' if given[1:] else 'it'} out"
        )


def check_data(train_dataset: Any, eval_dataset: Any, config: GRPOConfig) -> None:
    """Refuse datasets that cannot fill a batch or have no prompts.

    Raises:
        ConfigError: naming the dataset, what it has and what is needed.
    """
    if train_dataset is None and eval_dataset is None:
        raise ConfigError("train_dataset is missing (and there is no eval_dataset either); pass a dataset")
    named = {"train_dataset": train_dataset}
    named.update(
        {f"eval_dataset[{key!r}]": value for key, value in eval_dataset.items()}
        if isinstance(eval_dataset, dict) and not hasattr(eval_dataset, "column_names")
        else {"eval_dataset": eval_dataset}
    )
    for name, dataset in named.items():
        if dataset is not None:
            _check_dataset(name, dataset)
    needed = config.generation_batch_size // config.num_generations
    if train_dataset is not None and len(train_dataset) < needed:
        raise ConfigError(
            f"train_dataset has {len(train_dataset)} prompts, but one generation batch takes {needed} "
            f"(generation_batch_size={config.generation_batch_size} / "
            f"num_generations={config.num_generations}); use more prompts or a smaller batch"
        )


def _check_dataset(name: str, dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{name} is a {type(dataset).__name__}: streaming data are not implemented yet; pass a Dataset"
        )
    if len(dataset) == 0:
        raise ConfigError(f"{name} is empty")
    columns = getattr(dataset, "column_names", None) or list(dataset[0])
    if "prompt" not in columns:
        raise ConfigError(f"{name} has no 'prompt' column; its columns are {', '.join(map(repr, columns))}")


def evaluation_rows(dataset: Any, config: GRPOConfig) -> Dataset:
    """Every row ``num_generations_eval`` times in a row, for batches that hold whole groups.

    Raises:
        ConfigError: with the nearest sizes that fit.
    """
    size, group = config.eval_batch_size * config.world_size, config.num_generations_eval
    if size % group:
        below = size // group * group
        nearest = " or ".join(str(valid) for valid in (below, below + group) if valid)
        raise ConfigError(
            f"the evaluation batch of all processes has {size} completions, which is not divisible by "
            f"num_generations_eval={group}; nearest valid: {nearest} "
            "(per_device_eval_batch_size times the number of processes)"
        )
    return repeat_rows(dataset, group)


def check_rewards(reward_funcs: Any, processing_classes: Any, config: GRPOConfig) -> RewardSetup:
    """One or several reward functions, and their tokenizers, as lists of equal length; the caller's lists
    stay.

    Raises:
        ConfigError: no function, something that is not one, or lists whose lengths differ.
    """
    functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    if not functions or functions == [None]:
        raise ConfigError("reward_funcs is missing; pass a reward function, a reward model or a list of them")
    for function in functions:
        if not (callable(function) or isinstance(function, str)):
            raise ConfigError(
                f"reward_funcs holds {function!r} ({type(function).__name__}); allowed: callables, "
                "sequence-classification models and ids of such models"
            )
    if not isinstance(processing_classes, (list, tuple)):
        processing_classes = [processing_classes] * len(functions)
    for name, given in (
        ("reward_processing_classes", processing_classes),
        ("reward_weights", config.reward_weights or functions),
    ):
        if len(given) != len(functions):
            raise ConfigError(
                f"{name} has {len(given)} entries for {len(functions)} reward functions; give one for each"
            )
    return RewardSetup(functions, list(processing_classes))


def load_rewards(rewards: RewardSetup, config: GRPOConfig, accelerator: Accelerator) -> LoadedRewards:
    """Load the reward models that were given by name and put all reward models where they score."""
    functions: list[Any] = []
    callables: list[Callable[..., Any]] = []
    tokenizers: list[Any] = []
    for function, tokenizer in zip(rewards.functions, rewards.processing_classes, strict=True):
        if isinstance(function, str):
            function = load_reward_model(function, config.trust_remote_code)
        functions.append(function)
        if isinstance(function, PreTrainedModel):
            model = accelerator.prepare_model(function, evaluation_mode=True)
            scorer = RewardModel(
                model, tokenizer, config.per_device_train_batch_size, config.trust_remote_code
            )
            callables.append(scorer)
            tokenizers.append(scorer.tokenizer)
        else:
            callables.append(function)
            tokenizers.append(None)
    return LoadedRewards(functions, callables, unique_names([reward_name(f) for f in functions]), tokenizers)


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
    policy = apply_peft(policy, peft_config)
    if config.gradient_checkpointing and hasattr(policy, "peft_config"):
        # The frozen embedding gives activations without gradients; recomputation would then have none to
        # return.
        policy.enable_input_require_grads()
    _warn_about_truncated_sampling(config)
    return policy


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
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    return TokenScorer(layout, head, agree, sharded=sharded, mixed_precision=mixed)


def speed_up(models: list[Any], config: GRPOConfig, accelerator: Accelerator) -> None:
    """On a CPU: a heap that gives memory back, and faster linear layers if nothing else rewrites them."""
    if accelerator.device.type != "cpu":
        return
    return_large_blocks()
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if not sharded and not config.torch_compile:
        layers = sum(speed_up_linears(model) for model in models if model is not None)
        logger.info("%d linear layers compute through oneDNN", layers)


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
    softcap = getattr(_text_config(model, config), "final_logit_softcapping", None)
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


def _text_config(model: str | PreTrainedModel, config: GRPOConfig) -> Any:
    if not isinstance(model, str):
        return model.config.get_text_config(decoder=True)
    given: Any = config.model_init_kwargs or {}
    options = {"trust_remote_code": config.trust_remote_code, **given}
    named = {name: options[name] for name in ("trust_remote_code", "revision", "token") if name in options}
    return AutoConfig.from_pretrained(model, **named).get_text_config(decoder=True)


def _liger_switches() -> set[str]:
    """The names of all layer kernels of all architectures."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as functions

    parameters = [p for f in functions.values() for p in inspect.signature(f).parameters.values()]
    return {parameter.name for parameter in parameters if isinstance(parameter.default, bool)}


def _warn_about_truncated_sampling(config: GRPOConfig) -> None:
    truncating = {"top_p": config.top_p < 1, "top_k": bool(config.top_k), "min_p": bool(config.min_p)}
    used = [f"{name}={getattr(config, name)}" for name, truncates in truncating.items() if truncates]
    if used:
        logger.warning(
            "%s: completions are sampled from a truncated distribution while log-probs are those of the full "
            "one, which biases the importance ratio; top_p=1.0 with top_k=0 and min_p=None has no such bias",
            ", ".join(used),
        )


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


def loss_is_scaled(*_: Any, **__: Any) -> None:
    """Stands for ``compute_loss_func``, which is never called because ``compute_loss`` is overridden."""
    raise AssertionError("compute_loss is overridden")
