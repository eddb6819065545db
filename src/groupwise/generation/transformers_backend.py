"""Generation with the policy's own ``generate``."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import convert_outputs_to_fp32
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from groupwise.compat.accelerate import forward_autocast
from groupwise.compat.deepspeed import gathered
from groupwise.compat.transformers import is_zero3_enabled, old_cache_argument
from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import SAMPLING_FIELDS, TRUNCATING, sampler_settings, truncating
from groupwise.core.padding import length_mask, pad_sequences
from groupwise.cpu import cpu_generation
from groupwise.cpu.linear import stock_linears
from groupwise.cpu.multinomial import RowStreams
from groupwise.distributed import requires_lockstep_forwards
from groupwise.errors import BackendError, ConfigError, boundary, shortened
from groupwise.generation.base import (
    RUN_SETTINGS,
    BackendEntry,
    GenerationBackend,
    ProcessingClass,
    check_names,
    json_dict,
)
from groupwise.generation.decoding import (
    DecodingRows,
    ForeignProcessorError,
    RowSampler,
    can_decode_groups,
    decode_groups,
    decoding_path,
    group_prompts,
    keep_autocast_weights,
)
from groupwise.generation.truncation import can_record, make_recorder, sample_and_record
from groupwise.policy.introspection import (
    CausalLM,
    evaluation_mode,
    has_prompt_learning,
    unwrapped,
    without_adapter,
    without_router_logits,
)
from groupwise.random_state import DrawnFrom
from groupwise.records import Completion, SamplingOptions
from groupwise.records.fast_paths import FastPath
from groupwise.records.images import ImageInputs, join_images
from groupwise.records.sampling_mask import SamplingMask
from groupwise.tokenization.text import end_tokens, text_tokenizer

if TYPE_CHECKING:
    from groupwise.generation.decoding_graph import StepGraphs

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


class TransformersBackend(GenerationBackend):
    """Samples with ``model.generate``, always from the current weights.

    ``decode_groups`` replaces the decoding loop inside ``generate`` where it applies: it processes each
    prompt once for its whole group, and removes finished rows from the batch. With ``stock_decoding`` loop,
    cache and linear layers are those of transformers and PyTorch, bit for bit.

    Args:
        model: returns the unwrapped policy; called at every generation because training may wrap it again.
        generation_config: what is the same for all requests; see :func:`generation_config`.
        config: has the sampler settings that a request leaves out; None: ``generation_config`` has them.
        pad_to_multiple_of: pad prompts to a multiple of this length; None: to the longest.
        gather_weights: the model is partitioned by ZeRO-3, and each call gathers it once. Otherwise every
            forward of a partitioned model gathers its layers one after the other.
    """

    supports_images = True

    def __init__(
        self,
        model: Callable[[], PreTrainedModel],
        generation_config: GenerationConfig,
        config: GRPOConfig | None = None,
        *,
        pad_to_multiple_of: int | None = None,
        gather_weights: bool = False,
    ) -> None:
        self.model, self.generation_config, self.config = model, generation_config, config
        self.pad_to_multiple_of = pad_to_multiple_of
        self.gather_weights = gather_weights
        self.stock_decoding = generation_config.cache_implementation is not None
        self.end_tokens = frozenset(end_tokens(generation_config))
        self.graphs: StepGraphs | None = None  # on a CUDA device

    @property
    def requires_all_ranks(self) -> bool:
        return requires_lockstep_forwards(self.model())

    def fast_paths(self, policy: Any) -> list[FastPath]:
        """See :meth:`GenerationBackend.fast_paths`."""
        path = decoding_path(policy, self.config_of(RUN_SETTINGS))
        if requires_lockstep_forwards(policy) and not self.gather_weights:
            path = FastPath("decoding", "transformers", "parameters are sharded, so ranks decode in step")
        elif self.stock_decoding and not path.reason:
            path = FastPath("decoding", "transformers", "cache_implementation of groupwise.trl_hooks")
        graphs = None if path.reason else self._step_graphs(policy.device)
        return [path] if graphs is None else [path, graphs.path()]

    def _step_graphs(self, device: torch.device) -> StepGraphs | None:
        """Return the use of graphs by the run; None on a device without graphs."""
        if device.type == "cuda" and self.graphs is None:
            from groupwise.generation.decoding_graph import StepGraphs

            self.graphs = StepGraphs()
        return self.graphs

    def reports_sampling_mask(self, generation_kwargs: Mapping[str, Any]) -> bool:
        """Return True unless the model has a decoding loop of its own, or beams are sampled."""
        return can_record(self.model(), self.generation_config)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions = RUN_SETTINGS
    ) -> list[Completion]:
        if has_prompt_learning(self.model()):
            from groupwise.compat.peft import virtual_tokens_once

            with virtual_tokens_once(unwrapped(self.model())):
                return self._generate_by_length(prompts, sampling)
        try:
            return self._generate(prompts, sampling)
        except ForeignProcessorError as found:
            self.stock_decoding = True
            logger.warning(
                "%s may have state per row: completions are decoded by the loop of transformers, not by "
                "groupwise's own, which is faster and removes finished rows",
                found,
            )
        return self._generate(prompts, sampling)

    def _generate_by_length(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions
    ) -> list[Completion]:
        """Sample prompts of each length apart, for adapters of virtual tokens.

        Padding would come between the virtual tokens and the prompt, and change the prompt's positions.
        """
        if requires_lockstep_forwards(self.model()) and not self.gather_weights:
            raise BackendError(
                "an adapter of virtual tokens samples prompts of each length apart, and with sharded "
                "parameters (FSDP, ZeRO-3) ranks would wait for each other forever; do not shard, or use LoRA"
            )
        completions: dict[int, Completion] = {}
        for length in dict.fromkeys(map(len, prompts)):
            rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
            per_row = {name: getattr(sampling, name) for name in ("max_tokens", "images", "seeds")}
            own: dict[str, Any] = {
                name: [values[row] for row in rows] for name, values in per_row.items() if values is not None
            }
            part = [prompts[row] for row in rows]
            of_length = self._generate(part, replace(sampling, **own), padded=False)
            completions.update(zip(rows, of_length, strict=True))
        return [completions[row] for row in range(len(prompts))]

    @torch.no_grad()
    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions, *, padded: bool = True
    ) -> list[Completion]:
        """Sample one completion per prompt in one call of ``model.generate``.

        It decodes in groupwise's loop where that applies, else in its own loop; a recorder of the sampling
        mask is part of either.
        """
        model: CausalLM = self.model()
        config, images = self.config_of(sampling), sampling.images or ()
        # Ranks with sharded parameters run forwards together, until the last row of all ranks has ended.
        lockstep = requires_lockstep_forwards(model) and not self.gather_weights
        if lockstep and not all(row.arrays for row in images):
            raise BackendError(
                "a prompt has no image, and the model's parameters are sharded: ranks with images would wait "
                "forever for this one to run the vision tower; keep only rows with images, or do not shard "
                "(ZeRO-2, DDP)"
            )
        with (
            evaluation_mode(model),  # gradient checkpointing would disable the key-value cache, too
            gathered(model) if self.gather_weights else nullcontext(),
            without_model_settings(model),
            autocast_of_training(model),
            stock_linears(model) if self.stock_decoding else cpu_generation(model),
            nullcontext() if lockstep else keep_autocast_weights(model.device),
        ):
            recorder = make_recorder(model, config)  # None: nothing is truncated
            rows = prompts  # of the prefill: B
            loop: dict[str, Any] = {"synced_gpus": False} if self.gather_weights else {}
            generator = self.generator_of(sampling, model.device)
            draws: Any = nullcontext() if generator is None else DrawnFrom(generator)
            if not (lockstep or self.stock_decoding) and can_decode_groups(model, config):
                first, copies = group_prompts(prompts, images)  # P rows, of which the loop makes B
                rows, images = [prompts[row] for row in first], [images[row] for row in first if images]
                draws = nullcontext()  # the sampler has the generator
                graphs = self._step_graphs(model.device)
                sampler, make_rows = (RowSampler, DecodingRows) if graphs is None else graphs.loop()
                make_sampler = partial(sampler, recorder=recorder, generator=generator)
                own_loop = partial(
                    decode_groups, copies=copies, make_sampler=make_sampler, make_rows=make_rows
                )
                arrays = {name for row in images for name in row.arrays}
                loop = {"custom_generate": partial(own_loop, image_arrays=arrays)}
            elif recorder is not None:
                stock_loop = partial(sample_and_record, recorder=recorder, synced_gpus=lockstep)
                loop = {"custom_generate": stock_loop}
            inputs = self._model_inputs(rows, images, padded, model.device)
            prompt_length = inputs["input_ids"].shape[1]  # L, padding included
            with draws:
                sequences = model.generate(**inputs, generation_config=config, **loop)  # (B, L + longest)
        limits = sampling.max_tokens or [config.max_new_tokens] * len(prompts)
        masks = [None] * len(prompts) if recorder is None else recorder.completions(len(prompts))
        return [
            self.completion(tokens[:limit], mask)
            for tokens, limit, mask in zip(sequences[:, prompt_length:].tolist(), limits, masks, strict=True)
        ]

    def generator_of(
        self, sampling: SamplingOptions, device: torch.device
    ) -> torch.Generator | RowStreams | None:
        """Return the random numbers of a request: those of its rows, unless samples share a generator."""
        if self.generator is None or sampling.seeds is None:
            return self.generator
        return RowStreams(sampling.seeds, device)

    def _model_inputs(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[ImageInputs],
        padded: bool,
        device: torch.device,
    ) -> dict[str, Any]:
        """Return ids and mask of the prompts, padded on the left: (B or P, L), and tensors of the images."""
        multiple = self.pad_to_multiple_of if padded else None
        pad = self.generation_config.pad_token_id
        input_ids = pad_sequences(prompts, pad, left=True, multiple_of=multiple, device=device)
        length = input_ids.shape[1]
        mask = length_mask([len(prompt) for prompt in prompts], length, left=True, device=device)
        starts = [length - len(prompt) for prompt in prompts]
        return {
            "input_ids": input_ids,
            "attention_mask": mask,
            **join_images(images, starts, length, device),
        }

    def config_of(self, sampling: SamplingOptions) -> GenerationConfig:
        """Return the settings of a request. The batch runs until the row with the highest limit has ended."""
        config = copy.deepcopy(self.generation_config)
        if sampling.max_tokens is not None:
            config.max_new_tokens = max(sampling.max_tokens)
        of_run = {} if self.config is None else vars(sampler_settings(self.config))
        given = {**of_run, **sampling.generation_kwargs}
        if given.get("temperature") == 0:
            given |= {"do_sample": False, "temperature": 1.0}
        if given.get("min_p") == 0:
            given["min_p"] = None  # 0 removes no token, but generate would sort the vocabulary to find out
        config.update(**given)
        return config

    def completion(self, tokens: list[int], mask: SamplingMask | None = None) -> Completion:
        """Return the completion that ends with the first end token of ``tokens``."""
        end = next((index + 1 for index, token in enumerate(tokens) if token in self.end_tokens), None)
        tokens = tokens[:end]
        mask = None if mask is None else mask.first(len(tokens))
        return Completion(tokens, truncated=end is None, sampling_mask=mask)


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


def _warn_about_model_settings(model: CausalLM, config: GenerationConfig) -> None:
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


def check_allocated_cache(config: GRPOConfig, model: CausalLM) -> None:
    """Check that keys and values have one dtype, which a cache that is allocated in advance needs.

    Under autocast values have half precision, and keys, which are rotated by position, that of the weights.

    Raises:
        ConfigError: half precision by autocast over float32 weights. DeepSpeed converts the weights instead.
    """
    name = "bf16" if config.bf16 else "fp16" if config.fp16 else None
    if name is not None and model.dtype == torch.float32 and config.deepspeed_plugin is None:
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
    stop_strings = json_dict(config.generation_kwargs).get("stop_strings")
    if stop_strings is not None:
        raise ConfigError(
            f"generation_kwargs={{'stop_strings': {shortened(stop_strings)}}}: completions of transformers "
            "end with an end token, not with a text; give the ids of tokens that end one, generation_kwargs="
            "{'eos_token_id': [...]}, or use vLLM with generation_kwargs={'stop': [...]}"
        )
    known = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    given = {n: v for n, v in json_dict(config.generation_kwargs).items() if n not in SAMPLING_FIELDS}
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


def make_backend(
    policy: Callable[[], PreTrainedModel],
    config: GRPOConfig,
    processing_class: ProcessingClass,
    suppress_tokens: Sequence[int] = (),
    kind: type[TransformersBackend] = TransformersBackend,
) -> TransformersBackend:
    """Construct the backend; see :class:`groupwise.generation.base.BackendFactory`."""
    if config.cache_implementation not in GROWING_CACHES:
        check_allocated_cache(config, policy())
    reason = old_cache_argument(without_adapter(policy()))
    if reason and json_dict(config.generation_kwargs).get("use_cache") is not False:
        raise ConfigError(reason)
    backend = kind(
        policy,
        generation_config(config, policy(), text_tokenizer(processing_class), suppress_tokens),
        config,
        pad_to_multiple_of=cast("int | None", config.pad_to_multiple_of),  # "auto" is resolved
        gather_weights=is_zero3_enabled() and config.ds3_gather_for_generation,
    )
    _warn_about_model_settings(policy(), backend.config_of(RUN_SETTINGS))
    warn_about_run_settings(config)
    return backend


def generation_config(
    config: GRPOConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    suppress_tokens: Sequence[int] = (),
) -> GenerationConfig:
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
    given = json_dict(config.generation_kwargs)  # keys with a field of their own are resolved to it
    settings.update({name: value for name, value in given.items() if name not in SAMPLING_FIELDS})
    if suppress_tokens:
        settings["suppress_tokens"] = sorted({*suppress_tokens, *(settings.get("suppress_tokens") or ())})
    return GenerationConfig(**settings)


ENTRY = BackendEntry(make_backend, check_config, supports_images=True)
