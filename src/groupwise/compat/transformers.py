"""Private symbols of transformers, seen in 5.3 to 5.24 except where a function says otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import (
        GenerationConfig,
        LogitsProcessorList,
        PreTrainedModel,
        StoppingCriteriaList,
        Trainer,
    )
    from transformers._typing import GenerativePreTrainedModel
    from transformers.utils import ModelOutput

Weights = dict[str, "torch.Tensor"]

#: File name of the trainer state in a checkpoint, and prefix of the directories of checkpoints.
TRAINER_STATE, CHECKPOINT = "trainer_state.json", "checkpoint"

_NOT_UPLOADED: ContextVar[tuple[str, ...]] = ContextVar("not_uploaded", default=())


def mark_loss_as_scaled(trainer: Trainer) -> None:
    """Keep ``Trainer`` and accelerate from dividing the loss by the number of micro-batches.

    Newer versions have the public attribute ``loss_is_scaled_for_ga`` (seen in 5.19 and 5.23). Older ones
    divide unless ``compute_loss_func`` is set (seen in 5.3); an overridden ``compute_loss`` does not call it.
    """
    if hasattr(trainer, "loss_is_scaled_for_ga"):
        trainer.loss_is_scaled_for_ga = True
    else:
        trainer.compute_loss_func = _never_called
    # Trainer 5.3 leaves args.gradient_accumulation_steps here, and Accelerator.backward divides by it again.
    trainer.accelerator.gradient_accumulation_steps = 1


def _never_called(*_: object, **__: object) -> None:
    raise AssertionError("the trainer overrides compute_loss")


def keep_undivided_layers(model: PreTrainedModel) -> None:
    """Remove classes that ``model`` does not have from those whose modules FSDP shards as a unit.

    accelerate refuses such a name: a Qwen3.5 for text names the blocks of its vision tower.
    """
    classes, named = {type(module).__name__ for module in model.modules()}, model._no_split_modules
    if named and not classes.issuperset(named):
        model._no_split_modules = type(named)(name for name in named if name in classes)


def attention_implementation(model: PreTrainedModel) -> str:
    """Return the name of the attention implementation of ``model``."""
    return model.config._attn_implementation


@contextmanager
def uploads_without(patterns: Sequence[str]) -> Iterator[None]:
    """Context manager in which ``Trainer`` uploads no file that matches ``patterns`` of ``upload_folder``.

    ``Trainer`` passes fixed patterns, to the function ``upload_folder`` (5.3) or the method of ``hf_api()``
    (5.19). Uploads of other threads keep theirs.
    """
    _filter_uploads()
    token = _NOT_UPLOADED.set(tuple(patterns))
    try:
        yield
    finally:
        _NOT_UPLOADED.reset(token)


@cache
def _filter_uploads() -> None:
    from huggingface_hub import HfApi
    from transformers import trainer

    class FilteredApi(HfApi):
        def upload_folder(self, *, ignore_patterns: Any = None, **given: Any) -> Any:  # type: ignore[override]
            return super().upload_folder(
                ignore_patterns=[*(ignore_patterns or ()), *_NOT_UPLOADED.get()], **given
            )

    api = FilteredApi()
    if hasattr(trainer, "hf_api"):
        vars(api).update(vars(trainer.hf_api()))
        trainer.hf_api = lambda: api
    else:
        trainer.upload_folder = api.upload_folder  # type: ignore[attr-defined]


def is_flash_attention(model: PreTrainedModel) -> bool:
    """Return True for flash attention, of a package or of the Hub (``kernels-community/flash-attn2``)."""
    from transformers.utils.generic import is_flash_attention_requested

    return is_flash_attention_requested(model.config)


def supports_attention_interface(model: PreTrainedModel) -> bool:
    """Return True if ``model`` calls attention functions of ``AttentionInterface``."""
    return bool(getattr(model, "_supports_attention_backend", False))


def supports_sdpa(model: PreTrainedModel) -> bool:
    """Return True if ``model`` loads with "sdpa"; Gemma 2 does not since 5.24."""
    return bool(getattr(model, "_supports_sdpa", False))


#: Function of many modeling files, which the forward of a mixture of experts calls by this name.
BALANCING_LOSS = "load_balancing_loss_func"


def balancing_scope(model: nn.Module) -> dict[str, Any] | None:
    """Return the globals in which the forward of ``model`` looks up ``load_balancing_loss_func``.

    None if it does not call one of the signature that 31 modeling files have (seen in 5.19 to 5.24).
    """
    forward = inspect.unwrap(type(model).forward)
    scope = getattr(forward, "__globals__", {})
    names = ("gate_logits", "num_experts", "top_k", "attention_mask")
    function = scope.get(BALANCING_LOSS) if BALANCING_LOSS in forward.__code__.co_names else None
    return scope if function and tuple(inspect.signature(function).parameters) == names else None


def has_routers(model: nn.Module) -> bool:
    """Return True unless no module of ``model`` is of a class whose router logits transformers records."""
    declared = [getattr(each, "_can_record_outputs", None) or {} for each in model.modules()]
    found = [recorded["router_logits"] for recorded in declared if "router_logits" in recorded]
    kinds = [one for each in found for one in (each if isinstance(each, list) else [each])]
    classes = tuple(getattr(kind, "target_class", kind) for kind in kinds)
    return not classes or any(isinstance(module, classes) for module in model.modules())


def checkpointed_layers(model: nn.Module) -> list[tuple[nn.Module, Callable[..., Any]]]:
    """Return the layers that recompute their activations, in order, and the checkpoint function of each.

    Layers are those of the class of the last one: a vision tower, which comes first, is left out.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [
        (module, getattr(module, "_gradient_checkpointing_func"))  # noqa: B009
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
    ]
    return [(layer, function) for layer, function in layers if type(layer) is type(layers[-1][0])]


