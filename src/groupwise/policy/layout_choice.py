"""Choice of the sequence layout and the log-prob head of a run, from its settings and its model."""

from __future__ import annotations

from functools import partial
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedModel

from groupwise.compat.transformers import (
    attention_implementation,
    balancing_scope,
    cast_experts,
    is_stateful,
    supports_sdpa,
)
from groupwise.config.grpo_config import GRPOConfig
from groupwise.distributed import any_rank, gathers_in_forwards, is_sharded, largest
from groupwise.errors import ConfigError
from groupwise.policy.attention import install_attention_hook, supports_packing
from groupwise.policy.heads.capture import LogprobHead
from groupwise.policy.heads.weights import changes_head
from groupwise.policy.introspection import (
    accepted_arguments,
    autocast_dtype,
    base_model,
    config_numbers,
    dropout_of_attention,
    experts_of,
    has_prompt_learning,
    is_text_only,
    router_aux_loss_coef,
)
from groupwise.policy.loading import uses_reentrant_checkpoints
from groupwise.policy.logprobs import LogprobComputer, forked_layout
from groupwise.records.fast_paths import FastPath

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
#: Numbers of a config beyond which a row is computed in another way: a window, a chunk, a selection of keys,
#: a scale of attention, or a switch of rotary embeddings.
_LENGTHS = {
    *("sliding_window", "attention_chunk_size", "index_topk", "floor_scale"),
    "original_max_position_embeddings",
}


def choose_layout(
    wanted: str,
    model: nn.Module,
    *,
    group_size: int,
    with_aux_loss: bool,
    on_gpu: bool = False,
    one_forward: str = "",
) -> FastPath:
    """Resolve the setting ``sequence_layout`` for this model.

    Args:
        wanted: "padded", "packed", "shared_prefix", "forked" or "auto".
        model: the policy; supported models get the attention hook.
        with_aux_loss: training includes a balancing loss.
        on_gpu: warn if "auto" becomes "padded", where padding costs most.
        one_forward: the reason why a micro-batch must be one forward pass, which "forked" is not; "": none.

    Returns:
        its choice is "padded", "packed", "shared_prefix" or "forked".

    Raises:
        ConfigError: the model does not support the layout that ``wanted`` names.
    """
    if wanted == "padded":
        return FastPath("layout", wanted, "sequence_layout='padded'")
    only_padded = reason = None
    if with_aux_loss and balancing_scope(base_model(model)) is None:
        only_padded = reason = (
            "its balancing loss counts padded sequences, and is no load_balancing_loss_func of transformers"
        )
    if only_padded is None and wanted != "forked":
        reason = unsupported(model, shared=wanted == "shared_prefix")
    if reason is None and wanted != "forked":
        can_share = group_size > 1 and supports_packing(base_model(model), shared=True)
        chosen = wanted if wanted != "auto" else "shared_prefix" if can_share else "packed"
        return FastPath("layout", chosen)
    if only_padded is None and (wanted == "forked" or (wanted == "auto" and group_size > 1)):
        no_fork = one_forward or forked_layout().cannot_fork(model)
        if no_fork is None:
            return FastPath("layout", "forked", "" if wanted == "forked" else f"{reason}")
        reason = no_fork if wanted == "forked" or no_fork == reason else f"{reason}; not forked: {no_fork}"
    if wanted != "auto":
        raise ConfigError(
            f"{type(model).__name__} does not support sequence_layout={wanted!r}: {reason}; "
            "use 'padded', or 'auto', which selects a layout that the model supports"
        )
    accepted = "; sequence_layout='padded' accepts it" if on_gpu else ""
    return FastPath("layout", "padded", f"{reason}{accepted}", on_gpu)


