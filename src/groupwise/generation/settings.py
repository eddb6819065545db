"""Settings of transformers' ``generate``: those of a run, of a model, and of our decoding loop."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from groupwise.compat.accelerate import forward_autocast
from groupwise.compat.transformers import (
    cache_argument,
    cache_without_rows,
    has_stock_processors,
    has_stock_sampling_loop,
    old_cache_argument,
    supports_dynamic_cache,
)
from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import TRUNCATING, check_names, json_dict, truncating
from groupwise.errors import ConfigError, boundary, shortened
from groupwise.generation.truncation import SamplingMaskRecorder
from groupwise.policy.introspection import (
    CausalLM,
    cannot_continue_images,
    has_prompt_learning,
    without_adapter,
    without_router_logits,
)
from groupwise.records.fast_paths import FastPath
from groupwise.tokenization.text import end_tokens

logger = logging.getLogger(__name__)


#: Settings that remove tokens from the distribution, with their neutral value beside None. A sampling mask
#: contains their effect, too.
_MASKING: dict[str, object] = {
    **{"no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None},
    **{"suppress_tokens": [], "begin_suppress_tokens": [], "min_length": 0, "min_new_tokens": 0},
    **{"forced_bos_token_id": None, "forced_eos_token_id": None},
}


#: Settings that change the probabilities otherwise, the search for completions, or their number.
_CHANGING: dict[str, object] = {
    **{"encoder_repetition_penalty": 1.0, "sequence_bias": None, "exponential_decay_length_penalty": None},
    **{"guidance_scale": 1.0, "watermarking_config": None, "num_beams": 1, "penalty_alpha": 0.0},
    **{"num_beam_groups": 1, "dola_layers": None, "constraints": None, "force_words_ids": None},
    **{"prompt_lookup_num_tokens": None, "assistant_early_exit": None, "use_mtp": False},
    **{"num_return_sequences": 1, "return_dict_in_generate": False, "token_healing": False},
}


#: Names by transformers of the decoders that continue each row of a batch.
_DECODERS = ("sample", "greedy_search", "beam_search", "beam_sample")


#: Values of ``cache_implementation`` whose caches grow with the tokens; others are allocated at once.
GROWING_CACHES = (None, "auto", "dynamic", "dynamic_full", "offloaded", "quantized")


#: Settings of a model's own generation config that act on completions. ``generate`` reads them where a run
#: sets none.
MODEL_SETTINGS = {
    **{**TRUNCATING, **_MASKING, **_CHANGING},
    **{"remove_invalid_values": False, "renormalize_logits": False},
}


@contextmanager
def without_model_settings(model: CausalLM) -> Iterator[None]:
    """Context manager in which ``generate`` samples with the given settings and adds none of the model's own.

    Log-probs are those of the distribution that the settings of the run describe.
    """
    base = without_adapter(model)
    given = base.generation_config
    neutral = copy.deepcopy(given)
    for name in MODEL_SETTINGS:
        if getattr(neutral, name, None) is not None:
            setattr(neutral, name, None)
    base.generation_config = neutral
    try:
        with without_router_logits(model):
            yield
    finally:
        base.generation_config = given


def warn_about_model_settings(model: CausalLM, config: GenerationConfig) -> None:
    """Log the settings of the model's generation config that the run neither sets nor uses."""
    defaults = without_adapter(model).generation_config
    found = {name: getattr(defaults, name, None) for name in MODEL_SETTINGS}
    ignored = {
        name: value
        for name, value in found.items()
        if value not in (None, MODEL_SETTINGS[name]) and getattr(config, name, None) is None
    }
    if ignored:
        logger.warning(
            "settings of the model's generation config are not used, because log-probs are those of the "
            "distribution that the run's settings describe; generation_kwargs=%s would apply them",
            shortened(ignored),
        )