def set_checkpoint_function(layer: nn.Module, function: Callable[..., Any]) -> None:
    """Replace the function that runs ``layer`` under gradient checkpointing, ``function(forward, *args)``."""
    layer._gradient_checkpointing_func = function  # type: ignore[assignment]


@contextmanager
def wrapped_checkpoints(model: nn.Module, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Context manager in which ``wrapper(own, forward, *args)`` runs layers under gradient checkpointing."""
    own: dict[nn.Module, Any] = {
        layer: layer._gradient_checkpointing_func
        for layer in model.modules()
        if getattr(layer, "gradient_checkpointing", False) and hasattr(layer, "_gradient_checkpointing_func")
    }
    for layer, function in own.items():
        set_checkpoint_function(layer, partial(wrapper, function))
    try:
        yield
    finally:
        for layer, function in own.items():
            set_checkpoint_function(layer, function)


def supports_cache_in_checkpoints() -> bool:
    """Return True if layers under gradient checkpointing can be given a cache (seen in 5.19 to 5.24)."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return hasattr(GradientCheckpointingLayer, "_can_checkpoint_with_cache")


@contextmanager
def checkpoints_keep_cache(model: nn.Module) -> Iterator[None]:
    """Context manager in which layers under gradient checkpointing receive the cache of the forward pass."""
    layers = [
        layer for layer in model.modules() if getattr(layer, "_can_checkpoint_with_cache", None) is False
    ]
    for layer in layers:
        layer._can_checkpoint_with_cache = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            del layer._can_checkpoint_with_cache


def is_stateful(model: nn.Module) -> bool:
    """Return True if ``model`` keeps a recurrent state beside the key-value cache."""
    return bool(getattr(model, "_is_stateful", False))


def supports_dynamic_cache(model: GenerativePreTrainedModel) -> bool:
    """Return True if ``model.generate`` creates a ``DynamicCache`` by default."""
    return model._supports_default_dynamic_cache()


#: Layers of a cache that have one row per row of the batch: keys and values, or states; or nothing, where
#: they share those of another layer (``DummyLayer`` since 5.24, no layer before).
_CACHE_LAYERS = {
    *("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer"),
    *("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"),
}


def cache_without_rows(model: PreTrainedModel) -> tuple[str, bool]:
    """Return why rows of the cache of ``model`` cannot be selected, or "", and True for an unknown kind."""
    from transformers import DynamicCache

    layers = DynamicCache(config=model.config).layers
    if is_stateful(model) and not any(hasattr(layer, "conv_states") for layer in layers):
        return "its states are not in the cache of transformers", False
    if not any(hasattr(layer, "keys") for layer in layers):
        return "its cache has no layer of attention", False  # and does not know its length
    unknown = sorted({type(layer).__name__ for layer in layers} - _CACHE_LAYERS)
    return f"its cache has {', '.join(unknown)}" if unknown else "", bool(unknown)


def select_cache_rows(layer: Any, rows_R: torch.Tensor) -> None:
    """Replace the rows of a cache layer by ``rows_R``, which may repeat rows.

    Layers with states select them in the method of beam search alone (5.19 to 5.24).
    """
    if hasattr(layer, "conv_states"):
        layer.reorder_cache(rows_R)
    else:
        layer.batch_select_indices(rows_R)


def cache_argument(model: nn.Module) -> str | None:
    """Return the name of the key-value cache in the forward of ``model``, its outputs and the decoding loop.

    ``cache`` since 5.24, ``past_key_values`` before; None if the forward does not have it.
    """
    from transformers import GenerationMixin

    of_loop = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    name = "cache" if "cache" in of_loop else "past_key_values"
    return name if name in inspect.signature(model.forward).parameters else None


def old_cache_argument(model: nn.Module) -> str:
    """Return the reason why ``generate`` cannot pass the cache to ``model``, and the remedies; or "".

    A model with an own ``prepare_inputs_for_generation`` may rename it there.
    """
    from transformers import GenerationMixin, __version__

    name = "prepare_inputs_for_generation"
    renames = getattr(getattr(model, name, None), "__func__", None) is not getattr(GenerationMixin, name)
    has_old_name = "past_key_values" in inspect.signature(model.forward).parameters
    if renames or not has_old_name or cache_argument(model) is not None:
        return ""
    return (
        f"the forward of {type(model).__name__} has the argument past_key_values, but generate of "
        f"transformers {__version__} passes the key-value cache as cache; rename it in the model's arguments "
        "and outputs, install transformers<5.24, or sample slowly without a cache: "
        "generation_kwargs={'use_cache': False}"
    )


def has_stock_sampling_loop(model: nn.Module) -> bool:
    """Return True if neither class nor instance overrides ``generate`` or ``_sample``."""
    return _has_stock(model, "generate", "_sample")


def has_stock_processors(model: nn.Module) -> bool:
    """Return True if ``generate`` makes the logits processors and stopping criteria of its settings alone."""
    return _has_stock(model, "_get_logits_processor", "_get_stopping_criteria")


def _has_stock(model: nn.Module, *names: str) -> bool:
    from transformers import GenerationMixin

    methods = {name: getattr(getattr(model, name, None), "__func__", None) for name in names}
    return all(method is getattr(GenerationMixin, name) for name, method in methods.items())


def sampling_loop(
    model: GenerativePreTrainedModel,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> torch.Tensor:
    """Run the decoding loop that ``generate`` runs to sample; returns prompts and completions."""
    return model._sample(  # type: ignore[return-value]
        input_ids,
        logits_processor=processors,
        stopping_criteria=stopping_criteria,
        generation_config=config,
        **model_kwargs,
    )


def prefill(
    model: GenerativePreTrainedModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> ModelOutput:
    """Run the prompt through ``model`` as ``generate`` does."""
    return model._prefill(input_ids, config, model_kwargs)  # type: ignore[arg-type]


@cache
def cast_experts(device_type: str) -> None:
    """Let autocast on ``device_type`` reach the grouped products of experts.

    torch has them outside autocast (seen in 2.13): float32 weights would train in float32, and be sampled in
    half precision by the products that ``generate`` decodes with.
    """
    import torch
    from torch.overrides import _get_current_function_mode
    from transformers.integrations import moe

    own = moe._grouped_mm

    def grouped_mm(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        # Not where functions are replaced: the layout check computes its reference in float32.
        if torch.is_autocast_enabled(device_type) and _get_current_function_mode() is None:
            dtype = torch.get_autocast_dtype(device_type)
            input, weight = input.to(dtype), weight.to(dtype)
        return own(input, weight, offs)

    moe._grouped_mm = grouped_mm


def optimize_for_decode(model: GenerativePreTrainedModel) -> AbstractContextManager[None]:
    """Return the context manager in which ``generate`` decodes."""
    return model._optimize_model_for_decode()


def update_model_kwargs(
    model: GenerativePreTrainedModel, outputs: ModelOutput, model_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the model inputs of the next decoding step."""
    return model._update_model_kwargs_for_generation(outputs, model_kwargs)


def to_checkpoint_names(model: PreTrainedModel) -> Callable[[Weights], Weights]:
    """Return a function from names and shapes of weights in memory to those in checkpoints."""
    conversions = getattr(model, "_weight_conversions", None)  # set by from_pretrained
    if conversions is None and hasattr(model, "config"):
        from transformers.conversion_mapping import get_model_conversion_mapping

        conversions = get_model_conversion_mapping(model, add_legacy=False)
    if not conversions:
        return lambda weights: weights
    from transformers.core_model_loading import revert_weight_conversion

    return lambda weights: revert_weight_conversion(model, weights)