def next_layouts(chosen: str, model: nn.Module, group_size: int, one_forward: str, whole: bool) -> list[str]:
    """Return the layouts to try after ``chosen`` if it does not compute what the model does alone.

    Args:
        one_forward: as in :func:`choose_layout`.
        whole: all rows of a micro-batch must be in one pass.
    """
    possible = {
        "forked": group_size > 1 and not one_forward and forked_layout().cannot_fork(model) is None,
        "packed": unsupported(model, shared=False) is None,
        "padded": True,
        "equal_length": not (one_forward or whole),
    }
    order = ["shared_prefix", *possible]
    return [name for name in order[order.index(chosen) + 1 :] if possible[name]]


def unsupported(model: nn.Module, *, shared: bool = True) -> str | None:
    """Return the reason why ``model`` cannot use a layout without padding; None if it can.

    Installs the attention hook if the model supports it. Packing requires that attention is the only
    computation across tokens and that it is a softmax over keys selected by position.

    Args:
        shared: also require support for prompts that are computed once per group.
    """
    base = base_model(model)
    config = base.config.get_text_config(decoder=True)
    # Linear attention, convolutions, chunked attention, ….
    other_layers = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    # Both are needed: positions restart, logits are selected.
    missing = {"position_ids", "logits_to_keep"} - accepted_arguments(model)
    if has_prompt_learning(model):
        return "its adapter adds virtual tokens to every prompt"
    if not is_text_only(model):
        return "it has a vision or audio part"
    if getattr(config, "is_encoder_decoder", False) or is_stateful(base):
        return "it does not consist of attention layers alone"
    if other_layers:
        return f"it has layers of type {', '.join(sorted(other_layers))}"
    if missing:
        return f"its forward does not accept {' and '.join(sorted(missing))}"
    if any(name.rpartition(".")[2] == "sinks" for name, _ in base.named_parameters()):
        return "its attention has sinks"
    if reason := dropout_of_attention(base):
        return reason
    if not supports_packing(base, shared=shared):
        others = "" if shared else ", flash attention or flex_attention"
        advice = f"; load it with attn_implementation='sdpa'{others}" if supports_sdpa(base) else ""
        return f"its attention implementation is {attention_implementation(base)!r}{advice}"
    return None