def check_cache(config: GRPOConfig, model: CausalLM) -> None:
    """Check that the model has a key-value cache, and one that is allocated in advance a single dtype.

    Under autocast values have half precision, and keys, which are rotated by position, that of the weights.

    Raises:
        ConfigError: no cache of a known name; or one that is allocated in advance, and half precision by
            autocast over float32 weights. DeepSpeed converts the weights instead.
    """
    reason = old_cache_argument(without_adapter(model))
    if reason and json_dict(config.generation_kwargs).get("use_cache") is not False:
        raise ConfigError(reason)
    name = "bf16" if config.bf16 else "fp16" if config.fp16 else None
    grows = config.cache_implementation in GROWING_CACHES or config.deepspeed_plugin is not None
    if name is not None and model.dtype == torch.float32 and not grows:
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[name]
        raise ConfigError(
            f"cache_implementation={config.cache_implementation!r} allocates a key-value cache of one dtype, "
            f"and under {name}=True float32 weights give keys in float32 and values in {dtype}; set "
            f"{name}=False, load the weights with model_init_kwargs={{'dtype': '{dtype}'}}, or leave "
            "cache_implementation at its default"
        )


def warn_about_run_settings(config: GRPOConfig) -> None:
    """Log the settings of the run that change the distribution of a token, but not its log-prob."""
    neutral = {"repetition_penalty": 1.0, "do_sample": True, **_CHANGING}
    if not truncating(config):  # then completions have a sampling mask
        neutral |= _MASKING
    given = {**json_dict(config.generation_kwargs), "repetition_penalty": config.repetition_penalty}
    changes = {n: value for n, value in given.items() if n in neutral and value not in (None, neutral[n])}
    if changes:
        logger.warning(
            "completions are sampled with %s, but log-probs are those of the distribution without these "
            "settings, which biases the importance ratio",
            shortened(changes),
        )


def check_config(config: GRPOConfig) -> None:
    """Check ``generation_kwargs``, of which ``generate`` ignores names that it does not know.

    Raises:
        ConfigError: a name is unknown, with the nearest one; transformers refuses a value; another decoder
            is selected; or ``stop_strings``, which end a completion within its tokens.
    """
    given = json_dict(config.generation_kwargs)
    if (stop_strings := given.get("stop_strings")) is not None:
        raise ConfigError(
            f"generation_kwargs={{'stop_strings': {shortened(stop_strings)}}}: completions of transformers "
            "end with an end token, not with a text; give the ids of tokens that end one, generation_kwargs="
            "{'eos_token_id': [...]}, or use vLLM with generation_kwargs={'stop': [...]}"
        )
    known = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    check_names("generation_kwargs", sorted(given), known, "transformers")
    shown = f"generation_kwargs={shortened(given)}"
    with boundary(ConfigError, shown):
        settings = GenerationConfig(**{"do_sample": True, **given, "top_k": config.top_k})
    decoder = settings.get_generation_mode().value
    if decoder not in _DECODERS:
        raise ConfigError(
            f"{shown} selects {decoder}, which does not continue each row of a batch or is code of the Hub; "
            f"allowed: {', '.join(_DECODERS)}"
        )


def generation_settings(
    config: GRPOConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    suppress_tokens: Sequence[int] = (),
) -> dict[str, Any]:
    """Return the ``generate`` settings that all requests of a run share, ``generation_kwargs`` included.

    Temperature, top_p, top_k, min_p and repetition_penalty are not among them: they come with each request.

    Args:
        suppress_tokens: token ids that are not sampled, in addition to those of ``generation_kwargs``.
    """
    cache = None if config.cache_implementation == "auto" else config.cache_implementation
    settings: dict[str, Any] = {
        "max_new_tokens": config.max_completion_length,
        "do_sample": True,
        "cache_implementation": cache,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": end_tokens(model.generation_config, tokenizer),
        "use_cache": True,
    }
    if cache is not None:
        # With a static cache generate would compile itself, again for every batch size and prompt length.
        settings["disable_compile"] = True
    settings.update(json_dict(config.generation_kwargs))
    if suppress_tokens:
        settings["suppress_tokens"] = sorted({*suppress_tokens, *(settings.get("suppress_tokens") or ())})
    return settings


#: Generation settings that act on each row independently, through a logits processor or a stopping criterion.
ROW_SETTINGS = frozenset(
    {
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "do_sample"),
        *("temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias"),
        *("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
        *("exponential_decay_length_penalty", "renormalize_logits", "remove_invalid_values"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "transformers_version", "_from_model_config"),
        "decoder_start_token_id",  # read for models with an encoder alone
    }
)


