"""A vLLM engine inside the trainer's process.

The engine starts from the policy's config with dummy weights. Weights are pushed before the first generation
and after each optimizer step, from the memory of this process.
"""

from __future__ import annotations

import copy
import logging
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from groupwise.compat.vllm import (
    abort_on_error,
    has_bitsandbytes,
    preserve_buffers,
    reset_encoder_cache,
    shut_down,
)
from groupwise.config.grpo_config import GRPOConfig
from groupwise.errors import BackendError, ConfigError
from groupwise.generation.base import (
    RUN_SETTINGS,
    BackendEntry,
    GenerationBackend,
    ProcessingClass,
)
from groupwise.generation.vllm.engine import check_engine, engine_arguments, sampling_arguments
from groupwise.generation.vllm.images import (
    check_engine_images,
    check_expanded,
    engine_prompt,
    has_multimodal_classes,
)
from groupwise.generation.vllm.isolation import preserve_model_classes, preserve_rng_state
from groupwise.generation.vllm.plugin import register
from groupwise.generation.vllm.sampling import Request, group_requests, num_logprobs, sampling_mask
from groupwise.generation.vllm.tensor_parallel import TensorParallelGroup
from groupwise.generation.vllm.weight_sync import (
    FullWeightSync,
    LoRAWeightSync,
    WeightSync,
    adapter_arguments,
)
from groupwise.policy.introspection import CausalLM, adapters_of, is_quantized, without_adapter
from groupwise.policy.quantization import check_quantization_for_vllm
from groupwise.policy.weight_iterator import WeightSource
from groupwise.records import Completion, SamplingOptions
from groupwise.tokenization.images import is_processor
from groupwise.tokenization.text import end_tokens as find_end_tokens
from groupwise.tokenization.text import text_tokenizer

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import CompletionOutput

logger = logging.getLogger(__name__)