def _reason_for_one_forward(policy: nn.Module, config: GRPOConfig, accelerator: Accelerator) -> str:
    """Return the reason why a micro-batch must be one forward pass; "": it may be several over a cache."""
    reasons = {
        "FSDP version 1 takes one forward pass before a backward pass": accelerator.distributed_type
        == DistributedType.FSDP
        and not accelerator.is_fsdp2,
        # Ranks with and without images would run other passes, and under ZeRO-2 the update is another one.
        "images under DeepSpeed and FSDP are computed in padded sequences": is_sharded(accelerator)
        and not is_text_only(policy),
        "a compiled model takes no cache": config.torch_compile,
        "gradient checkpointing with use_reentrant=True detaches the cache": uses_reentrant_checkpoints(
            config
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _length_that_matters(policy: PreTrainedModel, config: GRPOConfig, prompt_tokens: int) -> int:
    """Return the largest number of tokens in the model's config that rows of the run may exceed; 0: none."""
    text, reached = policy.config.get_text_config(decoder=True), prompt_tokens + config.max_completion_length
    is_dynamic = "'dynamic'" in str(getattr(text, "rope_parameters", None))
    names = _LENGTHS | ({"max_position_embeddings"} if is_dynamic else set())
    numbers = config_numbers(text.to_dict())
    return max((number for name, number in numbers if name in names and number < reached), default=0)


def _check_settings(
    policy: PreTrainedModel, config: GRPOConfig, *, sharded: bool, with_aux_loss: bool, sums_routers: bool
) -> None:
    """Refuse settings with which the head has no parameters, or the balancing loss no gradient or scope."""
    if sharded and changes_head(policy):
        raise ConfigError(
            "an adapter changes the language-model head, whose parameters are added up in its forward: with "
            "FSDP or DeepSpeed they are not there; leave the head out of the adapter, put it into "
            "modules_to_save, or do not shard"
        )
    if config.router_aux_loss_scope == "global_batch" and not sums_routers:
        missing = "balancing loss whose sums can be read" if with_aux_loss else "balancing loss"
        raise ConfigError(
            f"router_aux_loss_scope='global_batch', but {type(base_model(policy)).__name__} has no "
            f"{missing}; allowed: 'micro_batch'"
        )
    if with_aux_loss and uses_reentrant_checkpoints(config):
        raise ConfigError(
            "gradient_checkpointing_kwargs={'use_reentrant': True} detaches the router logits, so that the "
            "balancing loss has no gradient; set it to False, or router_aux_loss_coef=0.0"
        )


def make_logprob_computer(
    policy: PreTrainedModel, config: GRPOConfig, accelerator: Accelerator
) -> LogprobComputer:
    """Build the log-prob computer with the configured layout and head."""
    sharded, on_gpu = is_sharded(accelerator), accelerator.device.type == "cuda"
    with_aux_loss = router_aux_loss_coef(policy, config) != 0.0
    sums_routers = with_aux_loss and balancing_scope(base_model(policy)) is not None
    _check_settings(policy, config, sharded=sharded, with_aux_loss=with_aux_loss, sums_routers=sums_routers)
    # NEFTune scales its noise by the length of a row: that of a sequence in the padded layout alone.
    only_padded = "neftune_noise_alpha" if config.neftune_noise_alpha is not None else ""
    only_padded = "use_liger_kernel" if config.use_liger_kernel else only_padded
    wanted = "padded" if only_padded else config.sequence_layout
    options: Any = {
        "group_size": config.num_generations,
        "one_forward": _reason_for_one_forward(policy, config, accelerator),
    }
    path = choose_layout(wanted, policy, with_aux_loss=with_aux_loss, on_gpu=on_gpu, **options)
    # Ranks of a sharded model make as many forwards, and a balancing loss without sums needs one.
    whole = sharded or with_aux_loss != sums_routers
    head = "chunked" if config.logprob_head == "auto" else config.logprob_head
    computer = LogprobComputer(
        path.choice,
        LogprobHead(head, fp32=config.cast_lm_head_to_fp32),
        partial(any_rank, accelerator),
        partial(largest, accelerator) if gathers_in_forwards(accelerator) else None,
        sharded=sharded,
        mixed_precision=autocast_dtype(accelerator),
        other_layouts=next_layouts(path.choice, policy, whole=whole, **options) if wanted == "auto" else (),
        other_heads=("dense",) if config.logprob_head == "auto" else (),
        reentrant=uses_reentrant_checkpoints(config),
        longer=partial(_length_that_matters, policy, config),
        with_aux_loss=with_aux_loss,
        has_dropout=not config.disable_dropout,
        checked=bool(only_padded),  # noise, or no log-probs
        checked_images=bool(only_padded),
        paths=[path._replace(reason=only_padded) if only_padded else path],
    )
    chosen = "" if head == "chunked" else f"logprob_head={head!r}"
    computer.paths.append(FastPath("head", "liger" if config.use_liger_kernel else head, chosen))
    if config.router_replay != "disabled":
        from groupwise.policy.experts import RouterReplay

        computer.replay = RouterReplay(policy, config.router_replay)
    # On a CPU experts are sampled by the same float32 products, and a cast of all of them costs every token.
    if computer.mixed_precision is not None and accelerator.device.type != "cpu" and experts_of(policy):
        cast_experts(accelerator.device.type)
    packs = path.choice in ("packed", "shared_prefix") and install_attention_hook(base_model(policy))
    if packs and on_gpu:
        from groupwise.policy.layouts.varlen import reason_against_varlen

        reason = reason_against_varlen(accelerator.device, computer.mixed_precision or policy.dtype)
        computer.varlen = not reason
        computer.paths.append(FastPath("attention", "blocks" if reason else "varlen", reason))
    return computer