#: Values of other settings that have no effect; nor have None and False, apart from ``use_cache``.
NEUTRAL = {"use_cache": True, "cache_implementation": "dynamic", "num_beams": 1, "num_return_sequences": 1}


def decoding_path(model: CausalLM, config: GenerationConfig) -> FastPath:
    """Return the decoding loop of a run: ``decode_groups``, or that of ``model.generate`` with the reason.

    Ranks whose parameters are sharded leave the own loop at different steps, so they must not use it.
    """
    stock = partial(FastPath, "decoding", "transformers")
    base: CausalLM = without_adapter(model)
    name = type(base).__name__
    if config.cache_implementation is not None:
        return stock(f"cache_implementation={config.cache_implementation!r}")
    if not has_stock_sampling_loop(base) or "generate" in vars(model):  # on the instance of a PEFT model
        return stock(f"{name} has a generate or _sample of its own", warns=True)
    if not has_stock_processors(base):  # which may act on several rows
        return stock(f"{name} has logits processors or stopping criteria of its own", warns=True)
    if has_prompt_learning(model):
        return stock("the adapter adds virtual tokens")
    if base.config.is_encoder_decoder:
        return stock(f"{name} has an encoder")
    if no_images := cannot_continue_images(model):
        return stock(no_images)
    if not supports_dynamic_cache(base):
        return stock(f"transformers makes no DynamicCache for {name}")
    reason, unknown = cache_without_rows(base)
    if reason:
        return stock(reason, warns=unknown)
    if cache_argument(base) is None:
        return stock(f"the forward of {name} has no argument of a known name for the cache", warns=True)
    given = {**base.generation_config.to_diff_dict(), **config.to_diff_dict()}
    settings = [
        name
        for name, value in given.items()
        if not (
            name in ROW_SETTINGS or value == NEUTRAL.get(name) or (value is False and name != "use_cache")
        )
    ]
    if settings:
        return stock(f"{', '.join(settings)} may act on several rows")
    return FastPath("decoding", "own loop")


def make_recorder(model: CausalLM, config: GenerationConfig) -> SamplingMaskRecorder | None:
    """Return a recorder if ``config`` truncates the sampling distribution of ``model.generate``.

    Settings of the model do not count: the backend samples under ``without_model_settings``.

    Returns:
        None without truncation, with greedy decoding or beams, and if the model has its own decoding loop.
    """
    given = {name: getattr(config, name, None) for name in TRUNCATING}
    truncates = any(value not in (None, TRUNCATING[name]) for name, value in given.items())
    samples = config.do_sample is not False
    return SamplingMaskRecorder() if truncates and samples and can_record(model, config) else None


def can_record(model: CausalLM, config: GenerationConfig) -> bool:
    """Return True if ``model`` samples with the decoding loop of transformers, each row by itself."""
    return has_stock_sampling_loop(without_adapter(model)) and config.num_beams in (None, 1)


@contextmanager
def autocast_of_training(model: CausalLM) -> Iterator[None]:
    """Context manager in which ``generate`` computes in the dtype of the training forward.

    accelerate puts autocast around the forward of the policy alone. An adapter's ``generate`` calls the
    forward of the model below it, which would sample in the dtype of the weights and train on log-probs of
    another distribution.
    """
    dtype, base = forward_autocast(model), without_adapter(model)
    if dtype is None or base is model:
        yield
        return
    forward = base.forward  # an instance attribute hides the method of the class until it is deleted
    base.forward = convert_outputs_to_fp32(torch.autocast(base.device.type, dtype)(forward))
    try:
        yield
    finally:
        del base.forward


def keep_autocast_weights(device: torch.device) -> AbstractContextManager[object]:
    """Context manager under which autocast casts each weight once instead of once per forward.

    Autocast clears its cache of casted weights when the outermost autocast context exits; this one is outside
    the autocast context of each forward.
    """
    dtype, enabled = torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, dtype, enabled)  # as it is