class ColocatedBackend(GenerationBackend):
    """Samples with a vLLM engine in the trainer's process and on its device.

    Args:
        engine: a ``vllm.LLM``.
        sampling: fields of ``SamplingParams`` shared by all requests.
        end_tokens: token ids that end a completion.
        max_tokens: ``max_completion_length``.
        group: ranks that share the engine.
        weight_sync: pushes weights into the engine.
        seed: of the run; request seeds are derived from it, the step, the rank and the prompt.
        process_index: rank of this process.
        sleeps: free the engine's memory while the trainer trains.
        with_images: the engine processes images.
    """

    def __init__(
        self,
        engine: LLM,
        sampling: dict[str, Any],
        end_tokens: frozenset[int],
        max_tokens: int,
        group: TensorParallelGroup,
        weight_sync: WeightSync,
        *,
        seed: int = 0,
        process_index: int = 0,
        sleeps: bool = False,
        with_images: bool = False,
    ) -> None:
        self.engine: LLM | None = engine
        self.supports_images = with_images
        self.sampling, self.end_tokens = sampling, end_tokens
        self.max_tokens, self.group, self.weight_sync, self.sleeps = max_tokens, group, weight_sync, sleeps
        self.max_model_len: int = engine.model_config.max_model_len
        self.context_length = self.max_model_len
        self.seed, self.process_index = seed, process_index
        self._num_samples: dict[int, int] = {}  # by prompt, at step _num_samples_step
        self._num_samples_step: int | None = None
        self._max_logprobs: int = engine.model_config.max_logprobs
        self.asleep: set[str] = set()
        self.release()

    def reports_sampling_mask(self, generation_kwargs: Mapping[str, Any]) -> bool:
        """Return True with top_k: log-probs of all tokens of the sampling mask are requested."""
        return 0 < num_logprobs({**self.sampling, **generation_kwargs}) <= self._max_logprobs

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions = RUN_SETTINGS
    ) -> list[Completion]:
        """Sample one completion per prompt; adjacent equal prompts are the samples of one request.

        Raises:
            BackendError: a prompt leaves no room for a completion, or the engine has no weights.
        """
        if self.version is None:
            raise BackendError("the engine has no weights; call sync_weights before generate")
        self._wake("kv_cache")
        limits = self._limits(prompts, sampling)
        requests = group_requests(
            prompts,
            limits,
            self.seed,
            self.version,
            self.process_index,
            self._num_samples,
            sampling.images,
        )
        settings = {**self.sampling, **sampling.generation_kwargs}
        with preserve_rng_state():
            outputs = self.group.generate(requests, lambda all_ranks: self._generate(all_ranks, settings))
        return [completion for output in outputs for completion in output]

    def _limits(self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions) -> list[int]:
        """Return the maximum completion lengths, within the engine's context."""
        limits = sampling.max_tokens or [self.max_tokens] * len(prompts)
        rooms = [self.max_model_len - len(prompt) for prompt in prompts]
        if min(rooms, default=1) < 1:
            raise BackendError(
                f"a prompt has {max(map(len, prompts))} tokens, but the engine's context of "
                f"{self.max_model_len} tokens must hold prompt and completion; raise vllm_max_model_length, "
                "or set max_prompt_length"
            )
        return [min(pair) for pair in zip(limits, rooms, strict=True)]

    def _generate(self, requests: list[Request], settings: dict[str, Any]) -> list[list[Completion]]:
        """Return the samples of each request."""
        from vllm.sampling_params import SamplingParams

        prompts = [engine_prompt(request) for request in requests]
        counts = [request.num_samples(settings["temperature"]) for request in requests]
        wanted = num_logprobs(settings)
        logprobs = wanted if wanted <= self._max_logprobs else 0  # a script may have raised top_k since
        params = [
            SamplingParams(
                **settings, logprobs=logprobs, n=count, max_tokens=request.max_tokens, seed=request.seed
            )
            for request, count in zip(requests, counts, strict=True)
        ]
        with abort_on_error(self._engine):
            outputs = self._engine.generate(
                prompts, params, use_tqdm=False, **self.weight_sync.generate_kwargs()
            )
        for request, output in zip(requests, outputs, strict=True):
            check_expanded(request, output.prompt_token_ids, "the engine")
        return [
            [self._completion(output.outputs[row % count], logprobs > 0) for row in range(len(request.rows))]
            for request, count, output in zip(requests, counts, outputs, strict=True)
        ]

    def _completion(self, sample: CompletionOutput, is_truncated: bool) -> Completion:
        tokens = list(sample.token_ids)
        logps = [entry[token].logprob for token, entry in zip(tokens, sample.logprobs, strict=True)]
        kept = None
        if is_truncated:
            positions = ([(token, one.logprob) for token, one in entry.items()] for entry in sample.logprobs)
            kept = sampling_mask(positions, excluded=-math.inf)
        return Completion(
            tokens,
            logps=logps,
            truncated=sample.finish_reason == "length",
            versions=[self.version] * len(tokens),  # type: ignore[list-item]  # generate checked it
            sampling_mask=kept,
        )

    def sync_weights(self, source: WeightSource, *, step: int) -> None:
        """Load the weights of optimizer step ``step`` and clear the prefix cache; a no-op if loaded."""
        if self.version == step:
            return
        self._wake("weights")
        self.version = None  # a failed push leaves no usable weights
        with preserve_rng_state():
            self.weight_sync.push(source, step)
        self._engine.reset_prefix_cache()
        if self.supports_images:
            reset_encoder_cache(self._engine)  # outputs of the vision tower with the weights before
        self.version = step
        if self._num_samples_step != step:
            self._num_samples_step, self._num_samples = step, {}

    def release(self) -> None:
        """Put the engine to sleep until the next sync, if sleep mode is on."""
        if self.sleeps and not self.asleep:
            self._engine.sleep(level=self.weight_sync.sleep_level)
            self.asleep = {"weights", "kv_cache"}
            self.version = None

    def _wake(self, part: str) -> None:
        if part in self.asleep:
            torch.cuda.empty_cache()  # return the trainer's unused memory to the device
            self._engine.wake_up(tags=[part])
            self.asleep.discard(part)

    @property
    def _engine(self) -> LLM:
        if self.engine is None:
            raise BackendError("the backend is closed")
        return self.engine

    def state_dict(self) -> dict[str, Any]:
        """Return the number of samples per prompt in this step, which continues the sequence of seeds."""
        return {"num_samples": (self._num_samples_step, dict(self._num_samples))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self._num_samples_step, self._num_samples = state["num_samples"]

    def close(self) -> None:
        """Shut the engine down and free its memory."""
        self.weight_sync.close()
        if self.engine is not None:
            shut_down(self.engine)
            self.engine = None
        self.version = None


def make_backend(
    policy: Callable[[], PreTrainedModel],
    config: GRPOConfig,
    processing_class: ProcessingClass,
    suppress_tokens: Sequence[int] = (),
) -> ColocatedBackend:
    """Start an engine in this process; see :class:`groupwise.generation.base.BackendFactory`."""
    model: CausalLM = policy()
    check_policy(model)
    from vllm import LLM

    register()
    end_tokens = find_end_tokens(model.generation_config, text_tokenizer(processing_class))
    sampling = sampling_arguments(config, end_tokens, suppress_tokens)
    group = TensorParallelGroup.of(config.vllm_tensor_parallel_size, config.world_size, config.process_index)
    base = without_adapter(model)
    with tempfile.TemporaryDirectory(prefix="groupwise-") as directory, preserve_rng_state():
        processing_class.save_pretrained(directory)
        arguments = engine_arguments(config, directory, _dtype(config, base))
        only_adapter = sends_only_adapter(model, arguments)
        quantized = only_adapter and loads_quantized(model, arguments)
        _save_config(base, directory, quantized=quantized)
        with_processor = is_processor(processing_class)
        if with_processor:
            arguments.setdefault("language_model_only", not has_multimodal_classes())
        if only_adapter:
            arguments |= adapter_arguments(model, directory, quantized=quantized)
        with preserve_model_classes(base), preserve_buffers():
            engine = LLM(**arguments)
    return ColocatedBackend(
        engine,
        sampling,
        frozenset(end_tokens),
        config.max_completion_length,
        group,
        LoRAWeightSync(engine) if only_adapter else FullWeightSync(engine),
        seed=config.seed,
        process_index=config.process_index,
        sleeps=config.vllm_enable_sleep_mode,
        with_images=with_processor and not arguments["language_model_only"],
    )


def _save_config(model: PreTrainedModel, directory: str, *, quantized: bool) -> None:
    """Write the engine's model config, without the policy's quantization unless the engine shares it."""
    model_config = copy.deepcopy(model.config)
    # A model constructed from a config names no architecture; vLLM needs it.
    model_config.architectures = model_config.architectures or [type(model).__name__]
    if not quantized and hasattr(model_config, "quantization_config"):
        del model_config.quantization_config
    model_config.save_pretrained(directory)


def sends_only_adapter(model: CausalLM, arguments: Mapping[str, Any]) -> bool:
    """Return ``enable_lora``, by default True for a quantized policy: the base weights are not sent."""
    return bool(arguments.get("enable_lora", is_quantized(model)))


def loads_quantized(model: CausalLM, arguments: Mapping[str, Any]) -> bool:
    """Return True if the engine computes with the policy's 4-bit weights, else with full matrices of them.

    vLLM loads 4-bit weights with the package vllm-bnb-plugin, for engines in 16 bits. Without it, a warning
    has the memory that the engine's weights take.
    """
    if not is_quantized(model):
        return False
    chosen = arguments.get("quantization")
    in_16_bits = arguments["dtype"] in ("bfloat16", "float16")
    if chosen in (None, "bitsandbytes") and in_16_bits and has_bitsandbytes():
        return True
    if chosen is None:
        size = model.num_parameters() * (2 if in_16_bits else 4)
        logger.warning(
            "the policy has 4-bit weights, but the vLLM engine holds them as %s matrices (%.1f GB): 4-bit "
            "layers need the package vllm-bnb-plugin and bf16 or fp16",
            arguments["dtype"],
            size / 1e9,
        )
    return False


def check_policy(model: CausalLM) -> None:
    """Raise ConfigError for a policy whose weights a vLLM engine cannot load."""
    adapters = adapters_of(model)
    if is_quantized(model):
        check_quantization_for_vllm(model.config.quantization_config, adapters)
    if any(config.is_prompt_learning for config in adapters):
        raise ConfigError(
            "the adapter adds virtual tokens to prompts, which cannot be merged into weights; use LoRA or "
            "another adapter of weights, or set use_vllm=False"
        )
    # Vision-language models have it in the config around that of the text.
    tied = any(
        getattr(config, "tie_word_embeddings", False)
        for config in (model.config, model.config.get_text_config())
    )
    if tied and hasattr(model.get_output_embeddings(), "modules_to_save"):
        raise ConfigError(
            "modules_to_save has the output layer of a model that ties it to its embeddings: vLLM ties them, "
            "too, and would not use the trained copy; set tie_word_embeddings=False in the model's config, "
            "or use_vllm=False"
        )


def _dtype(config: GRPOConfig, model: PreTrainedModel) -> str:
    """Return the name of the trainer's compute dtype."""
    if config.bf16 or config.fp16:
        return "bfloat16" if config.bf16 else "float16"
    return str(model.dtype).removeprefix("torch.")


ENTRY = BackendEntry(make_backend, check_engine, supports_images=True, check_images=check_engine_images)
